// SPDX-License-Identifier: Apache-2.0
// Device code: where a slot lies in the arena, the step that a quantisation uses, and the beginning of a tape.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace octavo::kernels {

constexpr int kWarp = 32;

struct ChunkPlace {
  int32_t chunk;
  int32_t offset;
};

// Chunk c begins at index first * (2^c - 1) and holds first << c entries (slot.h).
__device__ inline ChunkPlace place_in_chunks(int32_t index, int32_t first) {
  const int32_t chunk = 31 - __clz(index / first + 1);
  return {chunk, index - first * ((1 << chunk) - 1)};
}

__device__ inline Slot& slot_at(const ArenaView& arena, int32_t index) {
  const ChunkPlace place = place_in_chunks(index, ArenaView::kFirstSlots);
  return arena.slots[place.chunk][place.offset];
}

__device__ inline int32_t* seeded_at(const ArenaView& arena, int32_t index) {
  const ChunkPlace place = place_in_chunks(index, ArenaView::kFirstSlots);
  return arena.seeded[place.chunk] + place.offset * kOperands;
}

// One float of the pool. Looked up by itself, since nothing keeps a slot's rings from spanning two chunks.
__device__ inline float& float_at(const ArenaView& arena, int32_t index) {
  const ChunkPlace place = place_in_chunks(index, ArenaView::kFirstFloats);
  return arena.floats[place.chunk][place.offset];
}

// The slot that the tape was made for, or null where it has been freed or given away since, or never was.
__device__ inline Slot* slot_of(const Tape& tape, const ArenaView& arena) {
  if (tape.slot < 0 || tape.slot >= arena.slot_count) return nullptr;
  Slot& slot = slot_at(arena, tape.slot);
  return slot.generation == tape.generation ? &slot : nullptr;
}

// Finite and positive; false for NaN.
__device__ inline bool is_valid_step(float step) { return step > 0.0f && step <= 0x1.fffffep127f; }

__device__ inline float clamp_step(float step) { return fminf(fmaxf(step, 0x1p-126f), 0x1p126f); }

__device__ inline float round_up_to_power_of_two(float step) {
  const uint32_t bits = __float_as_uint(step);
  return __uint_as_float((bits & 0x007fffffu) == 0 ? bits : (bits & 0x7f800000u) + 0x00800000u);
}

// step = (amax / fp8_max) * multiplier, each operation rounded once.
__device__ inline float step_from_amax(float amax, const ScalingPolicy& policy, int32_t operand) {
  if (!(amax > 0.0f)) return 1.0f;
  const float step = clamp_step(__fmul_rn(__fdiv_rn(amax, policy.fp8_max[operand]), policy.multiplier));
  return policy.power_of_two != 0 ? round_up_to_power_of_two(step) : step;
}

// The step that a slot holds for an operand; 0 where it is not the forward's any more, holds another policy, or has no
// history.
__device__ inline float step_of_slot(const Forward& forward, int32_t operand) {
  if (forward.slot < 0) return 0.0f;
  const Slot& slot = *forward.place;
  const bool is_ours = slot.generation == forward.generation && slot.policy.id == forward.policy;
  const OperandState& state = slot.operand[operand];
  return is_ours && state.seeded != 0 ? state.scale : 0.0f;
}

__device__ inline const Peak* peaks_on(const Tape& tape, int32_t operand) {
  return reinterpret_cast<const Peak*>(&tape + 1) + (operand == kW ? tape.operand[kX].peaks : 0);
}

// What a tape takes over of an earlier one. By a whole block.
__device__ inline void take_over(const Tape& from, int32_t operand, int32_t count, Tape& tape, Peak* peaks) {
  if (threadIdx.x == 0) tape.operand[operand].scale = from.operand[operand].scale;
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) peaks[i] = peaks_on(from, operand)[i];
}

// By a whole block. kSteps: the slot's steps of x and w too; without, the cast writes those.
template <bool kSteps>
__device__ inline void write_tape(const Forward& forward) {
  Tape& tape = *forward.tape;
  Peak* const peaks = reinterpret_cast<Peak*>(&tape + 1);
  if (forward.x_tape != nullptr) take_over(*forward.x_tape, kX, forward.x_peaks, tape, peaks);
  if (forward.w_tape != nullptr) take_over(*forward.w_tape, kW, forward.w_peaks, tape, peaks + forward.x_peaks);
  if (threadIdx.x != 0) return;
  if (kSteps && forward.x_tape == nullptr) tape.operand[kX].scale = step_of_slot(forward, kX);
  if (kSteps && forward.w_tape == nullptr) tape.operand[kW].scale = step_of_slot(forward, kW);
  tape.operand[kG].scale = step_of_slot(forward, kG);
  tape.slot = forward.slot;
  tape.generation = forward.generation;
  tape.ring = forward.ring;
  tape.operand[kX].peaks = forward.x_peaks;
  tape.operand[kW].peaks = forward.w_peaks;
  for (Tape::Operand& operand : tape.operand) operand.blocks = 0, operand.amax = 0;
}

// The amax of many peaks, for the calling warp. `peaks` may be unaligned.
__device__ inline float largest_peak(const Peak* peaks, int32_t count) {
  uint32_t bits = 0;
#pragma unroll 8
  for (int32_t i = threadIdx.x % kWarp; i < count; i += kWarp) bits = max(bits, peaks[i] & ~kNonFinite);
  return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

}  // namespace octavo::kernels
