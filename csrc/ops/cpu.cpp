// SPDX-License-Identifier: Apache-2.0
// The executable specification of docs/numerics.md: scalar and obvious, sharing no arithmetic with the CUDA kernels.
// Built with -ffp-contract=off: every float operation below is rounded once, as written.
#include <ATen/Dispatch.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "../policy.h"
#include "checks.h"
#include "cpu_formats.h"
#include "cpu_state.h"
#include "float_mode.h"
#include "primitives.h"

namespace octavo::ops::cpu {

using at::Tensor;

// Calls `use(element as float, row, column)` for rows [begin, end) of a matrix of any strides.
template <class Use>
void for_each(const Tensor& x, int64_t begin, int64_t end, Use&& use) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "octavo", [&] {
    const auto* data = x.const_data_ptr<scalar_t>();
    const int64_t cols = x.size(1), row_stride = x.stride(0), col_stride = x.stride(1);
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < cols; ++c) use(static_cast<float>(data[r * row_stride + c * col_stride]), r, c);
  });
}

template <class Body>
void for_rows(const Tensor& x, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, x.size(1)));
  at::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
    const IeeeFloats ieee;
    body(begin, end);
  });
}

// The peak of a whole tensor.
Peak measure(const Tensor& x) {
  std::mutex mutex;
  float amax = 0;
  bool nonfinite = false;
  for_rows(x, [&](int64_t begin, int64_t end) {
    float my_amax = 0;
    bool my_nonfinite = false;
    for_each(x, begin, end, [&](float v, int64_t, int64_t) {
      if (std::isfinite(v))
        my_amax = std::max(my_amax, std::abs(v));
      else
        my_nonfinite = true;
    });
    std::lock_guard lock(mutex);
    amax = std::max(amax, my_amax);
    nonfinite |= my_nonfinite;
  });
  Peak bits;
  std::memcpy(&bits, &amax, sizeof bits);
  return nonfinite ? bits | kNonFinite : bits;
}

float amax_of(Peak peak) {
  const Peak bits = peak & ~kNonFinite;
  float amax;
  std::memcpy(&amax, &bits, sizeof amax);
  return amax;
}

void cast_rows(const Tensor& x, const Caster& cast, uint8_t* out, int64_t pitch) {
  for_rows(x, [&](int64_t begin, int64_t end) {
    for_each(x, begin, end, [&](float v, int64_t r, int64_t c) { out[r * pitch + c] = cast(v); });
  });
}

Tensor column_sums(const Tensor& x, at::ScalarType dtype) {
  const IeeeFloats ieee;
  auto sums = at::zeros({x.size(1)}, at::kDouble);
  auto* data = sums.mutable_data_ptr<double>();
  for_each(x, 0, x.size(0), [&](float v, int64_t, int64_t c) { data[c] += v; });
  return sums.to(dtype);
}

Tensor empty_float() { return at::empty({0}, at::kFloat); }
// Not filled, which would go by way of a double and lose a subnormal where those are flushed.
Tensor float_tensor(float value) {
  auto tensor = at::empty({}, at::kFloat);
  *tensor.mutable_data_ptr<float>() = value;
  return tensor;
}

// The two copies of a matrix.
std::pair<Tensor, Tensor> padded_copies(const Tensor& x, float step, at::ScalarType type, int64_t wanted) {
  if (!(wanted & (kRow | kCol))) return {};
  const IeeeFloats ieee;
  const int64_t rows = round_up_16(x.size(0)), cols = round_up_16(x.size(1));
  auto copy = at::zeros({rows, cols}, at::kByte);
  cast_rows(x, Caster(type, step), copy.mutable_data_ptr<uint8_t>(), cols);
  return {wanted & kRow ? copy.view(type) : Tensor(), wanted & kCol ? copy.t().contiguous().view(type) : Tensor()};
}

// The step of one use: the history's, or, for want of one, the tensor's own.
float resolve_step(float of_history, Peak peak, Operand operand, const ScalingPolicy& policy) {
  const IeeeFloats ieee;
  return of_history != 0 ? of_history : step_from_amax(amax_of(peak), policy.fp8_max[operand], policy);
}

// ---- Ops

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_padded(const Tensor& x, const Tensor& step, at::ScalarType type,
                                                           int64_t wanted, std::optional<at::ScalarType> sums,
                                                           bool wants_amax) {
  auto [row, col] = padded_copies(x, float32_step(step), type, wanted);
  Tensor amax;
  if (wants_amax) amax = float_tensor(amax_of(measure(x)));
  return {row, col, sums ? column_sums(x, *sums) : Tensor(), amax};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& scale, at::ScalarType dtype) {
  check_high("quantize", "x", x);
  check_fp8_type("quantize", "dtype", dtype);
  check_scale("quantize", "scale", scale, x.device());
  const IeeeFloats ieee;
  const auto flat = as_matrix(x);
  auto q = at::empty(x.sizes(), at::TensorOptions().dtype(at::kByte));
  cast_rows(flat, Caster(dtype, float32_step(scale)), q.mutable_data_ptr<uint8_t>(), flat.size(1));
  return {q.view(dtype), float_tensor(amax_of(measure(flat)))};
}

// The codes of a matrix as float64.
Tensor decoded(const Tensor& codes) {
  const auto table = decode_table(format_of(codes.scalar_type()));
  auto out = at::empty(codes.sizes(), at::kDouble);
  const auto bytes = codes.view(at::kByte).contiguous();
  const auto* in = bytes.const_data_ptr<uint8_t>();
  auto* values = out.mutable_data_ptr<double>();
  at::parallel_for(0, codes.numel(), 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = table[in[i]];
  });
  return out;
}

float scale_at(const Tensor& words, int64_t word) {
  float scale;
  std::memcpy(&scale, words.const_data_ptr<int32_t>() + word, sizeof scale);
  return scale;
}

// The exact sum of products, rounded to float32, times either scale, plus the bias, plus `d` if it is defined.
Tensor mm_in_float32(const Tensor& a, const Tensor& b, float sa, float sb, const std::optional<Tensor>& bias, int64_t m,
                     int64_t n, const Tensor& d) {
  const auto exact = at::matmul(decoded(a.narrow(0, 0, m)), decoded(b.narrow(0, 0, n)).t());
  const auto added = bias ? bias->to(at::kFloat).contiguous() : empty_float();
  const float* bias_data = bias ? added.const_data_ptr<float>() : nullptr;
  const auto before = d.defined() ? d.to(at::kFloat) : empty_float();
  const float* d_data = d.defined() ? before.const_data_ptr<float>() : nullptr;
  auto out = at::empty({m, n}, at::kFloat);
  const double* sums = exact.const_data_ptr<double>();
  float* y = out.mutable_data_ptr<float>();
  for_rows(out, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < n; ++c) {
        float value = static_cast<float>(sums[r * n + c]) * sa;
        value = value * sb;
        if (bias_data) value = value + bias_data[c];
        if (d_data) value = value + d_data[r * n + c];
        y[r * n + c] = value;
      }
  });
  return out;
}

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b,
          int64_t word_b, const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype, bool) {
  const IeeeFloats ieee;
  return mm_in_float32(a, b, scale_at(scale_a, word_a), scale_at(scale_b, word_b), bias, m, n, {}).to(out_dtype);
}

void mm_into(const Tensor& d, const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a,
             const Tensor& scale_b, int64_t word_b, bool) {
  check_sum(d);
  const IeeeFloats ieee;
  const float sa = scale_at(scale_a, word_a), sb = scale_at(scale_b, word_b);
  d.copy_(mm_in_float32(a, b, sa, sb, {}, d.size(0), d.size(1), d));
}

using OptionalTensor = std::optional<Tensor>;

const Tape& tape_of(const Tensor& words) { return *static_cast<const Tape*>(words.const_data_ptr()); }
const Peak* peaks_of(const Tape& tape, Operand operand) {
  return reinterpret_cast<const Peak*>(&tape + 1) + (operand == kW ? tape.operand[kX].peaks : 0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_forward(
    const Tensor& x, const Tensor& w, const OptionalTensor& bias, int64_t slot, int64_t generation, int64_t ring, bool,
    bool, bool, int64_t policy_id, at::ScalarType x_type, at::ScalarType w_type, at::ScalarType y_type, bool wants_y,
    bool fast, bool records, int64_t x_keep, int64_t w_keep, const OptionalTensor& given_x,
    const OptionalTensor& x_tape, const OptionalTensor& given_w, const OptionalTensor& w_tape) {
  const auto& policy = policy_by_id(policy_id);
  const auto x2 = as_matrix(x);
  const bool uses_x = x_keep || wants_y, uses_w = w_keep || wants_y;
  auto words = at::zeros({kTapeWords + (records && uses_x) + (records && uses_w)}, at::kInt);
  auto& tape = *static_cast<Tape*>(words.mutable_data_ptr());
  auto* peaks = reinterpret_cast<Peak*>(&tape + 1);
  tape.slot = static_cast<int32_t>(slot);
  tape.generation = static_cast<int32_t>(generation);
  tape.ring = static_cast<int32_t>(ring);
  for (const auto operand : {kX, kW, kG}) tape.operand[operand].scale = step_of_slot(slot, generation, operand, policy);

  const Copies use = wants_y ? kRow : kNoCopies;
  // `from`: the tape of copies made before, whose step and peak are taken over.
  const auto quantized = [&](bool uses, const OptionalTensor& from, const Tensor& matrix, Operand which,
                             at::ScalarType type, Copies wanted) {
    auto& operand = tape.operand[which];
    const Peak peak = from || !uses ? 0 : measure(matrix);
    if (from) operand.scale = tape_of(*from).operand[which].scale;
    if (!from && uses) operand.scale = resolve_step(operand.scale, peak, which, policy);
    if (records && uses) {
      *peaks++ = from ? peaks_of(tape_of(*from), which)[0] : peak;
      operand.peaks = 1;
    }
    return from || !uses ? std::pair<Tensor, Tensor>() : padded_copies(matrix, operand.scale, type, wanted);
  };
  auto [x_row, x_col] = quantized(uses_x, x_tape, x2, kX, x_type, x_keep | use);
  auto [w_row, w_col] = quantized(uses_w, w_tape, w, kW, w_type, w_keep | use);
  Tensor y;
  if (wants_y) {
    auto sizes = x.sizes().vec();
    sizes.back() = w.size(0);
    y = mm(given_x ? *given_x : x_row, given_w ? *given_w : w_row, words, tape_word(kX), words, tape_word(kW), bias,
           x2.size(0), w.size(0), y_type, fast)
            .view(sizes);
  }
  const auto kept = [](const Tensor& copy, bool keep) { return keep ? copy : Tensor(); };
  return {y,
          kept(x_row, x_keep & kRow),
          kept(x_col, x_keep & kCol),
          kept(w_row, w_keep & kRow),
          kept(w_col, w_keep & kCol),
          words};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& g, const Tensor& words, const OptionalTensor& w, const OptionalTensor& given_w_col,
    const OptionalTensor& x_col, const OptionalTensor& w_tape, int64_t policy_id, at::ScalarType g_type,
    at::ScalarType w_type, at::IntArrayRef dx_sizes, at::ScalarType dx_type, at::ScalarType dw_type, bool dx_fast,
    bool dw_fast, std::optional<at::ScalarType> db_type, bool seeded, bool, bool records) {
  const auto& policy = policy_by_id(policy_id);
  const auto& tape = tape_of(words);
  TORCH_INTERNAL_ASSERT(!seeded || tape.operand[kG].scale != 0, "a step that was known is not on the tape");
  const auto g2 = as_matrix(g);
  const bool wants_dx = w || given_w_col;
  const Peak peak = measure(g2);
  const float step = resolve_step(tape.operand[kG].scale, peak, kG, policy);
  const auto g_step = float_tensor(step).view({1}).view(at::kInt);
  auto [g_row, g_col] = padded_copies(g2, step, g_type, copies(wants_dx, x_col.has_value()));
  if (records) record(words, peak, policy);
  Tensor dx, dw;
  if (wants_dx) {
    const auto w_col = given_w_col ? *given_w_col : padded_copies(*w, tape.operand[kW].scale, w_type, kCol).second;
    dx = mm(g_row, w_col, g_step, 0, given_w_col && w_tape ? *w_tape : words, tape_word(kW), {}, g2.size(0),
            dx_sizes.back(), dx_type, dx_fast)
             .view(dx_sizes);
  }
  if (x_col) dw = mm(g_col, *x_col, g_step, 0, words, tape_word(kX), {}, g2.size(1), dx_sizes.back(), dw_type, dw_fast);
  return {dx, dw, db_type ? column_sums(g2, *db_type) : Tensor()};
}

}  // namespace octavo::ops::cpu

TORCH_LIBRARY_IMPL(octavo, CPU, m) {
  namespace cpu = octavo::ops::cpu;
  m.impl("quantize", &cpu::quantize);
  m.impl("_linear_forward", &cpu::linear_forward);
  m.impl("_linear_backward", &cpu::linear_backward);
  m.impl("_quantize_padded", &cpu::quantize_padded);
  m.impl("_mm", &cpu::mm);
  m.impl("_mm_into", &cpu::mm_into);
}
