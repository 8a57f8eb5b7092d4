// SPDX-License-Identifier: Apache-2.0
#include "linear_state.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <set>

namespace octavo {
namespace {

constexpr std::size_t kMaxViews = 256;     // states of the slices of one parameter; further slices are stateless
constexpr int64_t kStepsNeverTaken = 256;  // training forwards of one weight after which a missing step() is told

constexpr int64_t word(std::size_t offset) { return static_cast<int64_t>(offset / sizeof(int32_t)); }

struct LinearState {
  explicit LinearState(Arena& in, int64_t owned_by) : arena(&in), handle(in.take_slot()), version(handle.generation) {
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
  // Nothing else than this policy and steps of the owner move the slot (steps of others come from this stream too).
  bool is_seeded(int32_t policy_id, int64_t owner) const {
    const bool one_stream = arena->note_stream();
    return only_policy == policy_id && (owner != 0 || one_stream) && arena->is_seeded(handle.slot, version) &&
           !arena->is_capturing();
  }

  static constexpr int32_t kSeveral = -1;
  Arena* arena;
  Arena::Handle handle;
  int32_t version;
  int32_t only_policy = 0;  // that a backward may have recorded under, or that was loaded; 0: none yet
  Arena::Rings rings;
  std::vector<int32_t> custom;  // ids of the custom policies that used it
  int64_t trained = 0;          // training forwards
};

using ViewKey = std::vector<int64_t>;  // of a slice of the parameter: offset, sizes, strides; empty: the whole

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

class ParameterState final : public torch::autograd::FunctionPreHook {
 public:
  ParameterState() { live().parameters.insert(this); }
  ~ParameterState() override {
    std::lock_guard lock(live().mutex);
    live().parameters.erase(this);
    live().slots_by_policy.clear();
    states.clear();
  }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override { return grads; }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  void set_owner(int64_t number) {
    owner = number;
    for (auto& [key, linear] : states) linear->set_owner(number);
  }

  std::map<ViewKey, std::unique_ptr<LinearState>> states;
  int64_t owner = 0;
};

// The leaf whose state a weight has, and which part of it the weight is; an undefined tensor if there is none.
std::pair<at::Tensor, ViewKey> leaf_of(const at::Tensor& weight) {
  if (!weight.is_view()) return {weight.is_leaf() ? weight : at::Tensor(), {}};
  auto base = weight._base();
  if (!base.is_leaf()) return {};
  // A part of a buffer that learns by itself is a parameter; a slice of a parameter is not, also under no_grad.
  if (weight.is_leaf() && weight.requires_grad() && !base.requires_grad()) return {weight, {}};
  ViewKey key = {weight.storage_offset()};
  key.insert(key.end(), weight.sizes().begin(), weight.sizes().end());
  key.insert(key.end(), weight.strides().begin(), weight.strides().end());
  return {std::move(base), std::move(key)};
}

// Under live().mutex.
ParameterState* find_parameter(const at::Tensor& leaf) {
  auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (!meta) return nullptr;
  for (auto& hook : meta->hooks_)
    if (auto* found = dynamic_cast<ParameterState*>(hook.get())) return found;
  return nullptr;
}

ParameterState& parameter_state(const at::Tensor& leaf) {
  if (auto* found = find_parameter(leaf)) return *found;
  auto made = std::make_unique<ParameterState>();
  auto& state = *made;
  torch::autograd::impl::add_hook(leaf, std::move(made));
  return state;
}

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

void note_use(LinearState& state, const ScalingPolicy& policy, bool trains) {
  if (policy.kind == ScalingKind::kCustom &&
      std::find(state.custom.begin(), state.custom.end(), policy.id) == state.custom.end()) {
    state.custom.push_back(policy.id);
    live().slots_by_policy.erase(policy.id);
  }
  if (trains) state.note_policy(policy.id);
  if (trains && ++state.trained == kStepsNeverTaken && live().steps == 0) {
    TORCH_WARN_ONCE("octavo: a weight was used ", kStepsNeverTaken,
                    " times in training and no optimizer step was seen, so its delayed scaling has no history and "
                    "measures every tensor anew (right, but slower); call octavo.step() after each update of the "
                    "weights if your loop does not use a torch.optim optimizer");
  }
}

at::Tensor oldest_first(const at::Tensor& ring, int64_t cursor) { return at::roll(ring, -cursor, 0); }

}  // namespace

bool can_hold_state(const at::Tensor& weight) { return !weight.is_inference() && leaf_of(weight).first.defined(); }

ops::SlotUse slot_of(const at::Tensor& weight, const ScalingPolicy& policy, bool trains) {
  if (policy.kind == ScalingKind::kDynamic || weight.is_inference()) return {};
  auto [leaf, key] = leaf_of(weight);
  if (!leaf.defined()) return {};
  std::lock_guard lock(live().mutex);
  auto& parameter = parameter_state(leaf);
  auto* state = state_of(parameter, leaf, key, weight.device());
  if (!state) return {};
  note_use(*state, policy, trains);
  return {state->handle.slot, state->handle.generation, state->ring_of(policy.history_len),
          state->is_seeded(policy.id, parameter.owner)};
}

std::vector<std::vector<int64_t>> slices_of(const at::Tensor& parameter) {
  std::lock_guard lock(live().mutex);
  std::vector<std::vector<int64_t>> slices;
  if (auto* state = find_parameter(parameter))
    for (auto& [key, linear] : state->states)
      if (!key.empty()) slices.push_back(key);
  return slices;
}

std::optional<StateTensors> read_state(const at::Tensor& weight) {
  auto [leaf, key] = leaf_of(weight);
  if (!leaf.defined()) return std::nullopt;
  std::lock_guard lock(live().mutex);
  const WithoutModes without_modes;
  auto* parameter = find_parameter(leaf);
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
  auto& parameter = parameter_state(leaf);
  auto* linear = state_of(parameter, leaf, key, weight.device());
  TORCH_CHECK(linear, "octavo: the parameter already has states for ", kMaxViews, " slices");
  note_use(*linear, policy, /*trains=*/false);
  linear->note_policy(policy.id);
  linear->version = linear->arena->new_version();
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
    auto* state = find_parameter(parameter);
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
  const WithoutModes without_modes;
  for (auto* parameter : live().parameters)
    for (auto& [key, linear] : parameter->states) {
      auto words = linear->arena->slot_words(linear->handle.slot);
      words.narrow(0, word(offsetof(Slot, policy)), word(sizeof(Slot) - offsetof(Slot, policy))).zero_();
      linear->version = linear->arena->new_version();
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
  ++live().steps;
  for (auto* arena : Arena::all()) {
    if (arena->view().slot_count == 0) continue;
    arena->note_stream();
    const auto anchor = arena->anchor();
    const auto flag = found_inf
                          ? std::optional(found_inf->to(anchor.options().dtype(at::kFloat), /*non_blocking=*/true))
                          : std::nullopt;
    ops::advance(anchor, owner, flag);
  }
}

}  // namespace octavo
