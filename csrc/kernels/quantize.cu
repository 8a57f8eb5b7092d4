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

// A branch that a whole block takes alike costs less than another copy of the kernel.
template <typename Body>
__device__ inline void dispatch_format(Fp8 format, Body&& body) {
  if (format == Fp8::kE4M3) {
    body.template operator()<Fp8::kE4M3>();
  } else {
    body.template operator()<Fp8::kE5M2>();
  }
}

// Enough warps to keep the memory busy: 64 registers a thread, or 128 where a block of float32 is held.
template <typename T>
constexpr int kTilesAtOnce = sizeof(T) == 4 ? 2 : 4;

// Where a tile lies.
__device__ inline Corner corner_of(const QuantizeArgs& p, uint32_t number) {
  const uint32_t place = p.backwards ? p.tiles - 1 - number : number;
  return {static_cast<int64_t>(place / p.tiles_across) * kTile, static_cast<int64_t>(place % p.tiles_across) * kTile};
}

// `plain`: the tile is in `bytes`, else in s.tile.
template <bool kSums>
__device__ inline void store_tile(const QuantizeArgs& p, uint32_t number, Corner tile, bool plain, ByteBlock& bytes,
                                  Seen seen, QuantizeShared<kSums>& s) {
  if (!plain) collect_block(s.tile, bytes);
  if (p.row != nullptr) store_rows(p, tile, bytes);
  if (p.col != nullptr) store_transposed_block(s.tile, bytes);
  if (p.peaks != nullptr) {
    const uint32_t amax_bits = __reduce_max_sync(0xffffffffu, seen.bits);
    if (threadIdx.x % kWarp == 0) atomicMax(&s.amax_bits, amax_bits);
    if (seen.nonfinite) s.nonfinite = 1;
  }
  __syncthreads();
  if (p.col != nullptr) store_columns(p, tile, s.tile);
  if constexpr (kSums) {
    if (p.column_sums != nullptr) store_column_sum(p, tile, s.sums);
  }
  if (p.peaks != nullptr && threadIdx.x == 0) p.peaks[number] = s.amax_bits | (s.nonfinite != 0 ? kNonFinite : 0);
}

// What a block does for kTape without a history: it adds its tile to the amax; the last one then has the step, and
// casts every tile. The counters on the tape are 0 again afterwards, for whoever is launched next.
template <typename T, bool kSums>
__device__ __noinline__ void cast_without_history(const QuantizeArgs& p, const ScalingPolicy& policy, Corner own_tile,
                                                  QuantizeShared<kSums>& s) {
  const int64_t col = own_tile.col + threadIdx.x % kTile;
  Seen seen;
  for (int64_t row = own_tile.row + threadIdx.x / kTile; row < own_tile.row + kTile; row += kThreads / kTile) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride + col * p.col_stride;
    if (row < p.rows && col < p.cols) seen.meet(Element<T>::to_float(*x));
  }
  const uint32_t amax_bits = __reduce_max_sync(0xffffffffu, seen.bits);
  if (threadIdx.x % kWarp == 0) atomicMax(&s.amax_bits, amax_bits);
  __syncthreads();
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    atomicMax(&p.own->amax, s.amax_bits);
    __threadfence();
    is_last = atomicAdd(&p.own->blocks, 1) == p.tiles - 1;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) {
    const float amax = __uint_as_float(atomicExch(&p.own->amax, 0));
    p.own->blocks = 0;
    s.step = step_from_amax(amax, policy, p.operand);
    s.inv_scale = __fdiv_rn(1.0f, s.step);
    if (p.used != nullptr) *p.used = s.step;
  }
  for (uint32_t number = 0; number < p.tiles; ++number) {
    __syncthreads();
    if (threadIdx.x == 0) s.amax_bits = 0, s.nonfinite = 0;
    __syncthreads();
    const Corner tile = corner_of(p, number);
    ByteBlock bytes;
    dispatch_format(p.format, [&]<Fp8 kFormat>() { seen = cast_elements<T, kFormat, kSums>(p, tile, s); });
    store_tile(p, number, tile, /*plain=*/false, bytes, seen, s);
  }
}

// kMayMeasure: one of the operands takes its step from the tape, and may have none.
template <typename T, bool kSums, bool kMayMeasure>
__global__ void __launch_bounds__(kThreads, kTilesAtOnce<T>)
    quantize_kernel(const __grid_constant__ QuantizeLaunch launch) {
  __shared__ QuantizeShared<kSums> s;
  const bool is_second = blockIdx.x >= launch.args[0].tiles;
  const QuantizeArgs p = is_second ? launch.args[1] : launch.args[0];  // 5% faster than an index
  const uint32_t number = blockIdx.x - (is_second ? launch.args[0].tiles : 0);
  const Corner tile = corner_of(p, number);

  Vector<T, kBlock> x[kBlock];
  const int64_t row = tile.row + block_row(), col = tile.col + block_col();
  const T* from = static_cast<const T*>(p.x) + row * p.row_stride + col;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = {};
    if (p.aligned && col < p.cols && row + i < p.rows) x[i] = Vector<T, kBlock>::load(from + i * p.row_stride);
  }
  prepare(launch, p, number == 0, s);
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) peak = x[i].peak(peak);

  // One Inf or NaN in a tile sends the whole tile the slow way, and so does a step whose reciprocal is no number.
  const bool plain = !__syncthreads_or(!p.aligned || !Element<T>::is_finite(peak)) && is_valid_step(s.step) &&
                     is_valid_step(s.inv_scale);
  if constexpr (kMayMeasure) {
    if (p.source == StepSource::kTape && s.step == 0.0f) {
      cast_without_history<T, kSums>(launch.args[is_second], launch.policy, tile, s);  // no copy of p on the stack
      return;
    }
  }
  ByteBlock bytes;
  Seen seen;
  dispatch_format(p.format, [&]<Fp8 kFormat>() {
    if (plain) {
      cast_block<T, kFormat, kSums>(x, s, bytes);
      seen.bits = Element<T>::float_bits(peak);
    } else {
      seen = cast_elements<T, kFormat, kSums>(p, tile, s);
    }
  });
  store_tile(p, number, tile, plain, bytes, seen, s);
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

uint32_t tiles_across(const Quantize& q) {
  return static_cast<uint32_t>(ceil_div(std::max(q.x.cols, q.padded_cols), kTile));
}

QuantizeArgs arguments(const Quantize& given) {
  const Quantize q = along_memory(given);
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
          .given = q.given,
          .own = q.own,
          .used = q.used,
          .measured = q.measured,
          .peaks = q.peaks,
          .measured_count = q.measured_count,
          .operand = q.operand,
          .source = q.source,
          .format = q.format,
          .tiles = static_cast<uint32_t>(tiles_of(q)),
          .tiles_across = tiles_across(q),
          .aligned = rows_are_aligned(x) && x.cols % kBlock == 0,
          .row_aligned = q.padded_cols % 8 == 0 && is_multiple(q.row, 8),
          .col_aligned = q.padded_rows % 16 == 0 && is_multiple(q.col, 16),
          .backwards = false};
}

void launch_on(const QuantizeLaunch& launch, DType dtype, cudaStream_t stream) {
  const uint32_t tiles = launch.args[0].tiles + launch.args[1].tiles;
  if (tiles == 0) return;
  const auto any = [&](auto&& predicate) { return predicate(launch.args[0]) || predicate(launch.args[1]); };
  const bool sums = any([](const QuantizeArgs& p) { return p.column_sums != nullptr; });
  const bool may_measure = any([](const QuantizeArgs& p) { return p.tiles != 0 && p.source == StepSource::kTape; });
  dispatch(dtype, [&]<typename T>() {
    dispatch(sums, [&]<bool kSums>() {
      dispatch(may_measure, [&]<bool kMayMeasure>() {
        quantize_kernel<T, kSums, kMayMeasure><<<tiles, kThreads, 0, stream>>>(launch);
      });
    });
  });
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace

int32_t tiles_of(const Quantize& q) {
  const int64_t tiles = ceil_div(std::max(q.x.rows, q.padded_rows), kTile) * tiles_across(q);
  if (tiles > INT32_MAX / 2) throw std::runtime_error("octavo: a matrix too large to quantise");
  return static_cast<int32_t>(tiles);
}

void quantize(const Quantize* all, int count, const ScalingPolicy& policy, const Forward* forward,
              cudaStream_t stream) {
  QuantizeLaunch launch = {};
  if (forward != nullptr) launch.forward = *forward;
  launch.policy = policy;
  for (int i = 0; i < count; ++i) {
    launch.args[i] = arguments(all[i]);
    // measure_amax has just read them from beginning to end, of which the L2 cache still holds a part (not of w in
    // backward, which is not measured, and for which the order is all the same).
    launch.args[i].backwards = policy.kind == ScalingKind::kDynamic;
  }
  if (count == 2 && all[0].x.dtype != all[1].x.dtype) {
    QuantizeLaunch second = launch;
    second.args[0] = launch.args[1];
    second.args[1] = launch.args[1] = {};
    launch_on(launch, all[0].x.dtype, stream);
    return launch_on(second, all[1].x.dtype, stream);
  }
  launch_on(launch, all[0].x.dtype, stream);
}

}  // namespace octavo::kernels
