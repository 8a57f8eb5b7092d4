// SPDX-License-Identifier: Apache-2.0
#include "linear_state.h"

#include <ATen/Functions.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>

#include "slots.h"
#include "weight_copies.h"

namespace octavo {

bool can_hold_state(const at::Tensor& weight) { return !weight.is_inference() && leaf_of(weight).first.defined(); }

namespace {

SlotHold slot_in(const WeightPart& part, c10::Device device, const ScalingPolicy& policy, bool trains, bool compiled) {
  const auto& [leaf, key] = part;
  SlotHold hold;
  hold.place = Arena::of(device).place();
  if (policy.kind == ScalingKind::kDynamic || !leaf.defined()) return hold;
  std::lock_guard lock(live().mutex);
  auto* state = state_of(kept_with<ParameterState>(leaf), leaf, key, device);
  if (!state) return hold;
  note_use(*state, policy, trains, hold.place);
  if (compiled && trains) state->compiled = true;
  hold.use = state->use(policy, hold.place);
  // A dispatch mode would run code of its own while the lock is held, which may come back for it.
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) hold.use.seeded = false;
  if (hold.use.seeded) hold.lock = std::shared_lock(emptying());
  hold.version = state->version;
  hold.is_sure = !state->compiled && state->only_policy == policy.id &&
                 (state->captured == 0 || state->captured == hold.place.capture);
  const bool follows = hold.is_sure && policy.kind != ScalingKind::kCustom;
  hold.history = follows ? state->inputs->value() : SlotHold::kUnknown;
  if (trains) hold.inputs = state->inputs;
  return hold;
}

}  // namespace

SlotHold slot_of(const at::Tensor& weight, const ScalingPolicy& policy, bool trains) {
  const bool may_hold = policy.kind != ScalingKind::kDynamic && !weight.is_inference();
  return slot_in(may_hold ? leaf_of(weight) : WeightPart(), weight.device(), policy, trains, false);
}

SlotHold slot_in_graph(const WeightPart& part, c10::Device device, const ScalingPolicy& policy, bool trains) {
  return slot_in(part, device, policy, trains, true);
}

int64_t claim(at::TensorList parameters, int64_t owner, bool take_over) {
  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  int64_t changed = 0;
  for (const auto& parameter : parameters) {
    auto* state = find_kept<ParameterState>(parameter);
    if (!state || state->owner == owner || (state->owner && !take_over)) continue;
    state->set_owner(owner);
    ++changed;
  }
  return changed;
}

void release(int64_t owner) {
  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  for (auto* parameter : live().parameters)
    if (parameter->owner == owner) parameter->set_owner(0);
}

int64_t states_made() { return live().made; }

void reset_states() {
  std::lock_guard lock(live().mutex);
  const std::unique_lock emptied(emptying());
  const WithoutModes without_modes;
  for (auto* arena : Arena::all()) arena->note_stream();
  for (auto* parameter : live().parameters)
    for (auto& [key, linear] : parameter->states) {
      auto words = linear->arena->slot_words(linear->handle.slot);
      words.narrow(0, word(offsetof(Slot, policy)), word(sizeof(Slot) - offsetof(Slot, policy))).zero_();
      linear->empty(InputHistory::kEmpty);
      words[word(offsetof(Slot, version))].fill_(linear->version);
      linear->trained = 0;
    }
  live().steps = 0;
}

std::vector<at::Tensor> slots_using(const ScalingPolicy& policy) {
  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  const auto known = live().slots_by_policy.find(policy.id);
  if (known != live().slots_by_policy.end()) return known->second;
  std::map<Arena*, std::vector<int32_t>> slots;
  for (auto* parameter : live().parameters)
    for (auto& [key, linear] : parameter->states)
      if (std::find(linear->custom.begin(), linear->custom.end(), policy.id) != linear->custom.end())
        slots[linear->arena].push_back(linear->handle.slot);
  std::vector<at::Tensor> found;
  for (auto& [arena, indices] : slots) found.push_back(at::tensor(indices, at::kInt).to(arena->device()));
  live().slots_by_policy.emplace(policy.id, found);
  return found;
}

void advance_states(int64_t owner, const std::optional<at::Tensor>& found_inf) {
  const auto step = static_cast<uint64_t>(++live().steps);
  {
    std::map<const Arena*, uint64_t> captures;  // asked for once, not for every state
    for (auto* arena : Arena::all()) captures[arena] = arena->place().capture;
    std::lock_guard lock(live().mutex);
    for (auto* parameter : live().parameters)
      for (auto& [key, linear] : parameter->states)
        if (owner == 0 || parameter->owner == 0 || parameter->owner == owner) {
          linear->inputs->advance(step);
          linear->note_capture(captures[linear->arena]);  // it may be replayed, unseen
        }
  }
  weights_changed();
  for (auto* arena : Arena::all()) {
    if (arena->view().slot_count == 0) continue;
    arena->note_advance();
    const auto anchor = arena->anchor();
    const auto flag = found_inf
                          ? std::optional(found_inf->to(anchor.options().dtype(at::kFloat), /*non_blocking=*/true))
                          : std::nullopt;
    ops::advance(anchor, owner, flag);
  }
}

}  // namespace octavo
