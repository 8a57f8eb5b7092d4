// SPDX-License-Identifier: Apache-2.0
// A state as tensors, and back.
#include <ATen/Functions.h>

#include <bit>
#include <cstring>

#include "linear_state.h"
#include "slots.h"

namespace octavo {
namespace {

// Equal contents, equal steps: of what a slot holds for x.
uint64_t hash_of_input(const std::string& policy, const at::Tensor& scale, const at::Tensor& pending,
                       const at::Tensor& seeded, const at::Tensor& history) {
  const auto row = history.to(at::kCPU, at::kFloat).contiguous();
  const std::string values(reinterpret_cast<const char*>(row.const_data_ptr<float>()), sizeof(float) * row.size(1));
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  uint64_t hash = InputHistory::mixed(std::hash<std::string>()(policy), std::hash<std::string>()(values));
  hash = InputHistory::mixed(hash, bits(scale.const_data_ptr<float>()[kX]));
  hash = InputHistory::mixed(hash, bits(pending.const_data_ptr<float>()[kX]));
  return InputHistory::mixed(hash, seeded.const_data_ptr<bool>()[kX]);
}

at::Tensor oldest_first(const at::Tensor& ring, int64_t cursor) { return at::roll(ring, -cursor, 0); }

}  // namespace

std::vector<std::vector<int64_t>> slices_of(const at::Tensor& parameter) {
  std::lock_guard lock(live().mutex);
  std::vector<std::vector<int64_t>> slices;
  if (auto* state = find_kept<ParameterState>(parameter))
    for (auto& [key, linear] : state->states)
      if (!key.empty()) slices.push_back(key);
  return slices;
}

std::optional<StateTensors> read_state(const at::Tensor& weight) {
  auto [leaf, key] = leaf_of(weight);
  if (!leaf.defined()) return std::nullopt;
  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  auto* parameter = find_kept<ParameterState>(leaf);
  if (!parameter || !parameter->states.contains(key)) return std::nullopt;
  auto& state = *parameter->states[key];
  const auto words = state.arena->slot_words(state.handle.slot).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  Slot slot;
  std::memcpy(&slot, words.const_data_ptr(), sizeof slot);
  if (slot.policy.id == 0) return std::nullopt;

  StateTensors out{at::ones({kOperands}, at::kFloat), at::zeros({kOperands}, at::kFloat),
                   at::zeros({kOperands}, at::kBool), at::zeros({kOperands, slot.policy.history_len}, at::kFloat),
                   policy_key(slot.policy.id),        at::zeros({kOperands}, at::kInt)};
  const auto rings = state.arena->ring_floats(slot.ring, slot.policy.history_len).cpu();
  // Written as they are: fill_ goes by way of a double, and would lose a subnormal where those are flushed.
  for (int64_t i = 0; i < kOperands; ++i) {
    const auto& operand = slot.operand[i];
    out.pending.mutable_data_ptr<float>()[i] = operand.pending;
    if (!operand.seeded) continue;
    out.seeded.mutable_data_ptr<bool>()[i] = true;
    out.scale.mutable_data_ptr<float>()[i] = operand.scale;
    out.clipped.mutable_data_ptr<int32_t>()[i] = operand.clipped;
    out.history[i].copy_(oldest_first(rings[i], operand.cursor));
  }
  return out;
}

void write_state(const at::Tensor& weight, const StateTensors& state) {
  const auto& policy = policy_by_key(state.policy);
  TORCH_CHECK(state.scale.sizes() == at::IntArrayRef({kOperands}) && state.pending.sizes() == state.scale.sizes() &&
                  state.seeded.sizes() == state.scale.sizes() &&
                  state.history.sizes() == at::IntArrayRef({kOperands, policy.history_len}),
              "octavo: the state's shapes do not fit its policy \"", state.policy, "\"");
  auto [leaf, key] = leaf_of(weight);
  TORCH_CHECK(leaf.defined(), "octavo: only a parameter, or a slice of one, can hold scaling state");
  const auto scale = state.scale.to(at::kCPU, at::kFloat).contiguous(),
             pending = state.pending.to(at::kCPU, at::kFloat).contiguous(),
             seeded = state.seeded.to(at::kCPU, at::kBool).contiguous();

  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  auto& parameter = kept_with<ParameterState>(leaf);
  auto* linear = state_of(parameter, leaf, key, weight.device());
  TORCH_CHECK(linear, "octavo: the parameter already has states for ", kMaxViews, " slices");
  note_use(*linear, policy, /*trains=*/false, {});
  linear->note_policy(policy.id);
  const std::unique_lock emptied(emptying());
  linear->arena->note_stream();
  linear->empty(hash_of_input(state.policy, scale, pending, seeded, state.history));
  Slot slot = {};
  slot.generation = linear->handle.generation;
  slot.version = linear->version;
  slot.owner = static_cast<int32_t>(parameter.owner);
  slot.ring = linear->ring_of(policy.history_len);
  slot.policy = policy;
  for (int64_t i = 0; i < kOperands; ++i) {  // as they are, here too: item() goes by way of a double
    auto& operand = slot.operand[i];
    operand.scale = scale.const_data_ptr<float>()[i];
    operand.pending = pending.const_data_ptr<float>()[i];
    operand.seeded = seeded.const_data_ptr<bool>()[i];
  }
  linear->arena->ring_floats(slot.ring, policy.history_len).copy_(state.history);
  auto words = at::empty({word(sizeof slot)}, at::kInt);
  std::memcpy(words.mutable_data_ptr(), &slot, sizeof slot);
  linear->arena->slot_words(linear->handle.slot).copy_(words);
}

}  // namespace octavo
