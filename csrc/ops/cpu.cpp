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

struct Measured {
  float amax = 0;
  bool nonfinite = false;
};

Measured measure(const Tensor& x) {
  std::mutex mutex;
  Measured all;
  for_rows(x, [&](int64_t begin, int64_t end) {
    Measured mine;
    for_each(x, begin, end, [&](float v, int64_t, int64_t) {
      if (std::isfinite(v))
        mine.amax = std::max(mine.amax, std::abs(v));
      else
        mine.nonfinite = true;
    });
    std::lock_guard lock(mutex);
    all.amax = std::max(all.amax, mine.amax);
    all.nonfinite |= mine.nonfinite;
  });
  return all;
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

Tensor words(int64_t count) { return at::zeros({count}, at::kInt); }
Tensor empty_float() { return at::empty({0}, at::kFloat); }

float resolve_step(StepSource source, const TapedOperand& taped, Operand operand, const ScalingPolicy& policy) {
  if (source == StepSource::kTaped) return taped.scale;
  if (source == StepSource::kHistory && taped.scale != 0) return taped.scale;
  return step_from_amax(taped.amax, policy.fp8_max[operand], policy);
}

// ---- Ops

Tensor new_tape(const Tensor&, int64_t slot, int64_t generation, int64_t ring, int64_t policy) {
  auto tensor = words(kTapeWords);
  auto& tape = *static_cast<Tape*>(tensor.mutable_data_ptr());
  tape.slot = static_cast<int32_t>(slot);
  tape.generation = static_cast<int32_t>(generation);
  tape.ring = static_cast<int32_t>(ring);
  for (const auto operand : {kX, kW, kG})
    tape.operand[operand].scale = step_of_slot(tape, operand, policy_by_id(policy));
  return tensor;
}

Tensor new_gradient_tape(const Tensor& tape) {
  auto tensor = words(kTapedOperandWords);
  static_cast<TapedOperand*>(tensor.mutable_data_ptr())->scale =
      static_cast<const Tape*>(tape.const_data_ptr())->operand[kG].scale;
  return tensor;
}

std::tuple<Tensor, Tensor, Tensor> quantize_operand(const Tensor& x, const Tensor& taped_words, int64_t operand_index,
                                                    int64_t source_index, int64_t policy_id, at::ScalarType type,
                                                    bool row, bool col, std::optional<at::ScalarType> sums_dtype) {
  const auto operand = static_cast<Operand>(operand_index);
  const auto source = static_cast<StepSource>(source_index);
  const IeeeFloats ieee;
  const auto& policy = policy_by_id(policy_id);
  auto& taped = *reinterpret_cast<TapedOperand*>(taped_words.mutable_data_ptr<int32_t>() + tape_word(operand));

  if (source != StepSource::kTaped || operand == kG) {
    const auto measured = measure(x);
    taped.amax = measured.amax;
    taped.nonfinite = measured.nonfinite;
  }
  taped.scale = resolve_step(source, taped, operand, policy);

  const auto bytes = at::TensorOptions().dtype(at::kByte);
  Tensor row_copy = at::empty({0}, bytes).view(type), col_copy = row_copy;
  if (row || col) {
    const int64_t rows = round_up_16(x.size(0)), cols = round_up_16(x.size(1));
    auto copy = at::zeros({rows, cols}, bytes);
    cast_rows(x, Caster(type, taped.scale), copy.mutable_data_ptr<uint8_t>(), cols);
    if (row) row_copy = copy.view(type);
    if (col) col_copy = copy.t().contiguous().view(type);
  }
  return {row_copy, col_copy, sums_dtype ? column_sums(x, *sums_dtype) : empty_float()};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& scale, at::ScalarType dtype) {
  check_high("quantize", "x", x);
  check_fp8_type("quantize", "dtype", dtype);
  check_scale("quantize", "scale", scale, x.device());
  const IeeeFloats ieee;
  const auto flat = as_matrix(x);
  auto q = at::empty(x.sizes(), at::TensorOptions().dtype(at::kByte));
  cast_rows(flat, Caster(dtype, float32_step(scale)), q.mutable_data_ptr<uint8_t>(), flat.size(1));
  auto amax = at::empty({}, at::kFloat);
  *amax.mutable_data_ptr<float>() = measure(flat).amax;
  return {q.view(dtype), amax};
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

// The exact sum of products, rounded to float32, times either scale, plus the bias, rounded to the output's type.
Tensor mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b,
          int64_t word_b, const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype, bool) {
  const IeeeFloats ieee;
  const auto exact = at::matmul(decoded(a.narrow(0, 0, m)), decoded(b.narrow(0, 0, n)).t());
  const float sa = scale_at(scale_a, word_a), sb = scale_at(scale_b, word_b);
  const auto added = bias ? bias->to(at::kFloat).contiguous() : empty_float();
  const float* bias_data = bias ? added.const_data_ptr<float>() : nullptr;
  auto out = at::empty({m, n}, at::kFloat);
  const double* sums = exact.const_data_ptr<double>();
  float* y = out.mutable_data_ptr<float>();
  for_rows(out, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < n; ++c) {
        float value = static_cast<float>(sums[r * n + c]) * sa;
        value = value * sb;
        if (bias_data) value = value + bias_data[c];
        y[r * n + c] = value;
      }
  });
  return out.to(out_dtype);
}

}  // namespace octavo::ops::cpu

TORCH_LIBRARY_IMPL(octavo, CPU, m) {
  namespace cpu = octavo::ops::cpu;
  m.impl("quantize", &cpu::quantize);
  m.impl("_new_tape", &cpu::new_tape);
  m.impl("_new_gradient_tape", &cpu::new_gradient_tape);
  m.impl("_quantize_operand", &cpu::quantize_operand);
  m.impl("_mm", &cpu::mm);
}
