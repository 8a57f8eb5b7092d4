// SPDX-License-Identifier: Apache-2.0
// The scaling state on the CPU: record, advance, and what custom policies need. Also part of the specification.
#include "cpu_state.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "../arena.h"
#include "../policy.h"
#include "cpu_formats.h"
#include "float_mode.h"

namespace octavo::ops {
namespace cpu {

using at::Tensor;

std::mutex& state_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

template <class T>
T& entry(T* const* chunks, int64_t first, int64_t index) {
  int chunk = 0;
  for (int64_t size = first; index >= size; size *= 2, ++chunk) index -= size;
  return chunks[chunk][index];
}
Slot& slot_at(const ArenaView& arena, int32_t index) { return entry(arena.slots, ArenaView::kFirstSlots, index); }
float* ring_at(const ArenaView& arena, const Slot& slot, int operand) {
  return &entry(arena.floats, ArenaView::kFirstFloats, slot.ring) + int64_t{operand} * slot.policy.history_len;
}
ArenaView arena() { return Arena::of(at::kCPU).view(); }

// The slot that a tape speaks of, unless that has been freed since.
Slot* slot_of(const Tape& tape, const ArenaView& view) {
  if (tape.slot < 0) return nullptr;
  auto& slot = slot_at(view, tape.slot);
  return slot.generation == tape.generation ? &slot : nullptr;
}

void record(const Tensor& tape_words, const std::optional<Tensor>& gradient, int64_t policy_id) {
  const IeeeFloats ieee;
  const auto& policy = policy_by_id(policy_id);
  const auto& tape = *static_cast<const Tape*>(tape_words.const_data_ptr());
  std::lock_guard lock(state_mutex());
  Slot* slot = slot_of(tape, arena());
  if (!slot) return;
  if (slot->policy.id != policy.id) {
    slot->policy = policy;
    slot->ring = tape.ring;
    for (auto& operand : slot->operand) operand = {};
  }
  const auto pend = [&](Operand operand, float amax) {
    slot->operand[operand].pending = std::max(slot->operand[operand].pending, amax);
  };
  pend(kX, tape.operand[kX].amax);
  pend(kW, tape.operand[kW].amax);
  if (!gradient) return;
  const auto& g = *static_cast<const TapedOperand*>(gradient->const_data_ptr());
  if (!g.nonfinite) pend(kG, g.amax);
}

void advance_operand(Slot& slot, int operand, float* ring) {
  auto& state = slot.operand[operand];
  const auto& policy = slot.policy;
  if (state.pending <= 0) return;
  if (state.seeded && state.pending > state.scale * policy.fp8_max[operand] * kClippedFrom) ++state.clipped;
  if (!state.seeded) std::fill(ring, ring + policy.history_len, state.pending);
  ring[state.cursor] = state.pending;
  state.cursor = (state.cursor + 1) % policy.history_len;
  const float latest = state.pending;
  state.pending = 0;
  if (policy.kind == ScalingKind::kCustom) {
    if (!state.seeded) state.scale = step_from_amax(latest, policy.fp8_max[operand], policy);
    state.due = 1;
  } else {
    const bool window = policy.kind == ScalingKind::kWindowMax;
    const float amax = window ? *std::max_element(ring, ring + policy.history_len) : latest;
    state.scale = step_from_amax(amax, policy.fp8_max[operand], policy);
  }
  state.seeded = 1;
}

void advance(const Tensor&, int64_t owner, const std::optional<Tensor>& found_inf) {
  if (found_inf && found_inf->item<float>() != 0) return;
  const IeeeFloats ieee;
  std::lock_guard lock(state_mutex());
  const auto view = arena();
  for (int32_t i = 0; i < view.slot_count; ++i) {
    auto& slot = slot_at(view, i);
    if (slot.policy.id == 0 || (owner && slot.owner && slot.owner != owner)) continue;
    for (int operand = 0; operand < kOperands; ++operand) advance_operand(slot, operand, ring_at(view, slot, operand));
  }
}

std::tuple<Tensor, Tensor> gather_rings(const Tensor& slots, int64_t policy_id) {
  const IeeeFloats ieee;
  const auto& policy = policy_by_id(policy_id);
  const int64_t count = slots.numel(), length = policy.history_len;
  auto amax = at::zeros({count, kOperands, length}, at::kFloat);
  auto due = at::zeros({count, kOperands}, at::kInt);
  std::lock_guard lock(state_mutex());
  const auto view = arena();
  for (int64_t i = 0; i < count; ++i) {
    const auto& slot = slot_at(view, slots.const_data_ptr<int32_t>()[i]);
    if (slot.policy.id != policy.id) continue;
    for (int operand = 0; operand < kOperands; ++operand) {
      const float* ring = ring_at(view, slot, operand);
      float* out = amax.mutable_data_ptr<float>() + (i * kOperands + operand) * length;
      if (slot.operand[operand].seeded)
        for (int64_t j = 0; j < length; ++j) out[j] = ring[(slot.operand[operand].cursor + j) % length];
      due.mutable_data_ptr<int32_t>()[i * kOperands + operand] = slot.operand[operand].due;
    }
  }
  return {amax, due};
}

Tensor apply_steps(const Tensor& slots, const Tensor& due, const Tensor& steps, int64_t policy_id) {
  const IeeeFloats ieee;
  const auto& policy = policy_by_id(policy_id);
  auto rejected = at::zeros({1}, at::kInt);
  std::lock_guard lock(state_mutex());
  const auto view = arena();
  for (int64_t i = 0; i < slots.numel(); ++i) {
    auto& slot = slot_at(view, slots.const_data_ptr<int32_t>()[i]);
    if (slot.policy.id != policy.id) continue;
    for (int operand = 0; operand < kOperands; ++operand) {
      if (!due.const_data_ptr<int32_t>()[i * kOperands + operand]) continue;
      const float step = steps.const_data_ptr<float>()[i * kOperands + operand];
      slot.operand[operand].due = 0;
      if (std::isfinite(step) && step > 0)
        slot.operand[operand].scale = std::min(std::max(step, std::ldexp(1.0f, -126)), std::ldexp(1.0f, 126));
      else
        ++*rejected.mutable_data_ptr<int32_t>();
    }
  }
  return rejected;
}

}  // namespace cpu

float step_of_slot(const Tape& tape, Operand operand, const ScalingPolicy& policy) {
  std::lock_guard lock(cpu::state_mutex());
  const Slot* slot = cpu::slot_of(tape, cpu::arena());
  if (!slot || slot->policy.id != policy.id || !slot->operand[operand].seeded) return 0;
  return slot->operand[operand].scale;
}

}  // namespace octavo::ops

TORCH_LIBRARY_IMPL(octavo, CPU, m) {
  namespace cpu = octavo::ops::cpu;
  m.impl("_record", &cpu::record);
  m.impl("_advance", &cpu::advance);
  m.impl("_gather_rings", &cpu::gather_rings);
  m.impl("_apply_steps", &cpu::apply_steps);
}
