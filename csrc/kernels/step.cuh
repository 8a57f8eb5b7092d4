// SPDX-License-Identifier: Apache-2.0
// Device code: where a slot lies in the arena, and the step that a quantisation uses.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace octavo::kernels {

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

// One float of the pool. Looked up by itself, since nothing keeps a slot's rings from spanning two chunks.
__device__ inline float& float_at(const ArenaView& arena, int32_t index) {
  const ChunkPlace place = place_in_chunks(index, ArenaView::kFirstFloats);
  return arena.floats[place.chunk][place.offset];
}

// The slot that the tape was made for, or null where it has been freed or given away since, or never was.
__device__ inline Slot* slot_of(const Tape* tape, const ArenaView& arena) {
  if (tape->slot < 0 || tape->slot >= arena.slot_count) return nullptr;
  Slot& slot = slot_at(arena, tape->slot);
  return slot.generation == tape->generation ? &slot : nullptr;
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

__device__ inline float resolve_step(const StepRule& rule, const TapedOperand* taped) {
  // Both are loaded before either is looked at: loads behind branches are all that a small quantisation does.
  const float scale = taped->scale, amax = taped->amax;
  if (rule.source == StepSource::kTaped) return scale;
  if (rule.source == StepSource::kHistory && scale != 0.0f) return scale;
  return step_from_amax(amax, rule.policy, rule.operand);
}

}  // namespace octavo::kernels
