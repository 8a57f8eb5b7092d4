// SPDX-License-Identifier: Apache-2.0
// Note [Three products, six operands]
//   forward  y[M, N]  = x[M, K] w[N, K]^T     the row copies of x and w
//   dgrad    dx[M, K] = dy[M, N] w[N, K]      the row copy of dy, the transposed copy of w
//   wgrad    dw[N, K] = dy[M, N]^T x[M, K]    the transposed copies of dy and x
// Hopper's FP8 tensor cores want both operands contiguous along the contraction, hence the transposed copies. x is read
// once, in forward, and only its transposed FP8 copy (one byte an element) is kept for wgrad; w is kept by autograd as
// it is, and quantised again in backward with the step that forward used; dy is read once, for both gradients, the bias
// gradient, and the amax.
#include "fp8_linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "backward.h"
#include "forward.h"

namespace octavo {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// A node whose end does not recurse down the graph: a long chain of layers would overflow the stack.
template <class Node, class... Args>
std::shared_ptr<Node> make_node(Args&&... args) {
  return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...), torch::autograd::deleteNode);
}

const char* const kOnceDifferentiable =
    "octavo: an FP8 linear can be differentiated only once (its backward runs on quantised values, which have no "
    "derivative); leave this layer out of the region with exclude=, or compute the second derivative outside of it";

class Fp8LinearBackward final : public torch::autograd::Node {
 public:
  // `traced`: it runs in a graph that a compiler makes of it.
  Fp8LinearBackward(const Forward& call, const Saved& saved, bool traced)
      : w_(call.needs_dx ? call.w : Tensor(), false),
        w_col_(call.needs_dx ? saved.w_col : Tensor(), false),
        x_(saved.x, false),
        tape_(saved.tape, false),
        device_(call.x.device().type()),
        x_dtype_(call.x.scalar_type()),
        w_dtype_(call.w.scalar_type()),
        bias_dtype_(call.bias ? call.bias->scalar_type() : call.compute),
        compute_(call.compute),
        k_(call.w.sym_size(1)),
        recipe_(call.recipe),
        // A recomputed tape, or one that hooks bring back, need not have the step that was known at forward.
        seeded_(saved.seeded && !tape_.has_hooks()),
        likely_(saved.likely),
        records_(saved.records),
        traced_(traced),
        scope_w_(call.needs_dx ? saved.scope_w : ops::Made()),
        inputs_(saved.inputs),
        input_(saved.input) {}

  std::string name() const override { return "Fp8LinearBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard lock(mutex_);
    const bool again = at::GradMode::is_enabled();
    if (!grads[0].defined()) return variable_list(3);
    auto result = backward(grads[0]);
    return again ? differentiable_once(std::move(result), grads[0]) : result;
  }

  // Compiled autograd asks for what its graph depends on, in every backward, and makes the graph from `apply` in the
  // first.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        device_ == c10::kCPU,
        "octavo: compiled autograd takes FP8 linears on a GPU only where their forward is "
        "compiled too; call torch.compile on the model, or backward outside of compiled autograd");
    if (records_ && inputs_) inputs_->record(input_);  // here, since the graph's own record runs unseen
    for (const auto* variable : {&w_, &w_col_, &x_, &tape_}) args.collect(*variable, false);
    args.collect(text_of(recipe_));
    args.collect(k_);
    for (const auto type : {x_dtype_, w_dtype_, bias_dtype_, compute_}) args.collect(type);
    args.collect(likely_);
    for (const size_t input : {0, 1, 2}) args.cond(task_should_compute_output(input));
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    const auto swap = [&](auto&& swap_one) {
      for (auto* variable : {&w_, &w_col_, &x_, &tape_}) swap_one(*variable);
      swap_one(k_);
    };
    swap([&](auto& value) { saved.before(value); });
    is_being_compiled_ = true;
    const auto done = c10::make_scope_exit([&] { is_being_compiled_ = false; });
    auto result = apply(variable_list(grads));
    swap([&](auto& value) { saved.after(value); });
    return result;
  }

  void release_variables() override {
    std::lock_guard lock(mutex_);
    w_.reset_data();
    w_col_.reset_data();
    scope_w_ = {};
    x_.reset_data();
    tape_.reset_data();
  }

 private:
  // Notes what a backward has recorded. One that fails, out of memory, may have recorded or not: that is noted as an
  // input that no other linear has met.
  class NoteOfRecord {
   public:
    explicit NoteOfRecord(const Fp8LinearBackward& node) : node_(node) {}
    ~NoteOfRecord() {
      const bool notes = node_.records_ && node_.inputs_ && !node_.is_being_compiled_;
      if (notes) node_.inputs_->record(is_done_ ? node_.input_ : SharedInput::new_number());
    }
    void done() { is_done_ = true; }

   private:
    const Fp8LinearBackward& node_;
    bool is_done_ = false;
  };

  variable_list backward(const Tensor& grad) {
    // Unpacked above autograd: hooks of the user's run here, and a checkpoint's recomputation records a graph.
    const auto self = shared_from_this();
    const auto tape = tape_.unpack(self), x = x_.unpack(self), w = w_.unpack(self), w_col = w_col_.unpack(self);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool dx = task_should_compute_output(0), dw = task_should_compute_output(1),
               db = task_should_compute_output(2);
    const auto wanted = [](bool wants, at::ScalarType type) { return wants ? std::optional(type) : std::nullopt; };

    NoteOfRecord note(*this);
    const Backward call{.g = grad,
                        .tape = tape,
                        .x = x,
                        .w = w,
                        .w_col = w_col,
                        .scope_w = scope_w_,
                        .recipe = recipe_,
                        .k = k_,
                        .compute = compute_,
                        .dx_type = wanted(dx, x_dtype_),
                        .dw_type = wanted(dw, w_dtype_),
                        .db_type = wanted(db, bias_dtype_),
                        .seeded = seeded_,
                        .likely = likely_,
                        .records = records_};
    auto result = traced_ || is_being_compiled_ ? traced_backward(call) : call.run();
    note.done();
    return {std::move(result.dx), std::move(result.dw), std::move(result.db)};
  }

  // With create_graph: the gradients are right, and differentiating them, with respect to whatever they depend on, is
  // an error.
  variable_list differentiable_once(variable_list&& result, const Tensor& dy) const {
    auto edges = next_edges();
    edges.push_back(torch::autograd::impl::gradient_edge(dy));
    const auto error = make_node<torch::autograd::Error>(kOnceDifferentiable, std::move(edges));
    for (auto& grad : result)
      if (grad.defined()) torch::autograd::set_history(grad, error);
    return std::move(result);
  }

  SavedVariable w_;
  SavedVariable w_col_;
  SavedVariable x_;
  SavedVariable tape_;
  const c10::DeviceType device_;
  const at::ScalarType x_dtype_;
  const at::ScalarType w_dtype_;
  const at::ScalarType bias_dtype_;
  const at::ScalarType compute_;
  c10::SymInt k_;
  const LinearRecipe recipe_;
  const bool seeded_;
  const bool likely_;
  const bool records_;
  const bool traced_;
  bool is_being_compiled_ = false;
  // Held as they are: a recomputation need not be in the scope, and must save as many tensors.
  ops::Made scope_w_;
  const std::shared_ptr<InputHistory> inputs_;
  const uint64_t input_;
};

}  // namespace

Tensor fp8_linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, at::ScalarType compute,
                  const LinearRecipe& recipe, const TracedWeight* traced) {
  const auto b = bias && bias->defined() ? bias : std::nullopt;
  const bool grad = at::GradMode::is_enabled();
  const bool needs_dx = grad && x.requires_grad(), needs_dw = grad && w.requires_grad();
  const bool needs_db = grad && b && b->requires_grad();
  const Forward call{x, w, b, compute, recipe, needs_dx, needs_dw, needs_db};
  Tensor y;
  Saved saved;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::tie(y, saved) = traced ? traced_forward(call, *traced) : call.run();
  }
  if (needs_dx || needs_dw || needs_db) {
    const auto node = make_node<Fp8LinearBackward>(call, saved, traced != nullptr);
    node->set_next_edges(torch::autograd::collect_next_edges(x, w, b ? *b : Tensor()));
    torch::autograd::set_history(y, node);
  }
  return y;
}

}  // namespace octavo
