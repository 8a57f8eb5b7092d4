// SPDX-License-Identifier: Apache-2.0
// The scaling state on the CPU: record, advance, and what custom policies need. Also part of the specification.
#include "cpu_state.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
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
int32_t* seeded_at(const ArenaView& arena, int32_t index) {
  return &entry(arena.seeded, kOperands * ArenaView::kFirstSlots, int64_t{kOperands} * index);
}
float* ring_at(const ArenaView& arena, const Slot& slot, int operand) {
  return &entry(arena.floats, ArenaView::kFirstFloats, slot.ring) + int64_t{operand} * slot.policy.history_len;
}
ArenaView arena() { return Arena::of(at::kCPU).view(); }

// Unless it has been freed since.
Slot* find_slot(const ArenaView& view, int64_t slot, int64_t generation) {
  if (slot < 0) return nullptr;
  auto& found = slot_at(view, static_cast<int32_t>(slot));
  return found.generation == generation ? &found : nullptr;
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
    for (int operand = 0; operand < kOperands; ++operand) {
      advance_operand(slot, operand, ring_at(view, slot, operand));
      if (slot.operand[operand].seeded)
        std::atomic_ref(seeded_at(view, i)[operand]).store(slot.version, std::memory_order_relaxed);
    }
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

float step_of_slot(int64_t slot_index, int64_t generation, Operand operand, const ScalingPolicy& policy) {
  std::lock_guard lock(cpu::state_mutex());
  const Slot* slot = cpu::find_slot(cpu::arena(), slot_index, generation);
  if (!slot || slot->policy.id != policy.id || !slot->operand[operand].seeded) return 0;
  return slot->operand[operand].scale;
}

void record(const at::Tensor& tape_words, Peak g, const ScalingPolicy& policy) {
  const IeeeFloats ieee;
  const auto& tape = *static_cast<const Tape*>(tape_words.const_data_ptr());
  const auto* peaks = reinterpret_cast<const Peak*>(&tape + 1);
  std::lock_guard lock(cpu::state_mutex());
  Slot* slot = cpu::find_slot(cpu::arena(), tape.slot, tape.generation);
  if (!slot) return;
  if (slot->policy.id != policy.id) {
    slot->policy = policy;
    slot->ring = tape.ring;
    for (auto& operand : slot->operand) operand = {};
  }
  const auto pend = [&](Operand operand, const Peak* first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      float amax;
      const Peak bits = first[i] & ~kNonFinite;
      std::memcpy(&amax, &bits, sizeof amax);
      slot->operand[operand].pending = std::max(slot->operand[operand].pending, amax);
    }
  };
  pend(kX, peaks, tape.operand[kX].peaks);
  pend(kW, peaks + tape.operand[kX].peaks, tape.operand[kW].peaks);
  if (!(g & kNonFinite)) pend(kG, &g, 1);
}

}  // namespace octavo::ops

TORCH_LIBRARY_IMPL(octavo, CPU, m) {
  namespace cpu = octavo::ops::cpu;
  m.impl("_record",
         [](const at::Tensor& tape, int64_t policy) { octavo::ops::record(tape, 0, octavo::policy_by_id(policy)); });
  m.impl("_advance", &cpu::advance);
  m.impl("_gather_rings", &cpu::gather_rings);
  m.impl("_apply_steps", &cpu::apply_steps);
}
