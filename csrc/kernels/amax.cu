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

constexpr int kThreads = 512;
constexpr int kUnroll = 8;        // 16-byte loads in flight a thread
constexpr int kBlocksAtOnce = 2;  // on a multiprocessor

struct AmaxArgs {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  DType dtype;
  Operand operand;
  bool aligned;
  uint32_t width;           // threads of a block along a row, the others on further rows
  uint32_t across, blocks;  // blocks along a row, and in all
  const float* known;
  Peak* peaks;
};

// The blocks of the first, then those of the second; an unused one has none.
struct AmaxLaunch {
  AmaxArgs args[2];
  Forward forward;  // with a tape, or without
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

__device__ inline void store_peak(Peak* peak, uint32_t bits, bool nonfinite) {
  __shared__ uint32_t warp_bits[kThreads / kWarp];
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % kWarp == 0) warp_bits[threadIdx.x / kWarp] = of_warp;
  const bool any_nonfinite = __syncthreads_or(nonfinite) != 0;
  if (threadIdx.x != 0) return;
  uint32_t of_block = 0;
  for (const uint32_t b : warp_bits) of_block = max(of_block, b);
  *peak = of_block | (any_nonfinite ? kNonFinite : 0);
}

// Threads and blocks stride over a row in x, over the rows in y.
struct Walk {
  int64_t first_row, row_step, first, step;
};

__device__ inline Walk walk(const AmaxArgs& p, uint32_t block) {
  const uint32_t height = kThreads / p.width, down = p.blocks / p.across;
  return {int64_t{block / p.across} * height + threadIdx.x / p.width, int64_t{down} * height,
          int64_t{block % p.across} * p.width + threadIdx.x % p.width, int64_t{p.across} * p.width};
}

// Rows that can be read in 16-byte words.
template <typename T>
__device__ inline Seen measure_words(const AmaxArgs& p, const Walk& at) {
  using Word = Vector<T, Meter<T>::kElements>;
  Meter<T> meter;
  const int64_t words = p.cols / Meter<T>::kElements;
  for (int64_t row = at.first_row; row < p.rows; row += at.row_step) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
    for (int64_t i = at.first; i < words; i += kUnroll * at.step) {
      Word v[kUnroll] = {};  // zeros, past the end, change no maximum
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * at.step < words) v[u] = Word::load(x + (i + u * at.step) * Meter<T>::kElements);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) meter.meet(v[u]);
    }
    const int64_t rest = words * Meter<T>::kElements + at.first;
    if (rest < p.cols) meter.seen.meet(Element<T>::to_float(x[rest]));
  }
  meter.seen.bits = max(meter.seen.bits, Element<T>::float_bits(meter.peak));
  return meter.seen;
}

// Any strides and alignment.
template <typename T>
__device__ inline Seen measure_elements(const AmaxArgs& p, const Walk& at) {
  Seen seen;
  for (int64_t row = at.first_row; row < p.rows; row += at.row_step) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
#pragma unroll 4
    for (int64_t i = at.first; i < p.cols; i += at.step) seen.meet(Element<T>::to_float(x[i * p.col_stride]));
  }
  return seen;
}

template <typename T>
__device__ inline Seen measure(const AmaxArgs& p, uint32_t block) {
  return p.aligned ? measure_words<T>(p, walk(p, block)) : measure_elements<T>(p, walk(p, block));
}

__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) amax_kernel(const __grid_constant__ AmaxLaunch launch) {
  const bool is_second = blockIdx.x >= launch.args[0].blocks;
  const AmaxArgs& p = launch.args[is_second];
  const uint32_t block = blockIdx.x - (is_second ? launch.args[0].blocks : 0);
  if (blockIdx.x == 0 && launch.forward.tape != nullptr) write_tape<true>(launch.forward);
  const float known = p.known != nullptr ? *p.known : step_of_slot(launch.forward, p.operand);
  Seen seen;
  if (known == 0.0f) {
    seen = p.dtype == DType::kBF16   ? measure<__nv_bfloat16>(p, block)
           : p.dtype == DType::kFP16 ? measure<__half>(p, block)
                                     : measure<float>(p, block);
  }
  store_peak(p.peaks + block, seen.bits, seen.nonfinite);
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

// As many threads along a row as have something to do there, the others on further rows; blocks to fill the device. A
// thread with fewer than kUnroll loads to make has too few in flight.
AmaxArgs arguments(const Measure& m) {
  const Matrix x = shortest_way(m.x);
  AmaxArgs args = {.x = x.data,
                   .rows = x.rows,
                   .cols = x.cols,
                   .row_stride = x.row_stride,
                   .col_stride = x.col_stride,
                   .dtype = x.dtype,
                   .operand = m.operand,
                   .aligned = rows_are_aligned(x),
                   .width = 8,
                   .across = 1,
                   .blocks = 1,
                   .known = m.known,
                   .peaks = m.peaks};
  const int64_t per_row = ceil_div(x.cols, args.aligned ? kUnroll * 16 / element_size(x.dtype) : kUnroll);
  while (args.width < kThreads && args.width < per_row) args.width *= 2;
  const int64_t height = kThreads / args.width;
  const int64_t most = std::min(multiprocessors() * kBlocksAtOnce, Measure::kMaxPeaks);
  const int64_t across = std::clamp<int64_t>(ceil_div(per_row, args.width), 1, most);
  const int64_t down = std::clamp<int64_t>(ceil_div(x.rows, height), 1, most / across);
  args.across = static_cast<uint32_t>(across);
  args.blocks = static_cast<uint32_t>(across * down);
  return args;
}

}  // namespace

int32_t peaks_of(const Measure& m) { return static_cast<int32_t>(arguments(m).blocks); }

void measure_amax(const Measure* all, int count, const Forward* forward, cudaStream_t stream) {
  AmaxLaunch launch = {};
  if (forward != nullptr) launch.forward = *forward;
  for (int i = 0; i < count; ++i) launch.args[i] = arguments(all[i]);
  amax_kernel<<<launch.args[0].blocks + launch.args[1].blocks, kThreads, 0, stream>>>(launch);
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
