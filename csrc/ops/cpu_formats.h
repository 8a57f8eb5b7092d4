// SPDX-License-Identifier: Apache-2.0
// The FP8 formats and the step formula of docs/numerics.md, for the CPU kernels: from the bit layouts, element by
// element.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../slot.h"

namespace octavo::ops {

inline constexpr uint8_t kNan = 0x7f;

// An FP8 format, from its bit layout: sign, exponent, mantissa.
struct Format {
  int mantissa_bits;
  int bias;
  bool has_inf;      // IEEE-like: the largest exponent is kept for Inf and NaN
  uint8_t max_code;  // of the largest finite value
};
inline constexpr Format kE4M3{3, 7, false, 0x7e};
inline constexpr Format kE5M2{2, 15, true, 0x7b};
inline const Format& format_of(at::ScalarType type) { return type == at::kFloat8_e5m2 ? kE5M2 : kE4M3; }

inline double decode(uint8_t code, const Format& f) {
  const int exponent_bits = 7 - f.mantissa_bits, magnitude = code & 0x7f;
  const int exponent = magnitude >> f.mantissa_bits, mantissa = magnitude & ((1 << f.mantissa_bits) - 1);
  const double sign = code & 0x80 ? -1.0 : 1.0;
  if (magnitude > f.max_code) {
    const bool inf = f.has_inf && exponent == (1 << exponent_bits) - 1 && mantissa == 0;
    return inf ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  const double significand = exponent == 0 ? mantissa : mantissa + (1 << f.mantissa_bits);
  return sign * std::ldexp(significand, std::max(exponent, 1) - f.bias - f.mantissa_bits);
}

inline std::array<double, 256> decode_table(const Format& f) {
  std::array<double, 256> table;
  for (int code = 0; code < 256; ++code) table[code] = decode(static_cast<uint8_t>(code), f);
  return table;
}

// Casts of one tensor: a format and 1 / step.
class Caster {
 public:
  Caster(at::ScalarType type, float step)
      : format_(format_of(type)),
        max_(static_cast<float>(decode(format_.max_code, format_))),
        min_normal_(static_cast<float>(std::ldexp(1.0, 1 - format_.bias))),
        codes_per_one_(static_cast<float>(std::ldexp(1.0, format_.bias - 1 + format_.mantissa_bits))),
        valid_(std::isfinite(step) && step > 0),
        inv_(1.0f / step) {}

  uint8_t operator()(float x) const {
    if (!valid_ || std::isnan(x)) return kNan;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (x == 0) return sign;  // also where 1 / step overflowed, and the product would be NaN
    if (std::isinf(x)) return format_.has_inf ? sign | (format_.max_code + 1) : kNan;
    return sign | encode_magnitude(std::abs(x * inv_));
  }

 private:
  // Round to nearest even, saturating; infinity (x * inv overflowed) saturates too.
  uint8_t encode_magnitude(float a) const {
    if (a >= max_) return format_.max_code;
    if (a < min_normal_)  // a multiple of the smallest code; what rounds up to min_normal gets that one's code
      return static_cast<uint8_t>(std::lrint(a * codes_per_one_));
    uint32_t bits;
    std::memcpy(&bits, &a, sizeof bits);
    const int dropped = 23 - format_.mantissa_bits;
    bits += (1u << (dropped - 1)) - 1 + ((bits >> dropped) & 1);
    return static_cast<uint8_t>((bits >> dropped) -
                                (static_cast<uint32_t>(127 - format_.bias) << format_.mantissa_bits));
  }

  const Format& format_;
  const float max_;
  const float min_normal_;
  const float codes_per_one_;  // subnormal codes in 1.0
  const bool valid_;
  const float inv_;
};

inline float step_from_amax(float amax, float max, const ScalingPolicy& policy) {
  if (amax == 0) return 1.0f;
  float step = amax / max;
  step = step * policy.multiplier;
  step = std::min(std::max(step, std::ldexp(1.0f, -126)), std::ldexp(1.0f, 126));
  if (policy.power_of_two) {
    uint32_t bits;
    std::memcpy(&bits, &step, sizeof bits);
    bits = (bits + 0x7fffff) & 0x7f800000;  // up to the next power of two, unless it is one
    std::memcpy(&step, &bits, sizeof step);
  }
  return step;
}

}  // namespace octavo::ops
