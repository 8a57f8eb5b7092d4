// SPDX-License-Identifier: Apache-2.0
#include "compiled_linear.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include <tuple>

#include "arena.h"
#include "ops/find.h"
#include "report.h"

namespace octavo {
namespace {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalType = std::optional<ScalarType>;
using c10::SymInt;
using ForwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // y, x_col, w_col, tape
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;

OptionalTensor if_defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// What an op of a graph returns for nothing, and back.
Tensor or_nothing(const Tensor& tensor, const Tensor& like) {
  return tensor.defined() ? tensor : at::empty({0}, like.options().dtype(at::kByte));
}
Tensor something(const Tensor& tensor) {
  return tensor.dim() == 1 && tensor.sym_size(0).maybe_as_int() == 0 ? Tensor() : tensor;
}

SymInt rows_of(const Tensor& x) {
  SymInt rows = 1;
  for (const auto& size : x.sym_sizes().slice(0, x.dim() - 1)) rows = rows * size;
  return rows;
}

SymInt padded(const SymInt& n) { return (n + 15) / 16 * 16; }

// Peaks of a matrix on the tape (slot.h).
SymInt peaks_of(c10::DeviceType device, const SymInt& rows, const SymInt& cols) {
  const auto tiles = [](const SymInt& n) { return (n + (kPeakTile - 1)) / kPeakTile; };
  return device == c10::kCPU ? SymInt(1) : tiles(rows) * tiles(cols);
}

// 0: nothing is quantised.
SymInt tape_words(const Forward& call) {
  const bool forward = in_fp8(call.recipe.products.forward);
  const bool x = forward || call.keeps_x_col(), w = forward || call.keeps_w_step();
  if (!x && !w) return 0;
  const auto device = call.x.device().type();
  SymInt words = kTapeWords;
  if (x && call.trains()) words += peaks_of(device, rows_of(call.x), call.x.sym_size(-1));
  if (w && call.trains()) words += peaks_of(device, call.w.sym_size(0), call.w.sym_size(1));
  return words;
}

// The kernels, for CPU and CUDA -----------------------------------------------------------------------------------

// Whose the weight is: told when the graph was made for a slice, which a compiler may since have rebuilt; found out now
// for a whole one.
WeightPart part_of(const OptionalTensor& leaf, at::IntArrayRef slice) {
  if (!leaf || leaf->is_inference()) return {};
  auto part = leaf_of(*leaf);
  if (!slice.empty()) part.second = slice.vec();
  return part;
}

ForwardResult forward(const Tensor& x, const Tensor& w, const OptionalTensor& bias, const OptionalTensor& leaf,
                      at::IntArrayRef slice, std::string_view recipe_text, ScalarType compute, bool needs_dx,
                      bool needs_dw, bool trains, int64_t words) {
  const auto& recipe = recipe_by_text(recipe_text);
  const auto part = part_of(leaf, slice);
  const bool has_state = recipe.policy.kind == ScalingKind::kDynamic || part.first.defined();
  const int64_t k = w.size(1), n = w.size(0);
  count(x.numel() / k, n, k, has_state ? Outcome::kFp8 : Outcome::kFp8Stateless);
  const Forward call{x, w, bias, compute, recipe, needs_dx, needs_dw, trains && !needs_dx && !needs_dw, &part};
  auto [y, saved] = call.run();
  TORCH_INTERNAL_ASSERT((saved.tape.defined() ? saved.tape.numel() : 0) == words, "a tape of another size");
  return {y, or_nothing(call.keeps_x_col() ? saved.x : Tensor(), x), or_nothing(saved.w_col, x),
          or_nothing(saved.tape, x)};
}

BackwardResult backward(const Tensor& g, const Tensor& tape, const OptionalTensor& x, const OptionalTensor& w,
                        const OptionalTensor& w_col, std::string_view recipe_text, bool may_have_state, int64_t k,
                        ScalarType compute, OptionalType dx_type, OptionalType dw_type, OptionalType db_type) {
  const auto own_tape = something(tape);
  const auto& recipe = recipe_by_text(recipe_text);
  const bool has_state = may_have_state && recipe.policy.kind != ScalingKind::kDynamic;
  const auto result = Backward{.g = g,
                               .tape = own_tape,
                               .x = or_undefined(x),
                               .w = or_undefined(w),
                               .w_col = or_undefined(w_col),
                               .scope_w = {},
                               .recipe = recipe,
                               .k = k,
                               .compute = compute,
                               .dx_type = dx_type,
                               .dw_type = dw_type,
                               .db_type = db_type,
                               .seeded = false,
                               .likely = has_state && Arena::of(g.device()).is_capturing(),
                               .records = own_tape.defined()}
                          .run();
  return {or_nothing(result.dx, g), or_nothing(result.dw, g), or_nothing(result.db, g)};
}

// Shapes and types ---------------------------------------------------------------------------------------------------

Tensor empty_like(const Tensor& like, c10::SymIntArrayRef sizes, ScalarType type) {
  return at::empty_symint(sizes, like.options().dtype(type));
}

ForwardResult forward_meta(const Tensor& x, const Tensor& w, const OptionalTensor& bias, const OptionalTensor&,
                           c10::SymIntArrayRef, std::string_view recipe_text, ScalarType compute, bool needs_dx,
                           bool needs_dw, bool trains, SymInt words) {
  const auto& recipe = recipe_by_text(recipe_text);
  const Forward call{x, w, bias, compute, recipe, needs_dx, needs_dw, trains && !needs_dx && !needs_dw};
  auto y_sizes = x.sym_sizes().vec();
  y_sizes.back() = w.sym_size(0);
  const auto m = padded(rows_of(x)), k = padded(w.sym_size(1)), n = padded(w.sym_size(0));
  const bool w_col = call.keeps_w_step() && recipe.keep_fp8_weights;
  const bool has_tape = words.maybe_as_int() != 0;
  return {empty_like(x, y_sizes, compute),
          or_nothing(call.keeps_x_col() ? empty_like(x, {k, m}, recipe.types.type[kX]) : Tensor(), x),
          or_nothing(w_col ? empty_like(x, {k, n}, recipe.types.type[kW]) : Tensor(), x),
          or_nothing(has_tape ? empty_like(x, {words}, at::kInt) : Tensor(), x)};
}

BackwardResult backward_meta(const Tensor& g, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                             const OptionalTensor&, std::string_view, bool, SymInt k, ScalarType, OptionalType dx_type,
                             OptionalType dw_type, OptionalType db_type) {
  const auto n = g.sym_size(-1);
  auto dx_sizes = g.sym_sizes().vec();
  dx_sizes.back() = k;
  return {or_nothing(dx_type ? empty_like(g, dx_sizes, *dx_type) : Tensor(), g),
          or_nothing(dw_type ? empty_like(g, {n, k}, *dw_type) : Tensor(), g),
          or_nothing(db_type ? empty_like(g, {n}, *db_type) : Tensor(), g)};
}

}  // namespace

std::pair<Tensor, Saved> traced_forward(const Forward& call, const TracedWeight& weight) {
  static const auto op =
      ops::find<ForwardResult(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              c10::SymIntArrayRef, std::string_view, ScalarType, bool, bool, bool, SymInt)>(
          "octavo::_compiled_forward");
  auto [y, x_col, w_col, tape] = op.call(call.x, call.w, call.bias, weight.leaf, weight.slice, text_of(call.recipe),
                                         call.compute, call.needs_dx, call.needs_dw, call.trains(), tape_words(call));
  Saved saved;
  saved.likely = weight.leaf.has_value();
  saved.tape = tape;
  saved.w_col = something(w_col);
  if (call.needs_dw) saved.x = call.keeps_x_col() ? x_col : call.x.to(call.compute);
  return {y, std::move(saved)};
}

ops::BackwardResult traced_backward(const Backward& call) {
  static const auto op =
      ops::find<BackwardResult(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, std::string_view, bool, SymInt, ScalarType, OptionalType,
                               OptionalType, OptionalType)>("octavo::_compiled_backward");
  auto [dx, dw, db] =
      op.call(call.g, call.tape, call.dw_type ? if_defined(call.x) : std::nullopt,
              call.dx_type && !call.w_col.defined() ? if_defined(call.w) : std::nullopt, if_defined(call.w_col),
              text_of(call.recipe), call.likely, call.k, call.compute, call.dx_type, call.dw_type, call.db_type);
  return {call.dx_type ? dx : Tensor(), call.dw_type ? dw : Tensor(), call.db_type ? db : Tensor()};
}

}  // namespace octavo

TORCH_LIBRARY_IMPL(octavo, CPU, m) {
  m.impl("_compiled_forward", &octavo::forward);
  m.impl("_compiled_backward", &octavo::backward);
}
TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  m.impl("_compiled_forward", &octavo::forward);
  m.impl("_compiled_backward", &octavo::backward);
}
TORCH_LIBRARY_IMPL(octavo, Meta, m) {
  m.impl("_compiled_forward", &octavo::forward_meta);
  m.impl("_compiled_backward", &octavo::backward_meta);
}
