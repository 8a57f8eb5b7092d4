// SPDX-License-Identifier: Apache-2.0
#include "forward.h"

#include <ATen/Functions.h>
#include <ATen/ops/linear_native.h>

#include "linear_state.h"
#include "weight_copies.h"

namespace octavo {
namespace {

using at::Tensor;

CopyKey key_of(const Forward& forward, at::ScalarType type, const SlotHold& slot) {
  return {forward.recipe.policy.id, type, slot.place.stream, slot.place.capture};
}

// Copies of x that the linear before has made of the same input (shared_input.h), or that the next one may use.
struct InputUse {
  InputUse(const Forward& forward, const SlotHold& slot, ops::ForwardCall& call)
      : history(slot.history), records(call.records), maker(slot.inputs) {
    if (!forward.trains()) return;
    if (!forward.recipe.share_inputs) {
      number = SharedInput::new_number();  // histories go on, for regions that share
      return;
    }
    is_met = true;
    number = shared.meet(forward.x, key_of(forward, call.x_type, slot));
    if (history == SlotHold::kUnknown) return;
    made = shared.find(history, ops::copies(call.wants_y, call.x_keep & ops::kCol), records);
    if (made) call.x_made = &*made;
    if (!made && call.wants_y && (!maker || maker->goes_on)) call.x_keep |= ops::kRow;
  }
  void done(const ops::ForwardResult& result) const {
    if (is_met && !made && history != SlotHold::kUnknown)
      shared.keep(number, {result.x.row, result.x.col, result.tape}, history, records, maker);
  }

  SharedInput& shared = SharedInput::of_this_thread();
  uint64_t history;
  bool records;
  const std::shared_ptr<InputHistory>& maker;
  uint64_t number = 0;
  bool is_met = false;
  std::optional<ops::Made> made;  // its own references: what runs inside of the op may make the thread forget it
};

// Copies of w made before in a scope of unchanged weights (weight_copies.h).
struct WeightUse {
  WeightUse(const Forward& forward, const SlotHold& slot, ops::ForwardCall& call)
      : w(forward.w), records(call.records) {
    if (!in_weight_scope() || !slot.is_sure) return;
    key = key_of(forward, call.w_type, slot);
    key->version = slot.version;
    stamp = stamp_of(w);
    made = find_weight_copies(w, *key, records);
    if (made.tape.defined()) {
      call.w_made = &made;
    } else {
      call.w_keep |= ops::kRow | ops::kCol;
    }
  }
  void done(const ops::ForwardResult& result) const {
    if (key && !made.tape.defined())
      keep_weight_copies(w, *key, stamp, records, {result.w.row, result.w.col, result.tape});
  }

  const Tensor& w;
  bool records;
  std::optional<CopyKey> key;
  WeightStamp stamp;
  ops::Made made;
};

// y is undefined unless `forward`.
Tensor quantized(const Forward& f, bool forward, bool x_col, bool w_step, const std::optional<Tensor>& b,
                 Saved& saved) {
  const auto& recipe = f.recipe;
  const auto slot = f.part ? slot_in_graph(*f.part, f.w.device(), recipe.policy, f.trains())
                           : slot_of(f.w, recipe.policy, f.trains());
  const bool records = f.trains() && (f.part || slot.use.slot >= 0);  // a graph's tape has one size
  ops::ForwardCall call{.x = f.x,
                        .w = f.w,
                        .bias = b,
                        .slot = slot.use,
                        .policy = recipe.policy.id,
                        .x_type = recipe.types.type[kX],
                        .w_type = recipe.types.type[kW],
                        .y_type = f.compute,
                        .wants_y = forward,
                        .fast = is_fast(recipe.products.forward),
                        .records = records,
                        .x_keep = ops::copies(false, x_col),
                        .w_keep = ops::copies(false, w_step && recipe.keep_fp8_weights, w_step)};
  saved.seeded = slot.use.seeded;
  saved.likely = slot.use.likely;
  saved.records = records;
  if (f.part) {
    auto result = ops::linear_forward(call);
    saved.tape = result.tape;
    saved.x = result.x.col;
    saved.w_col = result.w.col;
    return result.y;
  }
  const InputUse input(f, slot, call);
  const WeightUse weight(f, slot, call);
  auto result = ops::linear_forward(call);
  input.done(result);
  weight.done(result);
  saved.tape = result.tape;
  if (x_col) saved.x = input.made ? input.made->col : result.x.col;
  const bool is_made = weight.made.tape.defined();
  if (recipe.keep_fp8_weights) {
    saved.w_col = is_made ? weight.made.col : result.w.col;
  } else if (weight.key) {
    saved.scope_w = is_made ? weight.made : ops::Made{{}, result.w.col, result.tape};
  }
  saved.inputs = slot.inputs;
  saved.input = input.number;
  return result.y;
}

}  // namespace

std::pair<Tensor, Saved> Forward::run() const {
  const bool forward = in_fp8(recipe.products.forward), x_col = keeps_x_col(), w_step = keeps_w_step();
  const auto b = bias ? std::optional(bias->to(compute)) : std::nullopt;
  Saved saved;
  Tensor y;
  if (forward || x_col || w_step) y = quantized(*this, forward, x_col, w_step, b, saved);
  if (!forward) y = at::native::linear(x.to(compute), w.to(compute), b);  // not at::linear, which comes back to us
  // In high precision the user's own tensor, not a view made here: a change of it before backward has to be noticed.
  if (needs_dw && !x_col) saved.x = x.to(compute);
  return {std::move(y), std::move(saved)};
}

}  // namespace octavo
