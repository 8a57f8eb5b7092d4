// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace octavo::ops {

// While it lives, this thread's float arithmetic keeps subnormals, whatever torch.set_flush_denormal said.
class IeeeFloats {
 public:
  IeeeFloats() : before_(read()) { write(before_ & ~kFlushing); }
  ~IeeeFloats() { write(before_); }
  IeeeFloats(const IeeeFloats&) = delete;
  IeeeFloats& operator=(const IeeeFloats&) = delete;

 private:
#if defined(__SSE2__)
  using Register = uint32_t;
  static constexpr Register kFlushing = 0x8040;  // MXCSR: FTZ and DAZ
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kFlushing = uint64_t{1} << 24;  // FPCR: FZ
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "octavo: say here how this processor is told to keep subnormals"
#endif
  const Register before_;
};

}  // namespace octavo::ops
