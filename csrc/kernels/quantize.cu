// SPDX-License-Identifier: Apache-2.0
// Quantises a matrix: step, cast, row-major and transposed copies, amax and column sums in one pass.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "dispatch.cuh"
#include "matrix.h"
#include "quantize.cuh"

namespace octavo::kernels {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// Enough warps to keep the memory busy: 64 registers a thread, or 128 where a block of float32 is held.
template <typename T>
constexpr int kTilesAtOnce = sizeof(T) == 4 ? 2 : 4;

template <typename T, Fp8 kFormat, bool kSums>
__global__ void __launch_bounds__(kThreads, kTilesAtOnce<T>) quantize_kernel(const __grid_constant__ QuantizeArgs p) {
  __shared__ QuantizeShared<kSums> s;
  const uint32_t tile_number = p.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Corner tile = {static_cast<int64_t>(tile_number / p.tiles_across) * kTile,
                       static_cast<int64_t>(tile_number % p.tiles_across) * kTile};

  Vector<T, kBlock> x[kBlock];
  const int64_t row = tile.row + block_row(), col = tile.col + block_col();
  const T* from = static_cast<const T*>(p.x) + row * p.row_stride + col;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = {};
    if (p.aligned && col < p.cols && row + i < p.rows) x[i] = Vector<T, kBlock>::load(from + i * p.row_stride);
  }
  prepare(p, s);
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) peak = x[i].peak(peak);

  // One Inf or NaN in a tile sends the whole tile the slow way, and so does a step whose reciprocal is no number.
  const bool plain = !__syncthreads_or(!p.aligned || !Element<T>::is_finite(peak)) && is_valid_step(s.step) &&
                     is_valid_step(s.inv_scale);
  ByteBlock bytes;
  Seen seen;
  if (plain) {
    cast_block<T, kFormat, kSums>(x, s, bytes);
    seen.bits = Element<T>::float_bits(peak);
  } else {
    seen = cast_elements<T, kFormat, kSums>(p, tile, s);
    collect_block(s.tile, bytes);
  }
  if (p.row != nullptr) store_rows(p, tile, bytes);
  if (p.col != nullptr) store_transposed_block(s.tile, bytes);
  if (p.measure) {
    const uint32_t amax_bits = __reduce_max_sync(0xffffffffu, seen.bits);
    if (threadIdx.x % 32 == 0) atomicMax(&s.amax_bits, amax_bits);
    if (seen.nonfinite) s.nonfinite = 1;
  }
  __syncthreads();
  if (p.col != nullptr) store_columns(p, tile, s.tile);
  if constexpr (kSums) store_column_sum(p, tile, s.sums);
  if (p.measure && threadIdx.x == 0) commit(p.taped, s.amax_bits, s.nonfinite != 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

bool is_multiple(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// A transposed matrix is quantised as what it is in memory, and its two copies change places. Column sums are tied to
// the direction.
Quantize along_memory(Quantize q) {
  q.x = without_idle_strides(q.x);
  if (q.x.row_stride != 1 || q.x.col_stride == 1 || q.column_sums != nullptr) return q;
  q.x = transposed(q.x);
  std::swap(q.padded_rows, q.padded_cols);
  std::swap(q.row, q.col);
  return q;
}

QuantizeArgs arguments(const Quantize& q) {
  const Matrix& x = q.x;
  return {.x = x.data,
          .rows = x.rows,
          .cols = x.cols,
          .row_stride = x.row_stride,
          .col_stride = x.col_stride,
          .padded_rows = q.padded_rows,
          .padded_cols = q.padded_cols,
          .row = q.row,
          .col = q.col,
          .column_sums = q.column_sums,
          .taped = q.taped,
          .rule = q.rule,
          .tiles_across = static_cast<uint32_t>(ceil_div(std::max(x.cols, q.padded_cols), kTile)),
          .aligned = rows_are_aligned(x) && x.cols % kBlock == 0,
          .row_aligned = q.padded_cols % 8 == 0 && is_multiple(q.row, 8),
          .col_aligned = q.padded_rows % 16 == 0 && is_multiple(q.col, 16),
          .measure = q.measure,
          // measure_amax has just read x from its beginning to its end, of which the L2 cache still holds a part.
          .backwards = q.rule.source == StepSource::kAmax};
}

}  // namespace

void quantize(const Quantize& given, cudaStream_t stream) {
  const Quantize q = along_memory(given);
  const QuantizeArgs args = arguments(q);
  const int64_t tiles = ceil_div(std::max(q.x.rows, q.padded_rows), kTile) * args.tiles_across;
  if (tiles == 0) return;
  if (tiles > INT32_MAX) throw std::runtime_error("octavo: a matrix too large to quantise");
  dispatch(q.x.dtype, [&]<typename T>() {
    dispatch(q.format, [&]<Fp8 kFormat>() {
      dispatch(q.column_sums != nullptr, [&]<bool kSums>() {
        quantize_kernel<T, kFormat, kSums><<<static_cast<uint32_t>(tiles), kThreads, 0, stream>>>(args);
      });
    });
  });
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
