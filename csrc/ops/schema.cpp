// SPDX-License-Identifier: Apache-2.0
// Every op of the library, with what it does: the table of contents of csrc/ops. Kernels: cpu.cpp (the executable
// specification), cuda.cpp, cuda_gemm.cpp, meta.cpp (shapes and types alone), public.cpp (ops made of other ops),
// control.cpp.
#include <torch/library.h>

TORCH_LIBRARY(octavo, m) {
  // ---- Public: the kernel interface (include/octavo/ops.h). Every scale is a quantisation step, float32, one element.
  // q = cast(x / scale), x's shape, contiguous; amax: 0-d float32, the largest finite |x|.
  m.def("quantize(Tensor x, Tensor scale, ScalarType dtype) -> (Tensor q, Tensor amax)");
  // a[M, K] b[N, K]^T * scale_a * scale_b + bias; out_scale (a step) goes with, and only with, an E4M3 output.
  m.def(
      "mm_fp8(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias=None, ScalarType out_dtype=bfloat16, "
      "Tensor? out_scale=None, bool fast_accumulation=False) -> Tensor");
  m.def(
      "linear_forward_fp8(Tensor x, Tensor w, Tensor? bias, Tensor scale_x, Tensor scale_w, ScalarType dtype) -> "
      "(Tensor out, Tensor amax_x, Tensor amax_w)");
  // masks: which of the gradients of x, w and bias are wanted; the others come back as None.
  m.def(
      "linear_backward_fp8(Tensor g, Tensor x, Tensor w, bool[3] masks, Tensor scale_g, Tensor scale_w, "
      "Tensor scale_x, ScalarType dtype, ScalarType operand_dtype=float8_e4m3fn) -> "
      "(Tensor grad_x, Tensor grad_w, Tensor grad_b, Tensor amax_g)");

  // ---- Internal: one kernel each per device, put together in fp8_linear.cpp. Tapes are int32 tensors (slot.h); copies
  // are bits of ops::Copies; what is not asked for is not defined. policy: id of a ScalingPolicy.
  // y = x w^T + bias of a linear, if wants_y, and the FP8 copies of x[..., K] and w[N, K] that are to be kept,
  // zero-padded to multiples of 16. Each operand is quantised with the step that the slot holds under this policy, or,
  // where it has no history (slot < 0: never), by its own amax; unless copies made before are given, with the tape that
  // has their step and peaks. records: a backward will want the amaxes. The tape has the steps, and, with records, the
  // peaks of both. seeded, alone and likely: as in ops::SlotUse.
  m.def(
      "_linear_forward(Tensor x, Tensor w, Tensor? bias, int slot, int generation, int ring, bool seeded, bool alone, "
      "bool likely, "
      "int policy, ScalarType x_type, ScalarType w_type, ScalarType y_type, bool wants_y, bool fast_accumulation, bool "
      "records, "
      "int x_keep, int w_keep, Tensor? x_row, Tensor? x_tape, Tensor? w_row, Tensor? w_tape) -> "
      "(Tensor y, Tensor x_row, Tensor x_col, Tensor w_row, Tensor w_col, Tensor tape)");
  // g[..., N] quantised once, with the step that forward's tape holds for it, else by its own amax. dx = g w if w
  // (which is quantised again, with forward's step) or its transposed copy is given; dw = g^T x if x's transposed copy
  // is; db: g's column sums. w_tape: that has w_col's step, if not `tape`. records: pending = max(pending, amax) for x,
  // w and g. seeded: g's step is known to be on the tape; likely: it is nearly always there.
  m.def(
      "_linear_backward(Tensor g, Tensor tape, Tensor? w, Tensor? w_col, Tensor? x_col, Tensor? w_tape, int policy, "
      "ScalarType g_type, ScalarType w_type, int[] dx_sizes, ScalarType dx_type, ScalarType dw_type, "
      "bool dx_fast, bool dw_fast, ScalarType? db_type, bool seeded, bool likely, bool records) -> (Tensor dx, Tensor "
      "dw, Tensor "
      "db)");
  // That record alone, of x and w.
  m.def("_record(Tensor tape, int policy) -> ()");
  // ---- For compiled graphs (compiled_linear.h). The linear that a graph gets in the place of aten::linear: under a
  // region (text_of in region.h), or as outside of all, where that is "". leaf: whose the weight is, None: no one's;
  // slice: its offset, sizes and strides if it is a part of that.
  m.def("_linear(Tensor x, Tensor w, Tensor? bias, str region, Tensor? leaf, SymInt[] slice) -> Tensor");
  // That a graph leaves a linear alone, for a reason that the report has: counted, and more if on_fallback says so; and
  // the warnings that have come of it while graphs were made.
  m.def("_left_alone(str region, str reason, ScalarType w_type, bool computed, ScalarType compute) -> ()");
  m.def("_take_warnings() -> str[]");
  // What that becomes, if in FP8. recipe: text_of in policy.h. What is not wanted is a tensor of no elements.
  m.def(
      "_compiled_forward(Tensor x, Tensor w, Tensor? bias, Tensor? leaf, SymInt[] slice, str recipe, ScalarType "
      "compute, bool needs_dx, bool needs_dw, bool trains, SymInt tape_words) -> "
      "(Tensor y, Tensor x_col, Tensor w_col, Tensor tape)");
  // has_state: the weight may have one. k: of x [..., K]. A gradient whose type is None is not wanted.
  m.def(
      "_compiled_backward(Tensor g, Tensor tape, Tensor? x, Tensor? w, Tensor? w_col, str recipe, bool has_state, "
      "SymInt k, "
      "ScalarType compute, ScalarType? dx_type, ScalarType? dw_type, ScalarType? db_type) -> (Tensor dx, Tensor dw, "
      "Tensor db)");
  // Copies of any matrix, with a given step.
  m.def(
      "_quantize_padded(Tensor x, Tensor step, ScalarType type, int copies, ScalarType? sums, bool amax) -> "
      "(Tensor row, Tensor col, Tensor sums, Tensor amax)");
  // The product of two padded copies, cropped to [m, n]; scales are float32 words at a position in an int32 tape.
  m.def(
      "_mm(Tensor a, Tensor b, Tensor scale_a, int word_a, Tensor scale_b, int word_b, Tensor? bias, int m, int n, "
      "ScalarType out_dtype, bool fast_accumulation) -> Tensor");
  // The same, without a bias, added to d [m, n], which is contiguous and bf16, fp16 or float32.
  m.def(
      "_mm_into(Tensor(a!) d, Tensor a, Tensor b, Tensor scale_a, int word_a, Tensor scale_b, int word_b, "
      "bool fast_accumulation) -> ()");
  // CUDA alone: times cuBLASLt's algorithms for that product (kernels/tune.h). Of those in the last round, the
  // heuristic's first choice first: the median time (float64, on the CPU) and the line for a table; then the index of
  // the one in force and of the winner, how many were tried, and how many gave another result.
  m.def(
      "_tune_mm(Tensor a, Tensor b, Tensor scale_a, int word_a, Tensor scale_b, int word_b, Tensor? bias, int m, int "
      "n, "
      "ScalarType out_dtype, bool fast_accumulation, bool accumulate, bool exhaustive) -> "
      "(Tensor microseconds, str[] lines, int[] in_force_winner_tried_wrong)");
  // After an optimizer's step, over the whole arena of anchor's device: pending amaxes enter the rings, policies give
  // new steps. owner 0: all slots. found_inf: one float32, not 0: nothing happens.
  m.def("_advance(Tensor anchor, int owner, Tensor? found_inf) -> ()");
  // Custom policies: rings oldest first [slots, 3, history_len], which of them want a new step [slots, 3]; and the
  // answer. Returns how many steps were refused (not finite and positive), int32 [1].
  m.def("_gather_rings(Tensor slots, int policy) -> (Tensor amax, Tensor due)");
  m.def("_apply_steps(Tensor slots, Tensor due, Tensor steps, int policy) -> Tensor");
}
