// SPDX-License-Identifier: Apache-2.0
#include "slots.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstddef>

namespace octavo {
namespace {

constexpr int64_t kStepsNeverTaken = 256;  // training forwards of one weight after which a missing step() is told

// The parameter moved to another device: its values follow it.
std::unique_ptr<LinearState> moved(LinearState& from, Arena& to, int64_t owner) {
  auto state = std::make_unique<LinearState>(to, owner);
  const auto device = to.device();
  auto words = from.arena->slot_words(from.handle.slot).to(device).clone();
  words[word(offsetof(Slot, generation))].fill_(state->handle.generation);
  words[word(offsetof(Slot, version))].fill_(state->version);
  const auto held = from.arena->slot_words(from.handle.slot)[word(offsetof(Slot, ring))].item<int>();
  for (auto [length, ring] : from.rings) {
    const auto mine = state->ring_of(length);
    to.ring_floats(mine, length).copy_(from.arena->ring_floats(ring, length));
    if (ring == held) words[word(offsetof(Slot, ring))].fill_(mine);
  }
  to.slot_words(state->handle.slot).copy_(words);
  state->custom = from.custom;
  state->only_policy = from.only_policy;
  state->compiled = from.compiled;
  state->inputs->reset(InputHistory::mixed(SharedInput::new_number(), 0));  // what is pending is not followed
  return state;
}

}  // namespace

std::shared_mutex& emptying() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

Live& live() {
  static auto* instance = new Live;
  return *instance;
}

LinearState* state_of(ParameterState& parameter, const at::Tensor& leaf, const ViewKey& key, c10::Device device) {
  auto& arena = Arena::of(device);
  auto found = parameter.states.find(key);
  if (found != parameter.states.end() && found->second->arena == &arena) return found->second.get();
  if (found == parameter.states.end() && parameter.states.size() >= kMaxViews) return nullptr;
  if (!leaf.requires_grad() && arena.is_capturing()) return nullptr;
  const WithoutModes without_modes;
  auto made = found == parameter.states.end() ? std::make_unique<LinearState>(arena, parameter.owner)
                                              : moved(*found->second, arena, parameter.owner);
  if (leaf.requires_grad()) ++live().made;
  live().slots_by_policy.clear();
  return (parameter.states[key] = std::move(made)).get();
}

void note_use(LinearState& state, const ScalingPolicy& policy, bool trains, const Arena::Place& place) {
  if (policy.kind == ScalingKind::kCustom &&
      std::find(state.custom.begin(), state.custom.end(), policy.id) == state.custom.end()) {
    state.custom.push_back(policy.id);
    live().slots_by_policy.erase(policy.id);
  }
  if (trains) state.note_policy(policy.id);
  if (trains) state.note_capture(place.capture);
  if (trains && ++state.trained == kStepsNeverTaken && live().steps == 0) {
    TORCH_WARN_ONCE("octavo: a weight was used ", kStepsNeverTaken,
                    " times in training and no optimizer step was seen, so its delayed scaling has no history and "
                    "measures every tensor anew (right, but slower); call octavo.step() after each update of the "
                    "weights if your loop does not use a torch.optim optimizer");
  }
}

}  // namespace octavo
