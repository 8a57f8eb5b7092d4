// SPDX-License-Identifier: Apache-2.0
// Typed callers of the library's internal ops, one kernel each per device. schema.cpp says what they do.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../slot.h"

namespace octavo::ops {

// What to make of an operand, as bits.
using Copies = int64_t;
constexpr Copies kNoCopies = 0;
constexpr Copies kRow = 1;   // [rows, cols], both padded to 16
constexpr Copies kCol = 2;   // the transpose of that
constexpr Copies kStep = 4;  // no copy, but the step that one would have, and the amax
constexpr Copies copies(bool row, bool col, bool step = false) { return row * kRow | col * kCol | step * kStep; }

// What forward knows of the linear's slot (linear_state.h); slot < 0: stateless.
struct SlotUse {
  int32_t slot = -1;
  int32_t generation = 0;
  int32_t ring = 0;
  bool seeded = false;  // all three operands have a history, and keep it until the op is through
  bool alone = true;    // no other stream moves the slot meanwhile
  bool likely = false;  // they have one now, and a graph is captured: its replays will nearly always find one
};

// FP8 copies of an operand, as one linear hands them to another: the tape has their step and their peaks.
struct Made {
  at::Tensor row, col, tape;  // undefined: not made
};

// The forward product of a linear, and what its backward needs; or only that, if `wants_y` is not set.
struct ForwardCall {
  const at::Tensor& x;  // [..., K]
  const at::Tensor& w;  // [N, K]
  const std::optional<at::Tensor>& bias;
  SlotUse slot;
  int64_t policy;
  at::ScalarType x_type;
  at::ScalarType w_type;
  at::ScalarType y_type;
  bool wants_y;
  bool fast;
  bool records;               // a backward will want the amaxes
  Copies x_keep = kNoCopies;  // to be handed back
  Copies w_keep = kNoCopies;
  const Made* x_made = nullptr;  // copies to use instead of making them
  const Made* w_made = nullptr;
};
struct ForwardResult {
  at::Tensor y;  // [..., N]
  Made x, w;     // what was to be kept, but the tapes
  at::Tensor tape;
};
ForwardResult linear_forward(const ForwardCall& call);

// The two gradients that are products, the bias gradient, and the record of what was measured. dx needs w, to be
// quantised again with forward's step, or its transposed copy; dw needs x's transposed copy.
struct BackwardCall {
  const at::Tensor& g;  // [..., N]
  const at::Tensor& tape;
  at::Tensor w, w_col, x_col;
  at::Tensor w_tape;  // that has w_col's step; undefined: `tape`
  int64_t policy;
  at::ScalarType g_type;
  at::ScalarType w_type;
  at::IntArrayRef dx_sizes;
  at::ScalarType dx_type;
  at::ScalarType dw_type;
  bool dx_fast;
  bool dw_fast;
  std::optional<at::ScalarType> db_type;
  bool seeded;  // g's step is known to be on the tape
  bool likely;  // g's step is nearly always there
  bool records;
};
struct BackwardResult {
  at::Tensor dx, dw, db;  // undefined where not asked for
};
BackwardResult linear_backward(const BackwardCall& call);

// That record alone, of x and w.
void record(const at::Tensor& tape, int64_t policy);

struct Quantized {
  at::Tensor row, col;  // undefined where not asked for
  at::Tensor sums;
  at::Tensor amax;
};
Quantized quantize_padded(const at::Tensor& x, const at::Tensor& step, at::ScalarType type, Copies copies,
                          std::optional<at::ScalarType> sums, bool wants_amax);

at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, int64_t word_a,
              const at::Tensor& scale_b, int64_t word_b, const std::optional<at::Tensor>& bias, int64_t m, int64_t n,
              at::ScalarType out_dtype, bool fast_accumulation);
void advance(const at::Tensor& anchor, int64_t owner, const std::optional<at::Tensor>& found_inf);
std::tuple<at::Tensor, at::Tensor> gather_rings(const at::Tensor& slots, int64_t policy);
at::Tensor apply_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps, int64_t policy);

// Position, in words, of an operand's step on a tape.
constexpr int64_t tape_word(Operand operand) { return operand * sizeof(Tape::Operand) / sizeof(int32_t); }

}  // namespace octavo::ops
