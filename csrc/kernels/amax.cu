// SPDX-License-Identifier: Apache-2.0
// The largest finite absolute value of a matrix, and whether it holds an Inf or a NaN.
#include <algorithm>
#include <cstdint>

#include "check.h"
#include "dispatch.cuh"
#include "element.cuh"
#include "matrix.h"
#include "step.cuh"

namespace octavo::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte loads in flight a thread

struct AmaxArgs {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  TapedOperand* taped;
  StepRule rule;
};

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// Keeps the maximum of finite words in the type's own packed form; a word with an Inf or a NaN is looked at by element.
template <typename T>
struct Meter {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  uint32_t peak = 0;
  Seen seen;

  __device__ void meet(const Vector<T, kElements>& v) {
    const uint32_t with_v = v.peak(peak);
    if (Element<T>::is_finite(with_v)) {
      peak = with_v;
      return;
    }
#pragma unroll
    for (int i = 0; i < kElements / 2; ++i) {
      const float2 both = Element<T>::pair(v.words, i);
      seen.meet(both.x);
      seen.meet(both.y);
    }
  }
};

__device__ inline void commit_block(TapedOperand* taped, uint32_t bits, bool nonfinite) {
  __shared__ uint32_t warp_bits[kThreads / 32];
  const uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x;
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits);
  if (thread % 32 == 0) warp_bits[thread / 32] = of_warp;
  const bool any_nonfinite = __syncthreads_or(nonfinite) != 0;
  if (thread != 0) return;
  uint32_t of_block = 0;
  for (const uint32_t b : warp_bits) of_block = max(of_block, b);
  commit(taped, of_block, any_nonfinite);
}

// Threads and blocks stride over a row in x, over the rows in y.
struct Walk {
  int64_t first_row, row_step, first, step;
};

__device__ inline Walk walk() {
  return {int64_t{blockIdx.y} * blockDim.y + threadIdx.y, int64_t{gridDim.y} * blockDim.y,
          int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x};
}

__device__ inline bool is_needless(const AmaxArgs& p) {
  return p.rule.source == StepSource::kHistory && p.taped->scale != 0.0f;
}

// Rows that can be read in 16-byte words.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_words_kernel(const __grid_constant__ AmaxArgs p) {
  if (is_needless(p)) return;
  using Word = Vector<T, Meter<T>::kElements>;
  Meter<T> meter;
  const int64_t words = p.cols / Meter<T>::kElements;
  const Walk at = walk();
  for (int64_t row = at.first_row; row < p.rows; row += at.row_step) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
    int64_t i = at.first;
    for (; i + (kUnroll - 1) * at.step < words; i += kUnroll * at.step) {
      Word v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = Word::load(x + (i + u * at.step) * Meter<T>::kElements);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) meter.meet(v[u]);
    }
    for (; i < words; i += at.step) meter.meet(Word::load(x + i * Meter<T>::kElements));
    const int64_t rest = words * Meter<T>::kElements + at.first;
    if (rest < p.cols) meter.seen.meet(Element<T>::to_float(x[rest]));
  }
  commit_block(p.taped, max(meter.seen.bits, Element<T>::float_bits(meter.peak)), meter.seen.nonfinite);
}

// Any strides and alignment.
template <typename T>
__global__ void __launch_bounds__(kThreads) amax_elements_kernel(const __grid_constant__ AmaxArgs p) {
  if (is_needless(p)) return;
  Seen seen;
  const Walk at = walk();
  for (int64_t row = at.first_row; row < p.rows; row += at.row_step) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
#pragma unroll 4
    for (int64_t i = at.first; i < p.cols; i += at.step) seen.meet(Element<T>::to_float(x[i * p.col_stride]));
  }
  commit_block(p.taped, seen.bits, seen.nonfinite);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// A maximum does not ask in which order, nor how often: repeated rows or columns are read once, a transposed matrix
// along its memory, a matrix without gaps as one row.
Matrix shortest_way(Matrix x) {
  if (x.row_stride == 0) x.rows = 1;
  if (x.col_stride == 0) x.cols = 1;
  x = without_idle_strides(x);
  if (x.cols == 1 || (x.row_stride == 1 && x.col_stride != 1)) x = without_idle_strides(transposed(x));
  if (x.col_stride == 1 && x.row_stride == x.cols) x = {x.data, x.dtype, 1, x.rows * x.cols, 0, 1};
  return x;
}

int multiprocessors() {
  int device = 0, count = 0;
  OCTAVO_CHECK(cudaGetDevice(&device));
  OCTAVO_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

struct Launch {
  dim3 grid;
  dim3 block;
};

// As many threads along a row as have something to do there, the others on further rows; blocks to fill the device.
Launch launch_for(int64_t rows, int64_t steps_per_row) {
  unsigned width = 8;
  while (width < kThreads && width < steps_per_row) width *= 2;
  const unsigned height = kThreads / width;
  const int64_t blocks = int64_t{multiprocessors()} * (2048 / kThreads);
  const int64_t across = std::clamp<int64_t>(ceil_div(steps_per_row, width), 1, blocks);
  const int64_t down = std::clamp<int64_t>(blocks / across, 1, std::min<int64_t>(ceil_div(rows, height), 65535));
  return {dim3(static_cast<unsigned>(across), static_cast<unsigned>(down)), dim3(width, height)};
}

}  // namespace

void measure_amax(const Matrix& given, TapedOperand* taped, const StepRule& rule, cudaStream_t stream) {
  if (given.rows == 0 || given.cols == 0) return;
  const Matrix x = shortest_way(given);
  const AmaxArgs args = {x.data, x.rows, x.cols, x.row_stride, x.col_stride, taped, rule};
  const bool aligned = rows_are_aligned(x);
  // A thread with fewer than kUnroll loads to make has too few in flight.
  const int64_t elements = aligned ? kUnroll * 16 / element_size(x.dtype) : kUnroll;
  const Launch launch = launch_for(x.rows, ceil_div(x.cols, elements));
  dispatch(x.dtype, [&]<typename T>() {
    if (aligned) {
      amax_words_kernel<T><<<launch.grid, launch.block, 0, stream>>>(args);
    } else {
      amax_elements_kernel<T><<<launch.grid, launch.block, 0, stream>>>(args);
    }
  });
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
