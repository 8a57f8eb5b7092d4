// SPDX-License-Identifier: Apache-2.0
// What comes after the quantisation: a backward records on its slot and sums up the bias gradient, an optimizer's step
// advances the slots.
#include <cstdint>

#include "check.h"
#include "dispatch.cuh"
#include "matrix.h"
#include "rounding.cuh"
#include "step.cuh"

namespace octavo::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kEndThreads = kOperands * kThreads;

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// Of many peaks, for a group of kThreads threads.
__device__ inline Peak combined(const Peak* peaks, int32_t count, Peak (&of_warps)[kThreads / kWarp]) {
  uint32_t amax = 0, nonfinite = 0;
#pragma unroll 4
  for (int32_t i = threadIdx.x % kThreads; i < count; i += kThreads) {
    amax = max(amax, peaks[i] & ~kNonFinite);
    nonfinite |= peaks[i] & kNonFinite;
  }
  amax = __reduce_max_sync(0xffffffffu, amax);
  nonfinite = __reduce_or_sync(0xffffffffu, nonfinite);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x % kThreads / kWarp] = amax | nonfinite;
  __syncthreads();
  for (const Peak p : of_warps) amax = max(amax, p & ~kNonFinite), nonfinite |= p & kNonFinite;
  return amax | nonfinite;
}

// One block: each third of it takes an operand. The maximum is atomic because backwards may run on several streams.
__device__ inline void record(const EndOfBackward& end) {
  __shared__ Peak of_warps[kOperands][kThreads / kWarp];
  const Tape& tape = *end.tape;
  const int operand = threadIdx.x / kThreads;
  const bool is_g = operand == kG;
  const Peak* const peaks = is_g ? end.g_peaks : peaks_on(tape, operand);
  const int32_t count = is_g ? end.g_count : tape.operand[operand].peaks;
  const Peak seen = combined(peaks, count, of_warps[operand]);

  Slot* slot = slot_of(tape, end.arena);
  if (slot == nullptr) return;
  const bool is_held = slot->policy.id == end.policy.id;
  __syncthreads();
  if (!is_held) {
    if (threadIdx.x % kThreads == 0) slot->operand[operand] = {};
    if (threadIdx.x == 0) {
      slot->policy = end.policy;
      slot->ring = tape.ring;
    }
    __syncthreads();
  }
  if (threadIdx.x % kThreads != 0 || (operand == kG && (seen & kNonFinite) != 0)) return;
  const uint32_t amax = seen & ~kNonFinite;
  if (amax != 0) atomicMax(reinterpret_cast<unsigned int*>(&slot->operand[operand].pending), amax);
}

// kSumCols columns a block: each of its parts sums every kSumParts-th tile, then the parts are added in order.
constexpr int kSumCols = 64;
constexpr int kSumParts = kEndThreads / kSumCols;

template <typename T>
__device__ inline void sum_columns(const EndOfBackward& end, int64_t block) {
  __shared__ double sums[kSumParts][kSumCols];
  const int local_col = threadIdx.x % kSumCols, part = threadIdx.x / kSumCols;
  const int64_t col = block * kSumCols + local_col;
  double sum = 0.0;
  if (col < end.cols) {
#pragma unroll 4
    for (int64_t tile = part; tile < end.tiles; tile += kSumParts) sum += end.partial_sums[tile * end.cols + col];
  }
  sums[part][local_col] = sum;
  __syncthreads();
  if (part != 0 || col >= end.cols) return;
  for (int i = 1; i < kSumParts; ++i) sum += sums[i][local_col];
  static_cast<T*>(end.sums)[col] = Rounded<T>::from(sum);
}

template <typename T>
__global__ void __launch_bounds__(kEndThreads) end_backward_kernel(const __grid_constant__ EndOfBackward end) {
  const int64_t recorders = end.tape != nullptr ? 1 : 0;
  if (blockIdx.x < recorders) return record(end);
  sum_columns<T>(end, blockIdx.x - recorders);
}

__global__ void begin_tape_kernel(const __grid_constant__ Forward forward) { write_tape<true>(forward); }

__global__ void reduce_peaks_kernel(const Peak* peaks, int32_t count, float* amax) {
  const float largest = largest_peak(peaks, count);
  if (threadIdx.x == 0) *amax = largest;
}

__device__ inline float largest_of_ring(const ArenaView& arena, int32_t ring, int32_t history_len) {
  uint32_t bits = 0;
  for (int32_t i = threadIdx.x % kWarp; i < history_len; i += kWarp) {
    bits = max(bits, __float_as_uint(float_at(arena, ring + i)));
  }
  return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

// One warp for each operand of each slot.
__global__ void __launch_bounds__(kThreads)
    advance_kernel(const __grid_constant__ ArenaView arena, int32_t owner, const float* found_inf) {
  const int64_t number = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (number >= int64_t{arena.slot_count} * kOperands) return;
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  Slot& slot = slot_at(arena, static_cast<int32_t>(number / kOperands));
  if (slot.generation == 0 || slot.policy.id == 0) return;
  if (owner != 0 && slot.owner != 0 && slot.owner != owner) return;
  const int32_t o = static_cast<int32_t>(number % kOperands);
  OperandState& operand = slot.operand[o];
  const float amax = operand.pending;
  const ScalingPolicy& policy = slot.policy;
  const bool leader = threadIdx.x % kWarp == 0;
  const auto tell_host = [&] {
    __threadfence_system();  // what is told is true before it is
    seeded_at(arena, static_cast<int32_t>(number / kOperands))[o] = slot.version;
  };
  if (!(amax > 0.0f) || policy.history_len <= 0) {
    if (leader && operand.seeded != 0) tell_host();
    return;
  }

  const bool first = operand.seeded == 0;
  const int32_t cursor = operand.cursor;
  const int32_t ring = slot.ring + o * policy.history_len;
  __syncwarp();
  if (first) {
    for (int32_t i = threadIdx.x % kWarp; i < policy.history_len; i += kWarp) float_at(arena, ring + i) = amax;
  } else if (leader) {
    float_at(arena, ring + cursor) = amax;
  }
  __syncwarp();
  const float considered =
      policy.kind == ScalingKind::kMostRecent ? amax : largest_of_ring(arena, ring, policy.history_len);
  if (!leader) return;
  if (!first && amax > __fmul_rn(__fmul_rn(operand.scale, policy.fp8_max[o]), kClippedFrom)) ++operand.clipped;
  operand.pending = 0.0f;
  operand.cursor = first || cursor + 1 >= policy.history_len ? 0 : cursor + 1;
  operand.seeded = 1;
  if (policy.kind == ScalingKind::kCustom) operand.due = 1;
  // A custom policy's step comes later, from the recipe. Until its first one the built-in formula stands in.
  if (policy.kind != ScalingKind::kCustom || first) operand.scale = step_from_amax(considered, policy, o);
  tell_host();
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void end_backward(const EndOfBackward& end, cudaStream_t stream) {
  const int64_t blocks = (end.tape != nullptr ? 1 : 0) + (end.sums != nullptr ? ceil_div(end.cols, kSumCols) : 0);
  if (blocks == 0) return;
  dispatch(end.sums_dtype, [&]<typename T>() {
    end_backward_kernel<T><<<static_cast<unsigned>(blocks), kEndThreads, 0, stream>>>(end);
  });
  OCTAVO_CHECK(cudaGetLastError());
}

void begin_tape(const Forward& forward, cudaStream_t stream) {
  begin_tape_kernel<<<1, kThreads, 0, stream>>>(forward);
  OCTAVO_CHECK(cudaGetLastError());
}

void reduce_peaks(const Peak* peaks, int32_t count, float* amax, cudaStream_t stream) {
  reduce_peaks_kernel<<<1, kWarp, 0, stream>>>(peaks, count, amax);
  OCTAVO_CHECK(cudaGetLastError());
}

void advance(const ArenaView& arena, int32_t owner, const float* found_inf, cudaStream_t stream) {
  const int64_t threads = int64_t{arena.slot_count} * kOperands * kWarp;
  if (threads == 0) return;
  advance_kernel<<<static_cast<unsigned>(ceil_div(threads, kThreads)), kThreads, 0, stream>>>(arena, owner, found_inf);
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
