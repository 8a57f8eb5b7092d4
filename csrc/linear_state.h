// SPDX-License-Identifier: Apache-2.0
// Which slot a weight has. The parameter owns its state: a hook of ours that does nothing, in the leaf's AutogradMeta,
// holds it, so that it moves with the parameter and dies with it; nothing is looked up by an address.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "leaf.h"
#include "ops/primitives.h"
#include "policy.h"
#include "shared_input.h"

namespace octavo {

// The slot of a weight, for one forward. Held until its kernels are launched, so that a history that they rely on
// stays.
struct SlotHold {
  static constexpr uint64_t kUnknown = ~uint64_t{0};  // equal to no other one's
  ops::SlotUse use;
  Arena::Place place;
  uint64_t history = InputHistory::kStateless;  // of x, as it is now (shared_input.h)
  int32_t version = 0;                          // of the slot
  bool is_sure = true;                          // steps change by advances and with the version, and in no other way
  std::shared_ptr<InputHistory> inputs;         // for a backward to record in; null: it will not
  std::shared_lock<std::shared_mutex> lock;
};

// The slot of a weight under a policy, made on first use. Stateless: dynamic scaling, and weights that are neither a
// leaf nor a view of one. `trains` counts the uses that a backward may follow.
SlotHold slot_of(const at::Tensor& weight, const ScalingPolicy& policy, bool trains);
// The same in a compiled graph, for the part of a leaf that the weight is (leaf.h); an undefined leaf is stateless.
SlotHold slot_in_graph(const WeightPart& part, c10::Device device, const ScalingPolicy& policy, bool trains);

// Whether a weight can hold state: it is a leaf, or a view of one.
bool can_hold_state(const at::Tensor& weight);

// State as plain CPU tensors: scale, pending, seeded (float32, float32, bool; [3] for x, w, g), history float32
// [3, history_len], oldest first, and the policy's key. Reads the device.
struct StateTensors {
  at::Tensor scale;
  at::Tensor pending;
  at::Tensor seeded;
  at::Tensor history;
  std::string policy;
  at::Tensor clipped =
      {};  // int32 [3], steps whose amax went past the scale in force; read only, not part of the state
};
// The slices of a parameter that have states of their own: offset, sizes, strides each.
std::vector<std::vector<int64_t>> slices_of(const at::Tensor& parameter);
std::optional<StateTensors> read_state(const at::Tensor& weight);
// Replaces the weight's state, making one if there is none. Throws, changing nothing, where `state` cannot be one.
void write_state(const at::Tensor& weight, const StateTensors& state);

// The optimizer `owner` (never 0) steps these parameters; those of another one only if it is to take them over. Returns
// how many have changed hands.
int64_t claim(at::TensorList parameters, int64_t owner, bool take_over);
// That optimizer is gone: its parameters belong to none.
void release(int64_t owner);
// How many states were ever made: where it has not moved, there is nothing new to claim.
int64_t states_made();
// Empties every state; the slots stay with their parameters.
void reset_states();

// After an optimizer's step (owner 0: everybody's): records become history, policies give new steps.
void advance_states(int64_t owner, const std::optional<at::Tensor>& found_inf);

// For policies outside the library: per device, the slots that have used this policy.
std::vector<at::Tensor> slots_using(const ScalingPolicy& policy);

}  // namespace octavo
