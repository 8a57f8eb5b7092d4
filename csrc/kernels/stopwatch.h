// SPDX-License-Identifier: Apache-2.0
// Times algorithms on one product, on operands that are not in the L2.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "candidates.h"
#include "lt_problem.h"

namespace octavo::kernels {

// Bytes on the device.
class DeviceBytes {
 public:
  explicit DeviceBytes(size_t count);
  ~DeviceBytes();
  DeviceBytes(DeviceBytes&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceBytes& operator=(DeviceBytes&&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Copies of a product's operands, enough of them to be larger than the L2 together: a step of a training run finds its
// weights and gradients cold too. Scales and bias are the caller's own.
class Rotation {
 public:
  Rotation(const Product& product, const ProductOperands& operands, cudaStream_t stream);
  const ProductOperands& next() { return copies_[turn_++ % copies_.size()]; }
  const ProductOperands& first() const { return copies_.front(); }
  size_t d_bytes() const { return d_bytes_; }

 private:
  size_t d_bytes_;
  std::vector<DeviceBytes> memory_;
  std::vector<ProductOperands> copies_;
  size_t turn_ = 0;
};

class Stopwatch {
 public:
  Stopwatch(const LtDevice& device, const Product& product, const ProductOperands& operands, cudaStream_t stream);
  ~Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // Runs it once, which also loads its kernel, and waits for it. False where cuBLASLt does not run it after all.
  bool try_out(const Candidate& candidate);
  // Sets how many launches a window has, by the time that this one takes.
  void calibrate(const Candidate& candidate);
  // Microseconds of one launch: the mean over a window, enqueued while the device is held up.
  double window(const Candidate& candidate);
  // The result, in rows spread over all of d, as float32. What was not written is NaN, or 0 if d is added to.
  std::vector<float> sampled_result(const Candidate& candidate);

 private:
  cublasStatus_t launch(const Candidate& candidate, const ProductOperands& operands);
  double timed(const Candidate& candidate, int launches);

  const LtDevice device_;
  const Product product_;
  Rotation rotation_;
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  int launches_ = 1;
  int64_t held_ns_per_launch_ = 8000;
};

}  // namespace octavo::kernels
