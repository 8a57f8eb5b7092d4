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

// What forward knows of the linear's slot (linear_state.h); slot < 0: stateless. `seeded`: all three operands have a
// history, and keep it until the op is through.
struct SlotUse {
  int32_t slot = -1;
  int32_t generation = 0;
  int32_t ring = 0;
  bool seeded = false;
};

struct ForwardOperands {
  at::Tensor x_row, x_col, w_row, w_col;  // undefined where not asked for
  at::Tensor tape;
};
ForwardOperands quantize_forward(const at::Tensor& x, const at::Tensor& w, const SlotUse& slot, int64_t policy,
                                 at::ScalarType x_type, at::ScalarType w_type, Copies x_copies, Copies w_copies,
                                 bool records);

struct BackwardOperands {
  at::Tensor g_row, g_col, w_col;  // undefined where not asked for
  at::Tensor sums;
  at::Tensor tape;  // g's step
};
// w: to be quantised again, transposed, with forward's step; or nothing.
BackwardOperands quantize_backward(const at::Tensor& g, const std::optional<at::Tensor>& w, const at::Tensor& tape,
                                   int64_t policy, at::ScalarType g_type, at::ScalarType w_type, Copies g_copies,
                                   std::optional<at::ScalarType> sums, bool seeded, bool records);

void record(const at::Tensor& tape, int64_t policy);

struct Quantized {
  at::Tensor row, col;  // undefined where not asked for
  at::Tensor sums;
  at::Tensor amax;
};
Quantized quantize_padded(const at::Tensor& x, const at::Tensor& step, at::ScalarType type, Copies copies,
                          std::optional<at::ScalarType> sums);

at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor& scale_a, int64_t word_a,
              const at::Tensor& scale_b, int64_t word_b, const std::optional<at::Tensor>& bias, int64_t m, int64_t n,
              at::ScalarType out_dtype, bool fast_accumulation);
void advance(const at::Tensor& anchor, int64_t owner, const std::optional<at::Tensor>& found_inf);
std::tuple<at::Tensor, at::Tensor> gather_rings(const at::Tensor& slots, int64_t policy);
at::Tensor apply_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps, int64_t policy);

// Position, in words, of an operand's step: x's and w's on forward's tape, and g's as forward saw it.
constexpr int64_t tape_word(Operand operand) { return operand * sizeof(Tape::Operand) / sizeof(int32_t); }

}  // namespace octavo::ops
