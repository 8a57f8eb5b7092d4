// SPDX-License-Identifier: Apache-2.0
// A linear in a graph that a compiler makes: two ops that the compiler does not look into, pure and with plain tensors
// as results, each of which knows by value all that it needs; the state is found through the weight when they run.
// Forward changes nothing, so it may be run twice, or moved. Backward's record may be repeated (docs/numerics.md).
#pragma once

#include <c10/core/SymInt.h>

#include <optional>
#include <utility>

#include "backward.h"
#include "forward.h"

namespace octavo {

// Whose a weight is: the compiler's own tensors do not tell. Without a slice it is the whole leaf, or turns out to be a
// part of something, or no one's, when the graph runs.
struct TracedWeight {
  const std::optional<at::Tensor>& leaf;  // none: no one's
  c10::SymIntArrayRef slice;              // offset, sizes, strides
};

// As Forward::run and Backward::run, on operands that the compiler traces with. `saved` has no empty places where
// tensors are: the ops return tensors of no elements instead of undefined ones.
std::pair<at::Tensor, Saved> traced_forward(const Forward& call, const TracedWeight& weight);
ops::BackwardResult traced_backward(const Backward& call);

}  // namespace octavo
