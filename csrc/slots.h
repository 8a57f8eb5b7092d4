// SPDX-License-Identifier: Apache-2.0
// What a parameter keeps of its linears: the inside of linear_state.h and saved_state.cpp, for no one else.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <vector>

#include "arena.h"
#include "leaf.h"
#include "ops/primitives.h"
#include "policy.h"
#include "shared_input.h"

namespace octavo {

constexpr std::size_t kMaxViews = 256;  // states of the slices of one parameter; further slices are stateless

constexpr int64_t word(std::size_t offset) { return static_cast<int64_t>(offset / sizeof(int32_t)); }

// Held shared while kernels are launched that rely on a slot's history, and alone by what empties slots. Taken after
// live().mutex, which nobody takes who holds this one.
std::shared_mutex& emptying();

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
  void note_capture(uint64_t capture) {
    if (capture) captured = captured == 0 || captured == capture ? capture : kSeveralCaptures;
  }
  ops::SlotUse use(const ScalingPolicy& policy, const Arena::Place& place) {
    ops::SlotUse slot{handle.slot, handle.generation, ring_of(policy.history_len)};
    slot.alone = arena->note_stream(place);
    const bool has_history = only_policy == policy.id && arena->is_seeded(handle.slot, version);
    slot.seeded = has_history && slot.alone && !place.capture;
    slot.likely = has_history && place.capture;  // a replay may come after the slot was emptied
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
  bool compiled = false;        // a compiled graph trains it, whose records the host does not follow
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
Live& live();

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

// Arena values are written by ops under live().mutex. No dispatch mode may see them: it would run Python code, whose
// garbage collection may end a parameter, which takes the same mutex.
class WithoutModes {
  const c10::impl::ExcludeDispatchKeyGuard guard_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
};

// The state of a part of a leaf, made if there is none. Under live().mutex. Null: stateless, for want of room (too many
// slices), or because a graph is being captured and the weight is no parameter that learns but perhaps a temporary, a
// new one each time.
LinearState* state_of(ParameterState& parameter, const at::Tensor& leaf, const ViewKey& key, c10::Device device);

void note_use(LinearState& state, const ScalingPolicy& policy, bool trains, const Arena::Place& place);

}  // namespace octavo
