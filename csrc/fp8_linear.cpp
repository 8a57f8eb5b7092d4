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
#include <ATen/ops/linear_native.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "linear_state.h"
#include "ops/checks.h"
#include "ops/primitives.h"

namespace octavo {
namespace {

using at::Tensor;
using ops::as_matrix;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

bool in_fp8(Precision precision) { return precision != Precision::kHigh; }
bool fast(Precision precision) { return precision == Precision::kFast; }

at::DimVector with_last(at::IntArrayRef sizes, int64_t last) {
  at::DimVector result(sizes);
  result.back() = last;
  return result;
}

// What forward makes for backward.
struct Saved {
  Tensor x;              // wgrad's operand: the transposed FP8 copy, or x itself; undefined if wgrad is not wanted
  Tensor tape;           // undefined if nothing was quantised
  bool seeded = false;   // g's step is on the tape
  bool records = false;  // there is a slot to record in
};

struct Forward {
  const Tensor& x;
  const Tensor& w;
  const std::optional<Tensor>& bias;
  at::ScalarType compute;
  const Region& region;
  bool needs_dx;
  bool needs_dw;
  bool needs_db;

  // The 2-D result, and what backward needs.
  std::pair<Tensor, Saved> run() const {
    const auto& products = region.products;
    const auto& types = region.types.type;
    const bool forward = in_fp8(products.forward), x_col = needs_dw && in_fp8(products.wgrad);
    const auto x_copies = ops::copies(forward, x_col);
    const auto w_copies = ops::copies(forward, false, needs_dx && in_fp8(products.dgrad));
    const auto x2 = as_matrix(x);
    Saved saved;
    Tensor y;
    ops::ForwardOperands q;
    if (x_copies || w_copies) {
      const bool trains = needs_dx || needs_dw || needs_db;
      const auto slot = slot_of(w, region.policy, trains);
      saved.seeded = slot.seeded;
      saved.records = trains && slot.slot >= 0;
      q = ops::quantize_forward(x2, w, slot, region.policy.id, types[kX], types[kW], x_copies, w_copies, saved.records);
      saved.tape = q.tape;
    }
    const auto b = bias ? std::optional(bias->to(compute)) : std::nullopt;
    if (forward) {
      y = ops::mm(q.x_row, q.w_row, q.tape, ops::tape_word(kX), q.tape, ops::tape_word(kW), b, x2.size(0), w.size(0),
                  compute, fast(products.forward));
    } else {
      y = at::native::linear(x2.to(compute), w.to(compute), b);  // not at::linear, which would come back to us
    }
    // In high precision the user's own tensor, not a view made here: a change of it before backward has to be noticed.
    if (needs_dw) saved.x = x_col ? q.x_col : x.to(compute);
    return {std::move(y), std::move(saved)};
  }
};

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
        x_(saved.x, false),
        tape_(saved.tape, false),
        x_like_{call.x.scalar_type(), at::DimVector(call.x.sizes())},
        w_like_{call.w.scalar_type(), at::DimVector(call.w.sizes())},
        bias_dtype_(call.bias ? call.bias->scalar_type() : call.compute),
        compute_(call.compute),
        policy_(call.region.policy.id),
        seeded_(saved.seeded),
        records_(saved.records),
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
    x_.reset_data();
    tape_.reset_data();
  }

 private:
  variable_list backward(const Tensor& grad) {
    // Unpacked above autograd: hooks of the user's run here, and a checkpoint's recomputation records a graph.
    const auto self = shared_from_this();
    const auto tape = tape_.unpack(self), x = x_.unpack(self), w = w_.unpack(self);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto dy = as_matrix(grad);
    const bool dx = task_should_compute_output(0), dw = task_should_compute_output(1),
               db = task_should_compute_output(2);
    const bool dx_fp8 = dx && in_fp8(products_.dgrad), dw_fp8 = dw && in_fp8(products_.wgrad);

    ops::BackwardOperands q;
    // Also where only the bias learns: g's history goes on, for when more does again.
    const bool quantizes = tape.defined() && (in_fp8(products_.dgrad) || in_fp8(products_.wgrad));
    if (quantizes) {
      q = ops::quantize_backward(dy, dx_fp8 ? std::optional(w) : std::nullopt, tape, policy_, types_.type[kG],
                                 types_.type[kW], ops::copies(dx_fp8, dw_fp8),
                                 db ? std::optional(bias_dtype_) : std::nullopt, seeded_, records_);
    } else if (records_) {
      ops::record(tape, policy_);
    }

    variable_list result(3);
    if (dx) result[0] = dx_fp8 ? dgrad(q, tape, dy.size(0)) : high(dy, w).to(x_like_.dtype);
    if (dw) result[1] = dw_fp8 ? wgrad(q, tape, x) : high(dy.t(), as_matrix(x)).to(w_like_.dtype);
    if (dx) result[0] = result[0].view(x_like_.sizes);
    if (db) result[2] = quantizes ? q.sums : column_sums(dy);
    return result;
  }

  Tensor dgrad(const ops::BackwardOperands& q, const Tensor& tape, int64_t m) const {
    return ops::mm(q.g_row, q.w_col, q.tape, 0, tape, ops::tape_word(kW), {}, m, w_like_.sizes[1], x_like_.dtype,
                   fast(products_.dgrad));
  }

  Tensor wgrad(const ops::BackwardOperands& q, const Tensor& tape, const Tensor& x_col) const {
    return ops::mm(q.g_col, x_col, q.tape, 0, tape, ops::tape_word(kX), {}, w_like_.sizes[0], w_like_.sizes[1],
                   w_like_.dtype, fast(products_.wgrad));
  }

  // The bias gradient alone, by the same kernel and so in the same order.
  Tensor column_sums(const Tensor& dy) const {
    const auto any_step = at::ones({1}, dy.options().dtype(at::kFloat));
    return ops::quantize_padded(dy, any_step, types_.type[kG], ops::kNoCopies, bias_dtype_).sums;
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
  SavedVariable x_;
  SavedVariable tape_;
  const Like x_like_;
  const Like w_like_;
  const at::ScalarType bias_dtype_;
  const at::ScalarType compute_;
  const int32_t policy_;
  const bool seeded_;
  const bool records_;
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
    y = y.view(with_last(x.sizes(), w.size(0)));
  }
  if (needs_dx || needs_dw || needs_db) {
    const auto node = make_node<Fp8LinearBackward>(call, saved);
    node->set_next_edges(torch::autograd::collect_next_edges(x, w, b ? *b : Tensor()));
    torch::autograd::set_history(y, node);
  }
  return y;
}

}  // namespace octavo
