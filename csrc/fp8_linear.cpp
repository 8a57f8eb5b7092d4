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

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "forward.h"
#include "ops/checks.h"
#include "ops/primitives.h"

namespace octavo {
namespace {

using at::Tensor;
using ops::as_matrix;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The type and shape of an input, to give its gradient the same.
struct Like {
  at::ScalarType dtype;
  at::DimVector sizes;
};

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
  Fp8LinearBackward(const Forward& call, const Saved& saved)
      : w_(call.needs_dx ? call.w : Tensor(), false),
        w_col_(call.needs_dx ? saved.w_col : Tensor(), false),
        x_(saved.x, false),
        tape_(saved.tape, false),
        x_like_{call.x.scalar_type(), at::DimVector(call.x.sizes())},
        w_like_{call.w.scalar_type(), at::DimVector(call.w.sizes())},
        bias_dtype_(call.bias ? call.bias->scalar_type() : call.compute),
        compute_(call.compute),
        policy_(call.region.policy.id),
        // A recomputed tape, or one that hooks bring back, need not have the step that was known at forward.
        seeded_(saved.seeded && !tape_.has_hooks()),
        records_(saved.records),
        scope_w_(call.needs_dx ? saved.scope_w : ops::Made()),
        inputs_(saved.inputs),
        input_(saved.input),
        types_(call.region.types),
        products_(call.region.products) {}

  std::string name() const override { return "Fp8LinearBackward"; }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard lock(mutex_);
    const bool again = at::GradMode::is_enabled();
    if (!grads[0].defined()) return variable_list(3);
    auto result = backward(grads[0]);
    return again ? differentiable_once(std::move(result), grads[0]) : result;
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
      if (node_.records_ && node_.inputs_) node_.inputs_->record(is_done_ ? node_.input_ : SharedInput::new_number());
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
    const bool dx_fp8 = dx && in_fp8(products_.dgrad), dw_fp8 = dw && in_fp8(products_.wgrad);

    variable_list result(3);
    NoteOfRecord note(*this);
    // Also where only the bias learns: g's history goes on, for when more does again.
    const bool quantizes = tape.defined() && (in_fp8(products_.dgrad) || in_fp8(products_.wgrad));
    if (quantizes) {
      auto gradients =
          ops::linear_backward({.g = grad,
                                .tape = tape,
                                .w = dx_fp8 ? w : Tensor(),
                                .w_col = dx_fp8 ? (scope_w_.col.defined() ? scope_w_.col : w_col) : Tensor(),
                                .x_col = dw_fp8 ? x : Tensor(),
                                .w_tape = scope_w_.tape,
                                .policy = policy_,
                                .g_type = types_.type[kG],
                                .w_type = types_.type[kW],
                                .dx_sizes = x_like_.sizes,
                                .dx_type = x_like_.dtype,
                                .dw_type = w_like_.dtype,
                                .dx_fast = is_fast(products_.dgrad),
                                .dw_fast = is_fast(products_.wgrad),
                                .db_type = db ? std::optional(bias_dtype_) : std::nullopt,
                                .seeded = seeded_,
                                .records = records_});
      result = {std::move(gradients.dx), std::move(gradients.dw), std::move(gradients.db)};
    } else if (records_) {
      ops::record(tape, policy_);
    }
    note.done();

    const auto dy = [&] { return as_matrix(grad); };
    if (dx && !dx_fp8) result[0] = high(dy(), w).to(x_like_.dtype).view(x_like_.sizes);
    if (dw && !dw_fp8) result[1] = high(dy().t(), as_matrix(x)).to(w_like_.dtype);
    if (db && !quantizes) result[2] = column_sums(dy());
    return result;
  }

  // The bias gradient alone, by the same kernel and so in the same order.
  Tensor column_sums(const Tensor& dy) const {
    const auto any_step = at::ones({1}, dy.options().dtype(at::kFloat));
    return ops::quantize_padded(dy, any_step, types_.type[kG], ops::kNoCopies, bias_dtype_, false).sums;
  }

  Tensor high(const Tensor& a, const Tensor& b) const { return at::mm(a.to(compute_), b.to(compute_)); }

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
  const Like x_like_;
  const Like w_like_;
  const at::ScalarType bias_dtype_;
  const at::ScalarType compute_;
  const int32_t policy_;
  const bool seeded_;
  const bool records_;
  // Held as they are: a recomputation need not be in the scope, and must save as many tensors.
  ops::Made scope_w_;
  const std::shared_ptr<InputHistory> inputs_;
  const uint64_t input_;
  const OperandTypes types_;
  const Products products_;
};

}  // namespace

Tensor fp8_linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, at::ScalarType compute,
                  const Region& region) {
  const auto b = bias && bias->defined() ? bias : std::nullopt;
  const bool grad = at::GradMode::is_enabled();
  const bool needs_dx = grad && x.requires_grad(), needs_dw = grad && w.requires_grad();
  const bool needs_db = grad && b && b->requires_grad();
  const Forward call{x, w, b, compute, region, needs_dx, needs_dw, needs_db};
  Tensor y;
  Saved saved;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::tie(y, saved) = call.run();
  }
  if (needs_dx || needs_dw || needs_db) {
    const auto node = make_node<Fp8LinearBackward>(call, saved);
    node->set_next_edges(torch::autograd::collect_next_edges(x, w, b ? *b : Tensor()));
    torch::autograd::set_history(y, node);
  }
  return y;
}

}  // namespace octavo
