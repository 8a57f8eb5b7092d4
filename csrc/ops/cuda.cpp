// SPDX-License-Identifier: Apache-2.0
// The ops on a GPU: check, prepare, dispatch to csrc/kernels. Nothing here computes.
#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../arena.h"
#include "../kernels/kernels.h"
#include "../policy.h"
#include "checks.h"
#include "device.h"
#include "primitives.h"

namespace octavo::ops::cuda {

using at::Tensor;

// Not at::empty: under torch.use_deterministic_algorithms that fills every new tensor, a kernel each.
Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
}

cudaStream_t stream_of(const Tensor& t) { return at::cuda::getCurrentCUDAStream(t.device().index()).stream(); }

kernels::DType dtype_of(at::ScalarType type) {
  if (type == at::kBFloat16) return kernels::DType::kBF16;
  if (type == at::kHalf) return kernels::DType::kFP16;
  TORCH_INTERNAL_ASSERT(type == at::kFloat);
  return kernels::DType::kFP32;
}
kernels::Fp8 fp8_of(at::ScalarType type) {
  return type == at::kFloat8_e5m2 ? kernels::Fp8::kE5M2 : kernels::Fp8::kE4M3;
}

kernels::Matrix matrix_of(const Tensor& x) {
  return {x.const_data_ptr(), dtype_of(x.scalar_type()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

template <class T>
T* words_at(const Tensor& words, int64_t position) {
  return reinterpret_cast<T*>(static_cast<int32_t*>(words.mutable_data_ptr()) + position);
}

Tensor new_tape(const Tensor& like, int64_t slot, int64_t generation, int64_t ring, int64_t policy) {
  const c10::cuda::CUDAGuard guard(like.device());
  auto tape = empty({kTapeWords}, at::kInt, like.device());
  kernels::init_tape(words_at<Tape>(tape, 0), static_cast<int32_t>(slot), static_cast<int32_t>(generation),
                     static_cast<int32_t>(ring), policy_by_id(policy), Arena::of(like.device()).view(),
                     stream_of(like));
  return tape;
}

Tensor new_gradient_tape(const Tensor& tape) {
  const c10::cuda::CUDAGuard guard(tape.device());
  auto gradient = empty({kTapedOperandWords}, at::kInt, tape.device());
  kernels::init_gradient(words_at<TapedOperand>(gradient, 0), words_at<const Tape>(tape, 0), stream_of(tape));
  return gradient;
}

std::tuple<Tensor, Tensor, Tensor> quantize_operand(const Tensor& x, const Tensor& taped, int64_t operand_index,
                                                    int64_t source_index, int64_t policy, at::ScalarType type, bool row,
                                                    bool col, std::optional<at::ScalarType> sums_dtype) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  const auto operand = static_cast<Operand>(operand_index);
  const auto source = static_cast<StepSource>(source_index);
  const int64_t rows = round_up_16(x.size(0)), cols = round_up_16(x.size(1));
  const auto copy = [&](bool wanted, int64_t m, int64_t n) {
    return empty({wanted ? m : 0, wanted ? n : 0}, type, x.device());
  };

  kernels::Quantize q;
  q.x = matrix_of(x);
  q.format = fp8_of(type);
  q.rule = {static_cast<kernels::StepSource>(source), operand, policy_by_id(policy)};
  q.taped = words_at<TapedOperand>(taped, tape_word(operand));
  q.measure = source != StepSource::kTaped || operand == kG;
  q.padded_rows = rows;
  q.padded_cols = cols;
  auto row_copy = copy(row, rows, cols), col_copy = copy(col, cols, rows);
  if (row) q.row = static_cast<uint8_t*>(row_copy.mutable_data_ptr());
  if (col) q.col = static_cast<uint8_t*>(col_copy.mutable_data_ptr());
  const int64_t tiles = (x.size(0) + kernels::Quantize::kSumRows - 1) / kernels::Quantize::kSumRows;
  auto partials = empty({sums_dtype ? tiles : 0, x.size(1)}, at::kFloat, x.device());
  if (sums_dtype) q.column_sums = static_cast<float*>(partials.mutable_data_ptr());

  if (source != StepSource::kTaped) kernels::measure_amax(q.x, q.taped, q.rule, stream);
  kernels::quantize(q, stream);

  auto sums = empty({sums_dtype ? x.size(1) : 0}, sums_dtype.value_or(at::kFloat), x.device());
  if (sums_dtype)
    kernels::reduce_column_sums(q.column_sums, tiles, x.size(1), sums.mutable_data_ptr(), dtype_of(*sums_dtype),
                                stream);
  return {row_copy, col_copy, sums};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& scale, at::ScalarType dtype) {
  check_high("quantize", "x", x);
  check_fp8_type("quantize", "dtype", dtype);
  check_scale("quantize", "scale", scale, x.device());
  const c10::cuda::CUDAGuard guard(x.device());
  auto taped = at::zeros({kTapedOperandWords}, x.options().dtype(at::kInt));
  taped.narrow(0, 0, 1).copy_(step_words(scale, x.device()));
  auto q = empty(x.sizes(), dtype, x.device());
  if (x.numel()) {
    const auto flat = as_matrix(x);
    kernels::Quantize job;
    job.x = matrix_of(flat);
    job.format = fp8_of(dtype);
    job.taped = words_at<TapedOperand>(taped, 0);
    job.padded_rows = flat.size(0);
    job.padded_cols = flat.size(1);
    job.row = static_cast<uint8_t*>(q.mutable_data_ptr());
    kernels::quantize(job, stream_of(x));
  }
  return {q, taped.narrow(0, 1, 1).view(at::kFloat).reshape({}).clone()};
}

// Native, or emulated: because the device, the formats or the switch say so.
bool must_emulate(const Tensor& a, const Tensor& b) {
  const auto support = fp8_support(a.device());
  const bool both_e5m2 = a.scalar_type() == at::kFloat8_e5m2 && b.scalar_type() == at::kFloat8_e5m2;
  if (both_e5m2 && support == "native") {
    TORCH_WARN_ONCE(
        "octavo: FP8 tensor cores do not multiply E5M2 by E5M2; such products run on 16-bit tensor cores "
        "from the same bytes, no faster than bf16 (fp8_format=\"hybrid\" avoids them)");
  }
  return support == "emulated" || both_e5m2 || is_emulated();
}

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b,
          int64_t word_b, const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype,
          bool fast_accumulation) {
  const c10::cuda::CUDAGuard guard(a.device());
  auto d = empty({m, n}, out_dtype, a.device());
  const auto added = bias ? bias->contiguous() : Tensor();
  kernels::Gemm g;
  g.m = m;
  g.n = n;
  g.k = a.size(1);
  g.a = static_cast<const uint8_t*>(a.const_data_ptr());
  g.b = static_cast<const uint8_t*>(b.const_data_ptr());
  g.format_a = fp8_of(a.scalar_type());
  g.format_b = fp8_of(b.scalar_type());
  g.scale_a = words_at<const float>(scale_a, word_a);
  g.scale_b = words_at<const float>(scale_b, word_b);
  if (bias) {
    g.bias = added.const_data_ptr();
    g.bias_dtype = dtype_of(added.scalar_type());
  }
  g.d = d.mutable_data_ptr();
  g.d_dtype = dtype_of(out_dtype);
  g.fast_accumulation = fast_accumulation;
  g.emulate = must_emulate(a, b);
  auto scratch = empty({kernels::gemm_scratch_bytes(g)}, at::kByte, a.device());
  kernels::gemm(g, scratch.mutable_data_ptr(), stream_of(a));
  return d;
}

void record(const Tensor& tape, const std::optional<Tensor>& gradient, int64_t policy) {
  const c10::cuda::CUDAGuard guard(tape.device());
  kernels::record(words_at<const Tape>(tape, 0), gradient ? words_at<const TapedOperand>(*gradient, 0) : nullptr,
                  policy_by_id(policy), Arena::of(tape.device()).view(), stream_of(tape));
}

void advance(const Tensor& anchor, int64_t owner, const std::optional<Tensor>& found_inf) {
  const c10::cuda::CUDAGuard guard(anchor.device());
  kernels::advance(Arena::of(anchor.device()).view(), static_cast<int32_t>(owner),
                   found_inf ? found_inf->const_data_ptr<float>() : nullptr, stream_of(anchor));
}

std::tuple<Tensor, Tensor> gather_rings(const Tensor& slots, int64_t policy_id) {
  const c10::cuda::CUDAGuard guard(slots.device());
  const auto& policy = policy_by_id(policy_id);
  auto amax = empty({slots.numel(), kOperands, policy.history_len}, at::kFloat, slots.device());
  auto due = empty({slots.numel(), kOperands}, at::kInt, slots.device());
  kernels::gather_rings(Arena::of(slots.device()).view(), policy, slots.const_data_ptr<int32_t>(), slots.numel(),
                        amax.mutable_data_ptr<float>(), due.mutable_data_ptr<int32_t>(), stream_of(slots));
  return {amax, due};
}

Tensor apply_steps(const Tensor& slots, const Tensor& due, const Tensor& steps, int64_t policy_id) {
  const c10::cuda::CUDAGuard guard(slots.device());
  auto rejected = at::zeros({1}, slots.options());
  kernels::apply_steps(Arena::of(slots.device()).view(), policy_by_id(policy_id), slots.const_data_ptr<int32_t>(),
                       slots.numel(), due.const_data_ptr<int32_t>(), steps.const_data_ptr<float>(),
                       rejected.mutable_data_ptr<int32_t>(), stream_of(slots));
  return rejected;
}

std::string support_of(c10::Device device) {
  const auto* properties = at::cuda::getDeviceProperties(device.index());
  switch (kernels::fp8_support(properties->major, properties->minor)) {
    case kernels::Fp8Support::kNative:
      return "native";
    case kernels::Fp8Support::kEmulated:
      return "emulated";
    case kernels::Fp8Support::kRefused:
      return "refused";
  }
  return "refused";
}

[[maybe_unused]] const bool registered = (register_fp8_support(&support_of), true);

}  // namespace octavo::ops::cuda

TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  namespace cuda = octavo::ops::cuda;
  m.impl("quantize", &cuda::quantize);
  m.impl("_new_tape", &cuda::new_tape);
  m.impl("_new_gradient_tape", &cuda::new_gradient_tape);
  m.impl("_quantize_operand", &cuda::quantize_operand);
  m.impl("_mm", &cuda::mm);
  m.impl("_record", &cuda::record);
  m.impl("_advance", &cuda::advance);
  m.impl("_gather_rings", &cuda::gather_rings);
  m.impl("_apply_steps", &cuda::apply_steps);
}
