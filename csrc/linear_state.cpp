// SPDX-License-Identifier: Apache-2.0
#include "linear_state.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>

#include "leaf.h"
#include "weight_copies.h"

namespace octavo {
namespace {

constexpr std::size_t kMaxViews = 256;     // states of the slices of one parameter; further slices are stateless
constexpr int64_t kStepsNeverTaken = 256;  // training forwards of one weight after which a missing step() is told

constexpr int64_t word(std::size_t offset) { return static_cast<int64_t>(offset / sizeof(int32_t)); }

// Held shared while kernels are launched that rely on a slot's history, and alone by what empties slots. Taken after
// live().mutex, which nobody takes who holds this one.
std::shared_mutex& emptying() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

struct LinearState {
  LinearState(Arena& in, int64_t owned_by) : arena(&in) {
    const std::unique_lock lock(emptying());  // the slot may have been another one's
    handle = in.take_slot();
    version = handle.generation;
    if (owned_by) set_owner(owned_by);
  }
  ~LinearState() { arena->free_slot(handle, std::move(rings)); }
  LinearState(const LinearState&) = delete;
  LinearState& operator=(const LinearState&) = delete;

  int32_t ring_of(int64_t history_len) {
    for (auto [length, ring] : rings)
      if (length == history_len) return ring;
    rings.emplace_back(history_len, arena->take_rings(history_len));
    return rings.back().second;
  }
  void set_owner(int64_t owner) { arena->slot_words(handle.slot)[word(offsetof(Slot, owner))].fill_(owner); }

  // A record under another policy empties the rings, and may come late, from a backward of long ago: a state that has
  // known two policies is never sure again.
  void note_policy(int32_t id) { only_policy = only_policy == 0 || only_policy == id ? id : kSeveral; }
  ops::SlotUse use(const ScalingPolicy& policy, const Arena::Place& place) {
    ops::SlotUse slot{handle.slot, handle.generation, ring_of(policy.history_len)};
    slot.alone = arena->note_stream(place);
    slot.seeded = slot.alone && only_policy == policy.id && arena->is_seeded(handle.slot, version) &&
                  !place.capture;  // a replay may come after the slot was emptied
    return slot;
  }
  void empty(uint64_t history) {
    version = arena->new_version();
    inputs->reset(history);
  }

  static constexpr int32_t kSeveral = -1;
  static constexpr uint64_t kSeveralCaptures = ~uint64_t{0};
  Arena* arena;
  Arena::Handle handle;
  int32_t version;
  uint64_t captured = 0;    // the graph capture that it was trained in, whose replays the host does not see; 0: none
  int32_t only_policy = 0;  // that a backward may have recorded under, or that was loaded; 0: none yet
  Arena::Rings rings;
  std::shared_ptr<InputHistory> inputs = std::make_shared<InputHistory>();
  std::vector<int32_t> custom;  // ids of the custom policies that used it
  int64_t trained = 0;          // training forwards
};

class ParameterState;
struct Live {
  std::mutex mutex;  // guards every ParameterState, and this
  std::set<ParameterState*> parameters;
  std::atomic<int64_t> made = 0;
  std::atomic<int64_t> steps = 0;
  // Slots by custom policy and device, as device tensors; forgotten whenever a state comes or goes.
  std::map<int32_t, std::vector<at::Tensor>> slots_by_policy;
};
Live& live() {
  static auto* instance = new Live;
  return *instance;
}

class ParameterState final {
 public:
  ParameterState() { live().parameters.insert(this); }
  ~ParameterState() {
    std::lock_guard lock(live().mutex);
    live().parameters.erase(this);
    live().slots_by_policy.clear();
    states.clear();
  }

  void set_owner(int64_t number) {
    owner = number;
    for (auto& [key, linear] : states) linear->set_owner(number);
  }

  std::map<ViewKey, std::unique_ptr<LinearState>> states;
  int64_t owner = 0;
};

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
  state->inputs->reset(InputHistory::mixed(SharedInput::new_number(), 0));  // what is pending is not followed
  return state;
}

// Arena values are written by ops under live().mutex. No dispatch mode may see them: it would run Python code, whose
// garbage collection may end a parameter, which takes the same mutex.
class WithoutModes {
  const c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
};

// Under live().mutex. Null: stateless, for want of room (too many slices), or because a graph is being captured and the
// weight is no parameter that learns but perhaps a temporary, a new one each time.
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
  if (trains && place.capture)
    state.captured =
        state.captured == 0 || state.captured == place.capture ? place.capture : LinearState::kSeveralCaptures;
  if (trains && ++state.trained == kStepsNeverTaken && live().steps == 0) {
    TORCH_WARN_ONCE("octavo: a weight was used ", kStepsNeverTaken,
                    " times in training and no optimizer step was seen, so its delayed scaling has no history and "
                    "measures every tensor anew (right, but slower); call octavo.step() after each update of the "
                    "weights if your loop does not use a torch.optim optimizer");
  }
}

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

bool can_hold_state(const at::Tensor& weight) { return !weight.is_inference() && leaf_of(weight).first.defined(); }

SlotHold slot_of(const at::Tensor& weight, const ScalingPolicy& policy, bool trains) {
  SlotHold hold;
  hold.place = Arena::of(weight.device()).place();
  if (policy.kind == ScalingKind::kDynamic || weight.is_inference()) return hold;
  auto [leaf, key] = leaf_of(weight);
  if (!leaf.defined()) return hold;
  std::lock_guard lock(live().mutex);
  auto* state = state_of(kept_with<ParameterState>(leaf), leaf, key, weight.device());
  if (!state) return hold;
  note_use(*state, policy, trains, hold.place);
  hold.use = state->use(policy, hold.place);
  // A dispatch mode would run code of its own while the lock is held, which may come back for it.
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) hold.use.seeded = false;
  if (hold.use.seeded) hold.lock = std::shared_lock(emptying());
  hold.version = state->version;
  hold.is_sure = state->only_policy == policy.id && (state->captured == 0 || state->captured == hold.place.capture);
  const bool follows = hold.is_sure && policy.kind != ScalingKind::kCustom;
  hold.history = follows ? state->inputs->value() : SlotHold::kUnknown;
  if (trains) hold.inputs = state->inputs;
  return hold;
}

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
  auto [entry, missing] = live().slots_by_policy.try_emplace(policy.id);
  if (!missing) return entry->second;
  std::map<Arena*, std::vector<int32_t>> slots;
  for (auto* parameter : live().parameters)
    for (auto& [key, linear] : parameter->states)
      if (std::find(linear->custom.begin(), linear->custom.end(), policy.id) != linear->custom.end())
        slots[linear->arena].push_back(linear->handle.slot);
  for (auto& [arena, indices] : slots) entry->second.push_back(at::tensor(indices, at::kInt).to(arena->device()));
  return entry->second;
}

void advance_states(int64_t owner, const std::optional<at::Tensor>& found_inf) {
  const auto step = static_cast<uint64_t>(++live().steps);
  {
    std::lock_guard lock(live().mutex);
    for (auto* parameter : live().parameters)
      for (auto& [key, linear] : parameter->states)
        if (owner == 0 || parameter->owner == 0 || parameter->owner == owner) linear->inputs->advance(step);
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
