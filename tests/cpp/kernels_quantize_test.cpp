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

using kernels::Measure;

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
    Buffer<uint8_t> row(untouched), col(untouched);
    Quantize q;
    q.x = x.view();
    q.format = format;
    q.padded_rows = rows;
    q.padded_cols = cols;
    q.row = copies & 1 ? row.get() : nullptr;
    q.col = copies & 2 ? col.get() : nullptr;
    const Measured seen = quantized(q, step, stream_);
    EXPECT_TRUE(same(row.read(), copies & 1 ? expected_copy(x, format, step, rows, cols, false) : untouched, cols));
    EXPECT_TRUE(same(col.read(), copies & 2 ? expected_copy(x, format, step, cols, rows, true) : untouched, rows));
    EXPECT_EQ(seen.amax, x.amax());
    EXPECT_EQ(seen.nonfinite, x.nonfinite());
  }

  Measured measured(const TestMatrix& x) {
    Measure measure{.x = x.view()};
    Buffer<Peak> peaks(unwritten(kernels::peaks_of(measure)));
    measure.peaks = peaks.get();
    kernels::measure_amax(&measure, 1, nullptr, stream_);
    return combined(peaks.read());
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
    Buffer<uint8_t> row(144 * 160 + shift), col(144 * 160 + shift);
    Quantize q;
    q.x = x.view();
    q.padded_rows = 144;
    q.padded_cols = 160;
    q.row = row.get() + shift;
    q.col = col.get() + shift;
    quantized(q, 0.5f, stream_);
    const std::vector<uint8_t> rows = row.read(), cols = col.read();
    EXPECT_TRUE(same({rows.begin() + shift, rows.end()}, expected_copy(x, q.format, 0.5f, 144, 160, false), 160));
    EXPECT_TRUE(same({cols.begin() + shift, cols.end()}, expected_copy(x, q.format, 0.5f, 160, 144, true), 144));
  }
}

// Two matrices in one launch, and in two where their types differ: each as if it were alone.
TEST_F(QuantizeKernel, TwoAtOnce) {
  const DType pairs[][2] = {{DType::kBF16, DType::kBF16}, {DType::kFP32, DType::kFP32}, {DType::kFP32, DType::kBF16}};
  for (const auto& [first, second] : pairs) {
    const TestMatrix x(first, 200, 264, all_strides()[0], Values(first, 4, false));
    const TestMatrix w(second, 130, 40, all_strides()[3], Values(second, 5, true));
    const TestMatrix* const matrices[] = {&x, &w};
    const float steps[] = {0.03f, 1.7f};
    Buffer<float> given(std::vector<float>{steps[0], steps[1]}), sums(2 * 264);
    std::vector<Buffer<uint8_t>> copies;
    std::vector<Buffer<Peak>> peaks;
    Quantize q[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t rows = round_up_16(matrices[i]->rows()), cols = round_up_16(matrices[i]->cols());
      q[i].x = matrices[i]->view();
      q[i].format = kFormats[i];
      q[i].given = given.get() + i;
      q[i].padded_rows = rows;
      q[i].padded_cols = cols;
      q[i].row = copies.emplace_back(rows * cols).get();
      q[i].col = copies.emplace_back(rows * cols).get();
      q[i].peaks = peaks.emplace_back(unwritten(kernels::tiles_of(q[i]))).get();
    }
    for (const bool with_sums : {false, true}) {
      q[0].column_sums = with_sums ? sums.get() : nullptr;
      kernels::quantize(q, 2, {}, nullptr, stream_);
      for (int i = 0; i < 2; ++i) {
        const TestMatrix& m = *matrices[i];
        const int64_t rows = q[i].padded_rows, cols = q[i].padded_cols;
        EXPECT_TRUE(same(copies[2 * i].read(), expected_copy(m, kFormats[i], steps[i], rows, cols, false), cols));
        EXPECT_TRUE(same(copies[2 * i + 1].read(), expected_copy(m, kFormats[i], steps[i], cols, rows, true), rows));
        EXPECT_EQ(combined(peaks[i].read()).amax, m.amax());
        EXPECT_EQ(combined(peaks[i].read()).nonfinite, m.nonfinite());
      }
    }
  }
}

TEST_F(QuantizeKernel, TwoAmaxesAtOnce) {
  const TestMatrix x(DType::kFP32, 300, 280, all_strides()[0], Values(DType::kFP32, 4, true));
  const TestMatrix w(DType::kBF16, 33, 257, all_strides()[2], Values(DType::kBF16, 5, false));
  Buffer<float> known(std::vector<float>{0.0f, 2.0f});
  Measure measures[2] = {{.x = x.view()}, {.x = w.view()}};
  std::vector<Buffer<Peak>> peaks;
  for (Measure& m : measures) m.peaks = peaks.emplace_back(unwritten(kernels::peaks_of(m))).get();
  kernels::measure_amax(measures, 2, nullptr, stream_);
  EXPECT_EQ(combined(peaks[0].read()).amax, x.amax());
  EXPECT_EQ(combined(peaks[1].read()).amax, w.amax());
  for (int i = 0; i < 2; ++i) measures[i].known = known.get() + i;  // of the second it is needless
  kernels::measure_amax(measures, 2, nullptr, stream_);
  EXPECT_EQ(combined(peaks[0].read()).amax, x.amax());
  EXPECT_EQ(combined(peaks[1].read()).amax, 0.0f);
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
  void finish(const Buffer<float>& partials, int64_t tiles, int64_t cols, void* sums, DType dtype) {
    kernels::EndOfBackward end;
    end.partial_sums = partials.get();
    end.tiles = tiles;
    end.cols = cols;
    end.sums = sums;
    end.sums_dtype = dtype;
    kernels::end_backward(end, stream_);
  }
  // `with_copies`: the sums must not depend on what else the pass does.
  Sums sums_of(const TestMatrix& x, bool with_copies) {
    const int64_t tiles = (x.rows() + Quantize::kSumRows - 1) / Quantize::kSumRows;
    Buffer<float> partials(tiles * x.cols()), total(x.cols());
    Buffer<uint8_t> row(round_up_16(x.rows()) * round_up_16(x.cols()));
    Quantize q;
    q.x = x.view();
    q.format = Fp8::kE5M2;
    q.padded_rows = with_copies ? round_up_16(x.rows()) : 0;
    q.padded_cols = with_copies ? round_up_16(x.cols()) : 0;
    q.row = with_copies ? row.get() : nullptr;
    q.column_sums = partials.get();
    quantized(q, 1.0f, stream_);
    finish(partials, tiles, x.cols(), total.get(), DType::kFP32);
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

// In float64, and rounded once: 1 + 2^-24 is a tie for float32, and what comes after it decides.
TEST_F(ColumnSums, AreRoundedOnce) {
  std::vector<float> values(40, 0.0f);
  values[0] = 1.0f, values[20] = 0x1p-24f, values[39] = 0x1p-50f;
  Buffer<float> partials(values);
  Buffer<float> out(1);
  finish(partials, 40, 1, out.get(), DType::kFP32);
  EXPECT_EQ(out.one(), 0x1.000002p0f);
  Buffer<uint16_t> half(1);
  values[20] = 0x1p-8f;  // the same for bf16, where float32 in between would lose the last addend
  partials.write(values);
  finish(partials, 40, 1, half.get(), DType::kBF16);
  EXPECT_EQ(half.one(), 0x3f81);
  values[20] = 0x1p-11f;
  partials.write(values);
  finish(partials, 40, 1, half.get(), DType::kFP16);
  EXPECT_EQ(half.one(), 0x3c01);
}

}  // namespace
}  // namespace octavo::testing
