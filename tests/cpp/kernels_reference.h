// SPDX-License-Identifier: Apache-2.0
// docs/numerics.md in scalar form, from the bit formats and in double precision. Shares nothing with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace octavo::reference {

using kernels::DType;
using kernels::Fp8;

// A binary float format: 1 sign bit, then exponent, then mantissa. `finite_only`: the top exponent holds numbers too,
// and only the code of all ones is NaN (E4M3).
struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool finite_only = false;
};

constexpr Format kE4M3 = {4, 3, true};
constexpr Format kE5M2 = {5, 2};
constexpr Format kBF16 = {8, 7};
constexpr Format kFP16 = {5, 10};

inline Format format_of(Fp8 f) { return f == Fp8::kE4M3 ? kE4M3 : kE5M2; }

inline double decode(uint32_t code, Format f) {
  const int exponent_mask = (1 << f.exponent_bits) - 1, mantissa_mask = (1 << f.mantissa_bits) - 1;
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> f.mantissa_bits) & exponent_mask;
  const int mantissa = static_cast<int>(code) & mantissa_mask;
  const double sign = code >> (f.exponent_bits + f.mantissa_bits) & 1 ? -1.0 : 1.0;
  if (exponent == exponent_mask && (!f.finite_only || mantissa == mantissa_mask)) {
    if (f.finite_only || mantissa != 0) return std::numeric_limits<double>::quiet_NaN();
    return sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

// The code nearest to a finite |value|, the even one of two; past the largest finite code it stays there.
// Codes of one sign are ordered like their values.
inline uint32_t nearest_code(double magnitude, Format f) {
  uint32_t low = 0, high = 1u << (f.exponent_bits + f.mantissa_bits);
  while (high - low > 1) {  // the largest code that is not above the magnitude
    const uint32_t middle = (low + high) / 2;
    const double value = decode(middle, f);
    (std::isfinite(value) && value <= magnitude ? low : high) = middle;
  }
  const double below = decode(low, f), above = decode(low + 1, f);
  if (!std::isfinite(above)) return low;
  const double to_below = magnitude - below, to_above = above - magnitude;  // exact, or far from a tie
  return to_below < to_above || (to_below == to_above && low % 2 == 0) ? low : low + 1;
}

inline double largest(Format f) { return decode(nearest_code(std::numeric_limits<double>::max(), f), f); }

inline uint8_t cast(float x, float step, Fp8 format) {
  const Format f = format_of(format);
  if (!(step > 0.0f) || std::isinf(step) || std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  if (std::isinf(x)) return format == Fp8::kE4M3 ? 0x7f : 0x7c | sign;
  if (x == 0.0f) return sign;
  const float inv = 1.0f / step;
  const float scaled = static_cast<float>(static_cast<double>(x) * static_cast<double>(inv));
  return static_cast<uint8_t>(nearest_code(std::fabs(static_cast<double>(scaled)), f)) | sign;
}

inline float step_from_amax(float amax, float fp8_max, float multiplier, bool power_of_two) {
  if (amax == 0.0f) return 1.0f;
  const volatile float quotient = amax / fp8_max;
  const volatile float product = quotient * multiplier;  // volatile: two roundings, whatever the compiler
  const float step = std::clamp(float{product}, 0x1p-126f, 0x1p126f);
  if (!power_of_two) return step;
  int exponent;
  return std::frexp(step, &exponent) == 0.5f ? step : std::ldexp(1.0f, exponent);
}

// Elements of any dtype, as bits.
inline float to_float(uint32_t bits, DType dtype) {
  if (dtype == DType::kBF16) return static_cast<float>(decode(bits & 0xffff, kBF16));
  if (dtype == DType::kFP16) return static_cast<float>(decode(bits & 0xffff, kFP16));
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// To nearest even, overflowing to Inf.
inline uint32_t to_bits(double x, DType dtype) {
  if (dtype == DType::kFP32) {
    const float rounded = static_cast<float>(x);
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
  }
  const Format f = dtype == DType::kBF16 ? kBF16 : kFP16;
  const uint32_t sign = std::signbit(x) ? 0x8000 : 0, inf = ((1u << f.exponent_bits) - 1) << f.mantissa_bits;
  if (std::isnan(x)) return inf | 1;
  const double half_an_ulp = (largest(f) - decode(nearest_code(largest(f), f) - 1, f)) / 2;
  if (std::fabs(x) >= largest(f) + half_an_ulp) return sign | inf;
  return sign | nearest_code(std::fabs(x), f);
}

// Half of the distance between the dtype's numbers around x.
inline double half_ulp(double x, DType dtype) {
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : dtype == DType::kFP16 ? 10 : 23;
  const int smallest = dtype == DType::kFP16 ? -14 : -126;
  const int exponent = x == 0.0 ? smallest : std::max(std::ilogb(x), smallest);
  return std::ldexp(0.5, exponent - mantissa_bits);
}

}  // namespace octavo::reference
