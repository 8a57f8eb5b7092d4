// SPDX-License-Identifier: Apache-2.0
// Matrices of any strides on the device, and what their quantisation has to give.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gpu_test.h"
#include "kernels.h"
#include "kernels_reference.h"

namespace octavo::testing {

using kernels::DType;
using kernels::Fp8;
using kernels::Matrix;
using kernels::Quantize;

constexpr DType kDTypes[] = {DType::kBF16, DType::kFP16, DType::kFP32};
constexpr Fp8 kFormats[] = {Fp8::kE4M3, Fp8::kE5M2};

inline int64_t round_up_16(int64_t n) { return (n + 15) / 16 * 16; }

struct Strides {
  const char* name;
  std::function<int64_t(int64_t rows, int64_t cols)> row, col;
  int64_t offset = 0;  // elements between the allocation's beginning, which is aligned, and the matrix
};

inline const std::vector<Strides>& all_strides() {
  static const std::vector<Strides> all = {
      {"contiguous", [](auto, auto c) { return c; }, [](auto, auto) { return 1; }},
      {"pitched", [](auto, auto c) { return (c + 31) / 16 * 16; }, [](auto, auto) { return 1; }},
      {"misaligned", [](auto, auto c) { return c; }, [](auto, auto) { return 1; }, 1},
      {"transposed", [](auto, auto) { return 1; }, [](auto r, auto) { return r; }},
      {"transposed_pitched", [](auto, auto) { return 1; }, [](auto r, auto) { return (r + 31) / 16 * 16; }},
      {"every_second", [](auto, auto c) { return 2 * c; }, [](auto, auto) { return 2; }},
      {"one_row_expanded", [](auto, auto) { return 0; }, [](auto, auto) { return 1; }},
      {"one_column_expanded", [](auto, auto) { return 1; }, [](auto, auto) { return 0; }},
      {"one_element_expanded", [](auto, auto) { return 0; }, [](auto, auto) { return 0; }},
  };
  return all;
}

// `value(row, col)` gives the bits of an element; where strides are 0, the last one given counts. What lies between
// the elements is NaN, so that nothing may look at it.
class TestMatrix {
 public:
  TestMatrix(DType dtype, int64_t rows, int64_t cols, const Strides& strides,
             const std::function<uint32_t(int64_t, int64_t)>& value)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        row_stride_(strides.row(rows, cols)),
        col_stride_(strides.col(rows, cols)),
        offset_(strides.offset),
        storage_(offset_ + (rows - 1) * row_stride_ + (cols - 1) * col_stride_ + 1,
                 dtype == DType::kFP32 ? 0x7fc00000 : 0x7fff),
        device_(storage_.size() * size()) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) storage_[index(r, c)] = value(r, c);
    }
    std::vector<uint8_t> bytes(storage_.size() * size());
    for (size_t i = 0; i < storage_.size(); ++i) std::memcpy(&bytes[i * size()], &storage_[i], size());
    device_.write(bytes);
  }

  Matrix view() const {
    return {device_.get() + offset_ * static_cast<int64_t>(size()), dtype_, rows_, cols_, row_stride_, col_stride_};
  }
  float at(int64_t r, int64_t c) const { return reference::to_float(storage_[index(r, c)], dtype_); }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  float amax() const {
    float largest = 0.0f;
    each([&](float x) { largest = std::isfinite(x) ? std::max(largest, std::fabs(x)) : largest; });
    return largest;
  }
  int32_t nonfinite() const {
    int32_t any = 0;
    each([&](float x) { any |= !std::isfinite(x); });
    return any;
  }

 private:
  size_t size() const { return dtype_ == DType::kFP32 ? 4 : 2; }
  size_t index(int64_t r, int64_t c) const { return offset_ + r * row_stride_ + c * col_stride_; }
  template <typename Body>
  void each(Body&& body) const {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) body(at(r, c));
    }
  }

  DType dtype_;
  int64_t rows_, cols_, row_stride_, col_stride_, offset_;
  std::vector<uint32_t> storage_;  // little-endian: the low bytes are the element
  Buffer<uint8_t> device_;
};

// Normal values; one in `rare` is 0, -0, tiny, huge, or, if wanted, Inf or NaN.
class Values {
 public:
  Values(DType dtype, uint32_t seed, bool with_nonfinite, uint32_t rare = 50)
      : dtype_(dtype), with_nonfinite_(with_nonfinite), rare_(rare), random_(seed) {}

  uint32_t operator()(int64_t, int64_t) {
    if (random_() % rare_ == 0) return special(random_() % (with_nonfinite_ ? 7 : 4));
    return reference::to_bits(normal_(random_), dtype_);
  }

 private:
  uint32_t special(uint32_t kind) {
    const uint32_t sign = dtype_ == DType::kFP32 ? 0x80000000 : 0x8000;
    const uint32_t inf = dtype_ == DType::kFP32 ? 0x7f800000 : dtype_ == DType::kBF16 ? 0x7f80 : 0x7c00;
    switch (kind) {
      case 0:
        return 0;
      case 1:
        return sign;
      case 2:
        return (random_() % 2 ? sign : 0) | (1 + random_() % 7);  // subnormal
      case 3:
        return (random_() % 2 ? sign : 0) | (inf - 1 - random_() % 3);
      case 4:
        return inf;
      case 5:
        return sign | inf;
      default:
        return (random_() % 2 ? sign : 0) | inf | (1 + random_() % 60);
    }
  }

  DType dtype_;
  bool with_nonfinite_;
  uint32_t rare_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

// Row-major bytes of `rows` x `cols`: the casts of x (transposed if asked), zeros around them.
inline std::vector<uint8_t> expected_copy(const TestMatrix& x, Fp8 format, float step, int64_t rows, int64_t cols,
                                          bool is_transposed) {
  std::vector<uint8_t> bytes(rows * cols, 0);
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t c = 0; c < x.cols(); ++c) {
      bytes[is_transposed ? c * cols + r : r * cols + c] = reference::cast(x.at(r, c), step, format);
    }
  }
  return bytes;
}

// What a set of peaks says of its tensor.
struct Measured {
  float amax = 0.0f;
  int32_t nonfinite = 0;
};
inline Measured combined(const std::vector<Peak>& peaks) {
  Measured all;
  for (const Peak peak : peaks) {
    const Peak bits = peak & ~kNonFinite;
    float amax;
    std::memcpy(&amax, &bits, sizeof amax);
    all.amax = std::max(all.amax, amax);
    all.nonfinite |= (peak & kNonFinite) != 0;
  }
  return all;
}
// Peaks that nobody has written: no tensor has such.
inline std::vector<Peak> unwritten(int32_t count) { return std::vector<Peak>(count, 0xffffffffu); }

// The quantisation `q` with this step, and what it measured.
inline Measured quantized(Quantize q, float step, cudaStream_t stream) {
  Buffer<float> given(std::vector<float>{step}), used(1);
  Buffer<Peak> peaks(unwritten(kernels::tiles_of(q)));
  q.given = given.get();
  q.used = used.get();
  q.peaks = peaks.get();
  kernels::quantize(&q, 1, {}, nullptr, stream);
  EXPECT_EQ(std::bit_cast<uint32_t>(used.one()), std::bit_cast<uint32_t>(step));
  return combined(peaks.read());
}

// Says where the first difference is.
template <typename T>
::testing::AssertionResult same(const std::vector<T>& got, const std::vector<T>& expected, int64_t cols) {
  if (got.size() != expected.size()) {
    return ::testing::AssertionFailure() << got.size() << " elements, expected " << expected.size();
  }
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &expected[i], sizeof(T)) == 0) continue;
    return ::testing::AssertionFailure() << "at [" << static_cast<int64_t>(i) / cols << ", "
                                         << static_cast<int64_t>(i) % cols << "]: " << +got[i] << ", expected "
                                         << +expected[i];
  }
  return ::testing::AssertionSuccess();
}

}  // namespace octavo::testing
