// SPDX-License-Identifier: Apache-2.0
// The life of a slot: a tape is made, a backward records on its slot, an optimizer's step advances the slots.
#include <cstdint>

#include "check.h"
#include "matrix.h"
#include "step.cuh"

namespace octavo::kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

__device__ inline TapedOperand unmeasured(float scale) {
  return {.scale = scale, .amax = 0.0f, .nonfinite = 0, .reserved = 0};
}

// Thread o takes operand o.
__global__ void init_tape_kernel(Tape* tape, int32_t slot, int32_t generation, int32_t ring, int32_t policy,
                                 const __grid_constant__ ArenaView arena) {
  float scale = 0.0f;
  if (slot >= 0) {
    const Slot& held = slot_at(arena, slot);
    const OperandState& operand = held.operand[threadIdx.x];
    if (held.generation == generation && held.policy.id == policy && operand.seeded != 0) scale = operand.scale;
  }
  tape->operand[threadIdx.x] = unmeasured(scale);
  if (threadIdx.x == 0) tape->slot = slot, tape->generation = generation, tape->ring = ring, tape->reserved = 0;
}

__global__ void init_gradient_kernel(TapedOperand* gradient, const Tape* tape) {
  *gradient = unmeasured(tape->operand[kG].scale);
}

// One warp: thread o takes operand o. The maximum is atomic because backwards may run on several streams; bits of
// floats that are not negative are ordered like the floats.
__global__ void record_kernel(const Tape* tape, const TapedOperand* gradient, const ScalingPolicy policy,
                              const __grid_constant__ ArenaView arena) {
  Slot* slot = slot_of(tape, arena);
  if (slot == nullptr) return;
  const int32_t held = slot->policy.id;
  __syncwarp();
  const int operand = threadIdx.x;
  if (held != policy.id) {
    if (operand < kOperands) slot->operand[operand] = {};
    if (operand == 0) {
      slot->policy = policy;
      slot->ring = tape->ring;
    }
    __syncwarp();
  }
  if (operand >= kOperands || (operand == kG && gradient == nullptr)) return;
  const TapedOperand& seen = operand == kG ? *gradient : tape->operand[operand];
  if (operand == kG && seen.nonfinite != 0) return;
  if (seen.amax > 0.0f) {
    atomicMax(reinterpret_cast<unsigned int*>(&slot->operand[operand].pending), __float_as_uint(seen.amax));
  }
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
  if (!(amax > 0.0f) || policy.history_len <= 0) return;

  const bool leader = threadIdx.x % kWarp == 0;
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
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void init_tape(Tape* tape, int32_t slot, int32_t generation, int32_t ring, const ScalingPolicy& policy,
               const ArenaView& arena, cudaStream_t stream) {
  init_tape_kernel<<<1, kOperands, 0, stream>>>(tape, slot, generation, ring, policy.id, arena);
  OCTAVO_CHECK(cudaGetLastError());
}

void init_gradient(TapedOperand* gradient, const Tape* tape, cudaStream_t stream) {
  init_gradient_kernel<<<1, 1, 0, stream>>>(gradient, tape);
  OCTAVO_CHECK(cudaGetLastError());
}

void record(const Tape* tape, const TapedOperand* gradient, const ScalingPolicy& policy, const ArenaView& arena,
            cudaStream_t stream) {
  if (policy.kind == ScalingKind::kDynamic) return;  // it has no history
  record_kernel<<<1, kWarp, 0, stream>>>(tape, gradient, policy, arena);
  OCTAVO_CHECK(cudaGetLastError());
}

void advance(const ArenaView& arena, int32_t owner, const float* found_inf, cudaStream_t stream) {
  const int64_t threads = int64_t{arena.slot_count} * kOperands * kWarp;
  if (threads == 0) return;
  advance_kernel<<<static_cast<unsigned>(ceil_div(threads, kThreads)), kThreads, 0, stream>>>(arena, owner, found_inf);
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
