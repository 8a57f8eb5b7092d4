// SPDX-License-Identifier: Apache-2.0
// Copies, padding, amax and column sums at ragged shapes and any strides.
#include <bit>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels_matrix.h"

namespace octavo::testing {
namespace {

using kernels::StepRule;
using kernels::StepSource;

constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1},     {1, 16},   {1, 24},   {16, 1},    {7, 5},
                                                   {128, 128}, {129, 65}, {130, 40}, {200, 264}, {250, 136},
                                                   {264, 8},   {33, 257}, {144, 272}};

class QuantizeKernel : public GpuTest {
 protected:
  // Which copies: 1 row-major, 2 transposed, 3 both.
  void expect_exact(const TestMatrix& x, Fp8 format, bool is_padded, int copies) {
    const float step = 0.0371f;
    const int64_t rows = is_padded ? round_up_16(x.rows()) : x.rows();
    const int64_t cols = is_padded ? round_up_16(x.cols()) : x.cols();
    const std::vector<uint8_t> untouched(rows * cols, 0xcd);
    Buffer<TapedOperand> taped(std::vector<TapedOperand>{{step, 0.0f, 0, 0}});
    Buffer<uint8_t> row(untouched), col(untouched);
    Quantize q;
    q.x = x.view();
    q.format = format;
    q.rule.source = StepSource::kTaped;
    q.taped = taped.get();
    q.padded_rows = rows;
    q.padded_cols = cols;
    q.row = copies & 1 ? row.get() : nullptr;
    q.col = copies & 2 ? col.get() : nullptr;
    kernels::quantize(q, stream_);
    EXPECT_TRUE(same(row.read(), copies & 1 ? expected_copy(x, format, step, rows, cols, false) : untouched, cols));
    EXPECT_TRUE(same(col.read(), copies & 2 ? expected_copy(x, format, step, cols, rows, true) : untouched, rows));
    EXPECT_EQ(taped.one().amax, x.amax());
    EXPECT_EQ(taped.one().nonfinite, x.nonfinite());
  }

  TapedOperand measured(const TestMatrix& x) {
    Buffer<TapedOperand> taped(1);
    StepRule rule;
    rule.source = StepSource::kAmax;
    kernels::measure_amax(x.view(), taped.get(), rule, stream_);
    return taped.one();
  }
};

std::string describe(DType dtype, Fp8 format, int64_t rows, int64_t cols, const Strides& strides) {
  return std::string(strides.name) + " [" + std::to_string(rows) + ", " + std::to_string(cols) + "], dtype " +
         std::to_string(static_cast<int>(dtype)) + ", format " + std::to_string(static_cast<int>(format));
}

TEST_F(QuantizeKernel, AnyShapeAnyStrides) {
  uint32_t number = 0;
  for (const auto& [rows, cols] : kShapes) {
    for (const Strides& strides : all_strides()) {
      for (const DType dtype : kDTypes) {
        ++number;
        const TestMatrix x(dtype, rows, cols, strides, Values(dtype, number, number % 2 == 0));
        EXPECT_EQ(measured(x).amax, x.amax());
        EXPECT_EQ(measured(x).nonfinite, x.nonfinite());
        for (const Fp8 format : kFormats) {
          SCOPED_TRACE(describe(dtype, format, rows, cols, strides));
          expect_exact(x, format, true, 3);
          expect_exact(x, format, false, 1 + static_cast<int>(number % 3));
        }
      }
    }
  }
}

// One Inf in a corner of the last tile: every other tile takes the quick way, and the amax is over both.
TEST_F(QuantizeKernel, OneNonFiniteElement) {
  for (const DType dtype : kDTypes) {
    Values values(dtype, 5, false);
    const uint32_t inf = dtype == DType::kFP32 ? 0xff800000 : dtype == DType::kBF16 ? 0xff80 : 0xfc00;
    const TestMatrix x(dtype, 300, 280, all_strides()[0],
                       [&](int64_t r, int64_t c) { return r == 299 && c == 279 ? inf : values(r, c); });
    for (const Fp8 format : kFormats) expect_exact(x, format, true, 3);
  }
}

TEST_F(QuantizeKernel, NoFiniteElement) {
  const TestMatrix x(DType::kBF16, 20, 24, all_strides()[0], [](int64_t, int64_t) { return 0x7fc0; });
  expect_exact(x, Fp8::kE5M2, true, 3);
  EXPECT_EQ(measured(x).amax, 0.0f);
  EXPECT_EQ(measured(x).nonfinite, 1);
}

// Copies that begin at any byte, as slices of a caller's own tensor may.
TEST_F(QuantizeKernel, MisalignedCopies) {
  const TestMatrix x(DType::kBF16, 144, 160, all_strides()[0], Values(DType::kBF16, 3, false));
  for (const int64_t shift : {1, 4, 8}) {
    Buffer<TapedOperand> taped(std::vector<TapedOperand>{{0.5f, 0.0f, 0, 0}});
    Buffer<uint8_t> row(144 * 160 + shift), col(144 * 160 + shift);
    Quantize q;
    q.x = x.view();
    q.taped = taped.get();
    q.padded_rows = 144;
    q.padded_cols = 160;
    q.row = row.get() + shift;
    q.col = col.get() + shift;
    kernels::quantize(q, stream_);
    const std::vector<uint8_t> rows = row.read(), cols = col.read();
    EXPECT_TRUE(same({rows.begin() + shift, rows.end()}, expected_copy(x, q.format, 0.5f, 144, 160, false), 160));
    EXPECT_TRUE(same({cols.begin() + shift, cols.end()}, expected_copy(x, q.format, 0.5f, 160, 144, true), 144));
  }
}

TEST_F(QuantizeKernel, MeasuresOnlyIfAsked) {
  const TestMatrix x(DType::kFP32, 16, 16, all_strides()[0], Values(DType::kFP32, 2, true));
  Buffer<TapedOperand> taped(std::vector<TapedOperand>{{1.0f, 0.25f, 0, 0}});
  Buffer<uint8_t> row(256);
  Quantize q;
  q.x = x.view();
  q.taped = taped.get();
  q.measure = false;
  q.padded_rows = q.padded_cols = 16;
  q.row = row.get();
  kernels::quantize(q, stream_);
  EXPECT_EQ(taped.one().amax, 0.25f);
  EXPECT_EQ(taped.one().nonfinite, 0);
}

TEST_F(QuantizeKernel, AmaxOfALargeMatrix) {
  for (const Strides& strides : {all_strides()[0], all_strides()[1], all_strides()[2], all_strides()[5]}) {
    for (const DType dtype : kDTypes) {
      // The largest value is negative and comes last, then somewhere in the middle.
      for (const int64_t where : {1999 * 1017 + 1016, 777777}) {
        const TestMatrix x(dtype, 2000, 1017, strides, [&](int64_t r, int64_t c) {
          return reference::to_bits(r * 1017 + c == where ? -3.5 : std::sin(static_cast<double>(r * 31 + c)), dtype);
        });
        EXPECT_EQ(measured(x).amax, 3.5f) << strides.name;
        EXPECT_EQ(measured(x).nonfinite, 0) << strides.name;
      }
    }
  }
}

struct Sums {
  std::vector<float> partials;
  std::vector<float> total;
};

class ColumnSums : public GpuTest {
 protected:
  // `with_copies`: the sums must not depend on what else the pass does.
  Sums sums_of(const TestMatrix& x, bool with_copies) {
    const int64_t tiles = (x.rows() + Quantize::kSumRows - 1) / Quantize::kSumRows;
    Buffer<TapedOperand> taped(std::vector<TapedOperand>{{1.0f, 0.0f, 0, 0}});
    Buffer<float> partials(tiles * x.cols()), total(x.cols());
    Buffer<uint8_t> row(round_up_16(x.rows()) * round_up_16(x.cols()));
    Quantize q;
    q.x = x.view();
    q.format = Fp8::kE5M2;
    q.taped = taped.get();
    q.padded_rows = with_copies ? round_up_16(x.rows()) : 0;
    q.padded_cols = with_copies ? round_up_16(x.cols()) : 0;
    q.row = with_copies ? row.get() : nullptr;
    q.column_sums = partials.get();
    kernels::quantize(q, stream_);
    kernels::reduce_column_sums(partials.get(), tiles, x.cols(), total.get(), DType::kFP32, stream_);
    return {partials.read(), total.read()};
  }
};

TEST_F(ColumnSums, AreTheSameWhateverTheStrides) {
  for (const DType dtype : kDTypes) {
    for (const auto& [rows, cols] : kShapes) {
      std::vector<uint32_t> values(rows * cols);
      Values draw(dtype, 17, false, 1u << 30);
      for (uint32_t& v : values) v = draw(0, 0);
      const auto value = [&, cols = cols](int64_t r, int64_t c) { return values[r * cols + c]; };
      const Sums first = sums_of(TestMatrix(dtype, rows, cols, all_strides()[0], value), true);
      for (const Strides& strides : all_strides()) {
        if (std::string(strides.name).find("expanded") != std::string::npos) continue;
        const TestMatrix x(dtype, rows, cols, strides, value);
        for (const bool with_copies : {true, false}) {
          EXPECT_TRUE(same(sums_of(x, with_copies).partials, first.partials, cols))
              << describe(dtype, Fp8::kE5M2, rows, cols, strides);
        }
      }
    }
  }
}

TEST_F(ColumnSums, AreAccurate) {
  for (const DType dtype : kDTypes) {
    for (const Strides& strides : all_strides()) {
      // All of one sign, where errors add up, and of both, where sums cancel.
      for (const bool one_sign : {true, false}) {
        Values draw(dtype, 23, false, 1u << 30);
        const uint32_t keep = !one_sign ? 0xffffffff : dtype == DType::kFP32 ? 0x7fffffff : 0x7fff;
        const TestMatrix x(dtype, 1000, 136, strides, [&](int64_t r, int64_t c) { return draw(r, c) & keep; });
        const Sums sums = sums_of(x, true);
        for (int64_t c = 0; c < x.cols(); ++c) {
          double exact = 0.0, magnitude = 0.0;
          for (int64_t r = 0; r < x.rows(); ++r) exact += x.at(r, c), magnitude += std::fabs(x.at(r, c));
          const double allowed = 0x1p-20 * magnitude + 2 * reference::half_ulp(exact, DType::kFP32);
          ASSERT_LE(std::fabs(sums.total[c] - exact), allowed) << strides.name << ", column " << c;
        }
      }
    }
  }
}

TEST_F(ColumnSums, ShowNonFiniteElements) {
  const TestMatrix x(DType::kBF16, 200, 16, all_strides()[0],
                     [](int64_t r, int64_t c) { return r == 150 && c == 3 ? 0xff80 : 0x3f80; });
  const Sums sums = sums_of(x, true);
  EXPECT_EQ(sums.total[3], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(sums.total[4], 200.0f);
}

// In float64, in order, and rounded once: 1 + 2^-24 is a tie for float32, and what comes after it decides.
TEST_F(ColumnSums, AreRoundedOnce) {
  std::vector<float> values(40, 0.0f);
  values[0] = 1.0f, values[20] = 0x1p-24f, values[39] = 0x1p-50f;
  Buffer<float> partials(values);
  Buffer<float> out(1);
  kernels::reduce_column_sums(partials.get(), 40, 1, out.get(), DType::kFP32, stream_);
  EXPECT_EQ(out.one(), 0x1.000002p0f);
  Buffer<uint16_t> half(1);
  values[20] = 0x1p-8f;  // the same for bf16, where float32 in between would lose the last addend
  partials.write(values);
  kernels::reduce_column_sums(partials.get(), 40, 1, half.get(), DType::kBF16, stream_);
  EXPECT_EQ(half.one(), 0x3f81);
  values[20] = 0x1p-11f;
  partials.write(values);
  kernels::reduce_column_sums(partials.get(), 40, 1, half.get(), DType::kFP16, stream_);
  EXPECT_EQ(half.one(), 0x3c01);
}

}  // namespace
}  // namespace octavo::testing
