// SPDX-License-Identifier: Apache-2.0
// Every 16-bit float, and the interesting 32-bit ones, cast with many steps to both formats.
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels_matrix.h"

namespace octavo::testing {
namespace {

// Ordinary ones, powers of two, the ends of the range, and one whose reciprocal overflows.
constexpr float kSteps[] = {1.0f,     0.125f,    0.0123f,  3.7e-5f,        2.7182817f, 911.0f,
                            0x1p-20f, 0x1p-126f, 0x1p126f, 1.1754945e-38f, 1e-45f,     3e38f};
constexpr float kInvalidSteps[] = {0.0f,
                                   -0.0f,
                                   -1.0f,
                                   std::numeric_limits<float>::infinity(),
                                   -std::numeric_limits<float>::infinity(),
                                   std::numeric_limits<float>::quiet_NaN()};

class Cast : public GpuTest {
 protected:
  void expect_exact(const TestMatrix& x, Fp8 format, float step) {
    Buffer<uint8_t> row(x.rows() * x.cols()), col(x.rows() * x.cols());
    Quantize q;
    q.x = x.view();
    q.format = format;
    q.padded_rows = x.rows();
    q.padded_cols = x.cols();
    q.row = row.get();
    q.col = col.get();
    const Measured seen = quantized(q, step, stream_);
    const std::string what = "format " + std::to_string(static_cast<int>(format)) + ", step " + std::to_string(step);
    EXPECT_TRUE(same(row.read(), expected_copy(x, format, step, x.rows(), x.cols(), false), x.cols())) << what;
    EXPECT_TRUE(same(col.read(), expected_copy(x, format, step, x.cols(), x.rows(), true), x.rows())) << what;
    EXPECT_EQ(seen.amax, x.amax()) << what;
    EXPECT_EQ(seen.nonfinite, x.nonfinite()) << what;
  }

  void expect_exact_with_all_steps(const TestMatrix& x) {
    for (const Fp8 format : kFormats) {
      for (const float step : kSteps) expect_exact(x, format, step);
    }
  }
};

// Code r * 256 + c at [r, c]. Without the non-finite ones the kernel takes another way.
TestMatrix all_codes(DType dtype, bool with_nonfinite) {
  return TestMatrix(dtype, 256, 256, all_strides()[0], [=](int64_t r, int64_t c) {
    const auto code = static_cast<uint32_t>(r * 256 + c);
    return with_nonfinite || std::isfinite(reference::to_float(code, dtype)) ? code : 0;
  });
}

TEST_F(Cast, EveryBf16) {
  expect_exact_with_all_steps(all_codes(DType::kBF16, true));
  expect_exact_with_all_steps(all_codes(DType::kBF16, false));
}

TEST_F(Cast, EveryFp16) {
  expect_exact_with_all_steps(all_codes(DType::kFP16, true));
  expect_exact_with_all_steps(all_codes(DType::kFP16, false));
}

// Random bits; each FP8 number, the halves between two, and the float32 neighbours of both; subnormals.
std::vector<uint32_t> interesting_floats(bool with_nonfinite) {
  std::vector<uint32_t> bits = {0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x7f7fffff,
                                0x3f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff};
  for (const Fp8 format : kFormats) {
    const reference::Format f = reference::format_of(format);
    for (uint32_t code = 0; code < 0x7f; ++code) {
      const double here = reference::decode(code, f), next = reference::decode(code + 1, f);
      for (const double x : {here, (here + next) / 2}) {
        if (!std::isfinite(x)) continue;
        const auto middle = std::bit_cast<uint32_t>(static_cast<float>(x));
        bits.insert(bits.end(), {middle, middle + 1, middle - (middle > 0)});
      }
    }
  }
  std::mt19937 random(1);
  const size_t half = 256 * 256 / 2;
  while (bits.size() < half) bits.push_back(random() & 0x7fffffff);
  if (!with_nonfinite) {
    for (uint32_t& b : bits) b = std::isfinite(std::bit_cast<float>(b)) ? b : 0;
  }
  for (size_t i = 0; i < half; ++i) bits.push_back(bits[i] | 0x80000000);
  return bits;
}

TEST_F(Cast, SampledFp32) {
  for (const bool with_nonfinite : {true, false}) {
    const std::vector<uint32_t> bits = interesting_floats(with_nonfinite);
    expect_exact_with_all_steps(
        TestMatrix(DType::kFP32, 256, 256, all_strides()[0], [&](int64_t r, int64_t c) { return bits[r * 256 + c]; }));
  }
}

TEST_F(Cast, AnInvalidStepMakesEveryByteNaN) {
  for (const DType dtype : kDTypes) {
    const TestMatrix x(dtype, 40, 24, all_strides()[0], Values(dtype, 1, false));
    for (const Fp8 format : kFormats) {
      for (const float step : kInvalidSteps) expect_exact(x, format, step);
    }
  }
}

}  // namespace
}  // namespace octavo::testing
