// SPDX-License-Identifier: Apache-2.0
// Device code: 16-bit and 32-bit floats in 16-byte words, their largest absolute value, and the cast to FP8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels.h"

namespace octavo::kernels {

constexpr uint32_t kInfBits = 0x7f800000u;

template <typename T>
struct Element;

// Each gives, for its type:
//   to_float       the value, exactly
//   pair           elements 2i and 2i+1 of consecutive 32-bit words, as floats
//   peak           running maximum of |x| over a word, in the type's own bits; Inf and NaN stay visible in it
//   is_finite      whether none was met
//   float_bits     a finite peak as the bits of a float, which are ordered like the floats themselves
template <>
struct Element<__nv_bfloat16> {
  __device__ static float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
  __device__ static float2 pair(const uint32_t* words, int i) {
    return {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u)};
  }
  __device__ static uint32_t peak(uint32_t so_far, uint32_t word) {
    const __nv_bfloat162 larger = __hmax2_nan(reinterpret_cast<const __nv_bfloat162&>(so_far),
                                              __habs2(reinterpret_cast<const __nv_bfloat162&>(word)));
    return reinterpret_cast<const uint32_t&>(larger);
  }
  __device__ static bool is_finite(uint32_t peak) {
    return (peak & 0xffffu) < 0x7f80u && (peak & 0xffff0000u) < 0x7f800000u;
  }
  __device__ static uint32_t float_bits(uint32_t peak) { return max(peak << 16, peak & 0xffff0000u); }
};

template <>
struct Element<__half> {
  __device__ static float to_float(__half x) { return __half2float(x); }
  __device__ static float2 pair(const uint32_t* words, int i) {
    return __half22float2(reinterpret_cast<const __half2&>(words[i]));
  }
  __device__ static uint32_t peak(uint32_t so_far, uint32_t word) {
    const __half2 larger =
        __hmax2_nan(reinterpret_cast<const __half2&>(so_far), __habs2(reinterpret_cast<const __half2&>(word)));
    return reinterpret_cast<const uint32_t&>(larger);
  }
  __device__ static bool is_finite(uint32_t peak) {
    return (peak & 0xffffu) < 0x7c00u && (peak & 0xffff0000u) < 0x7c000000u;
  }
  __device__ static uint32_t float_bits(uint32_t peak) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(peak));
    return max(__float_as_uint(both.x), __float_as_uint(both.y));
  }
};

template <>
struct Element<float> {
  __device__ static float to_float(float x) { return x; }
  __device__ static float2 pair(const uint32_t* words, int i) {
    return {__uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1])};
  }
  __device__ static uint32_t peak(uint32_t so_far, uint32_t word) { return max(so_far, word & 0x7fffffffu); }
  __device__ static bool is_finite(uint32_t peak) { return peak < kInfBits; }
  __device__ static uint32_t float_bits(uint32_t peak) { return peak; }
};

// kCount consecutive elements, read 16 bytes at a time.
template <typename T, int kCount>
struct Vector {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords % 4 == 0);
  uint32_t words[kWords];

  __device__ static Vector load(const T* from) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 part = __ldg(reinterpret_cast<const uint4*>(from) + i);
      v.words[4 * i] = part.x, v.words[4 * i + 1] = part.y, v.words[4 * i + 2] = part.z, v.words[4 * i + 3] = part.w;
    }
    return v;
  }
  __device__ uint32_t peak(uint32_t so_far) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) so_far = Element<T>::peak(so_far, words[i]);
    return so_far;
  }
};

// The amax and the non-finite flag of one thread's elements, met one at a time.
struct Seen {
  uint32_t bits = 0;  // of the largest finite |x|
  bool nonfinite = false;

  __device__ void meet(float x) {
    const uint32_t magnitude = __float_as_uint(x) & 0x7fffffffu;
    if (magnitude < kInfBits) {
      bits = max(bits, magnitude);
    } else {
      nonfinite = true;
    }
  }
};

template <Fp8 kFormat>
constexpr __nv_fp8_interpretation_t kInterpretation = kFormat == Fp8::kE4M3 ? __NV_E4M3 : __NV_E5M2;

// Four finite values, already scaled, as four bytes; saturating, to nearest even.
template <Fp8 kFormat>
__device__ inline uint32_t cast4(float2 low, float2 high) {
  const uint32_t a = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, kInterpretation<kFormat>);
  const uint32_t b = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, kInterpretation<kFormat>);
  return a | b << 16;
}

// Any value. What is NaN or Inf is decided on x; the saturating conversion alone would hide an Inf.
template <Fp8 kFormat>
__device__ inline uint8_t cast_any(float x, float inv_scale) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > kInfBits) return 0x7f;
  if (magnitude == kInfBits) return kFormat == Fp8::kE4M3 ? 0x7f : 0x7c | sign;
  if (magnitude == 0) return sign;  // also where inv_scale overflowed, and the product would be NaN
  return __nv_cvt_float_to_fp8(__fmul_rn(x, inv_scale), __NV_SATFINITE, kInterpretation<kFormat>);
}

// A 4x4 block of bytes, one row a word, becomes its transpose.
__device__ inline void transpose_4x4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410), b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

}  // namespace octavo::kernels
