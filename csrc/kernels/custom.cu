// SPDX-License-Identifier: Apache-2.0
// Custom policies: the rings go out to the user's recipe, its steps come back.
#include <cstdint>

#include "check.h"
#include "matrix.h"
#include "step.cuh"

namespace octavo::kernels {
namespace {

constexpr int kThreads = 256;

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

__device__ inline bool holds(const Slot& slot, int32_t policy_id) {
  return slot.generation != 0 && slot.policy.id == policy_id;
}

// One warp for each operand of each slot. Where there is no ring to give, zeros are given.
__global__ void __launch_bounds__(kThreads)
    gather_rings_kernel(const __grid_constant__ ArenaView arena, const ScalingPolicy policy, const int32_t* slots,
                        int64_t count, float* amax, int32_t* due) {
  const int64_t number = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (number >= count * kOperands) return;
  const Slot& slot = slot_at(arena, slots[number / kOperands]);
  const int32_t o = static_cast<int32_t>(number % kOperands);
  const OperandState& operand = slot.operand[o];
  const bool has_ring = holds(slot, policy.id) && operand.seeded != 0;
  const int32_t lane = threadIdx.x % kWarp;
  for (int32_t i = lane; i < policy.history_len; i += kWarp) {
    int32_t at = operand.cursor + i;  // the cursor is at the oldest entry
    if (at >= policy.history_len) at -= policy.history_len;
    amax[number * policy.history_len + i] = has_ring ? float_at(arena, slot.ring + o * policy.history_len + at) : 0.0f;
  }
  if (lane == 0) due[number] = has_ring && operand.due != 0 ? 1 : 0;
}

__global__ void __launch_bounds__(kThreads)
    apply_steps_kernel(const __grid_constant__ ArenaView arena, const ScalingPolicy policy, const int32_t* slots,
                       int64_t count, const int32_t* due, const float* steps, int32_t* rejected) {
  const int64_t number = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (number >= count * kOperands || due[number] == 0) return;
  Slot& slot = slot_at(arena, slots[number / kOperands]);
  OperandState& operand = slot.operand[number % kOperands];
  // The recipe was asked about a ring that has been given away, or emptied, since.
  if (!holds(slot, policy.id) || operand.seeded == 0) return;
  operand.due = 0;
  const float step = steps[number];
  if (is_valid_step(step)) {
    operand.scale = clamp_step(step);
  } else {
    atomicAdd(rejected, 1);  // the scale before stays, or what advance_kernel put there for want of one
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void gather_rings(const ArenaView& arena, const ScalingPolicy& policy, const int32_t* slots, int64_t count, float* amax,
                  int32_t* due, cudaStream_t stream) {
  if (count == 0) return;
  const int64_t blocks = ceil_div(count * kOperands * kWarp, kThreads);
  gather_rings_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arena, policy, slots, count, amax, due);
  OCTAVO_CHECK(cudaGetLastError());
}

void apply_steps(const ArenaView& arena, const ScalingPolicy& policy, const int32_t* slots, int64_t count,
                 const int32_t* due, const float* steps, int32_t* rejected, cudaStream_t stream) {
  if (count == 0) return;
  const int64_t blocks = ceil_div(count * kOperands, kThreads);
  apply_steps_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arena, policy, slots, count, due, steps,
                                                                             rejected);
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
