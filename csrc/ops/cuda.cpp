// SPDX-License-Identifier: Apache-2.0
// The ops on a GPU but for linears (cuda_linear.cpp) and products (cuda_gemm.cpp): check, prepare, dispatch to
// csrc/kernels. Nothing here computes.
#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../arena.h"
#include "../policy.h"
#include "checks.h"
#include "cuda_tensors.h"
#include "device.h"
#include "primitives.h"

namespace octavo::ops::cuda {

using at::Tensor;

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_padded(const Tensor& x, const Tensor& step, at::ScalarType type,
                                                           int64_t copies, std::optional<at::ScalarType> sums_dtype,
                                                           bool wants_amax) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  const auto words = step_words(step, x.device());
  kernels::Quantize q;
  q.x = matrix_of(x);
  q.format = fp8_of(type);
  q.given = float_at(words, 0);
  q.padded_rows = round_up_16(x.size(0));
  q.padded_cols = round_up_16(x.size(1));
  const auto make = [&](bool wanted, int64_t rows, int64_t cols, uint8_t*& place) {
    if (!wanted) return Tensor();
    auto copy = empty({rows, cols}, type, x.device());
    place = static_cast<uint8_t*>(copy.mutable_data_ptr());
    return copy;
  };
  const auto row = make(copies & kRow, q.padded_rows, q.padded_cols, q.row);
  const auto col = make(copies & kCol, q.padded_cols, q.padded_rows, q.col);
  Tensor peaks, amax, partial, sums;
  if (wants_amax) {
    peaks = empty({kernels::tiles_of(q)}, at::kInt, x.device());
    q.peaks = peaks_at(peaks, 0);
  }
  kernels::EndOfBackward end;
  if (sums_dtype) {
    constexpr int64_t rows = kernels::Quantize::kSumRows;
    end.tiles = (x.size(0) + rows - 1) / rows;
    end.cols = x.size(1);
    partial = empty({end.tiles, end.cols}, at::kFloat, x.device());
    sums = empty({end.cols}, *sums_dtype, x.device());
    end.partial_sums = q.column_sums = partial.mutable_data_ptr<float>();
    end.sums = sums.mutable_data_ptr();
    end.sums_dtype = dtype_of(*sums_dtype);
  }
  kernels::quantize(&q, 1, {}, nullptr, stream);
  kernels::end_backward(end, stream);
  if (wants_amax) {
    amax = empty({}, at::kFloat, x.device());
    kernels::reduce_peaks(q.peaks, static_cast<int32_t>(peaks.numel()), amax.mutable_data_ptr<float>(), stream);
  }
  return {row, col, sums, amax};
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor& scale, at::ScalarType dtype) {
  check_high("quantize", "x", x);
  check_fp8_type("quantize", "dtype", dtype);
  check_scale("quantize", "scale", scale, x.device());
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  auto q = empty(x.sizes(), dtype, x.device());
  auto amax = at::zeros({}, x.options().dtype(at::kFloat));
  if (!x.numel()) return {q, amax};
  const auto flat = as_matrix(x);
  const auto words = step_words(scale, x.device());
  kernels::Quantize job;
  job.x = matrix_of(flat);
  job.format = fp8_of(dtype);
  job.given = float_at(words, 0);
  job.padded_rows = flat.size(0);
  job.padded_cols = flat.size(1);
  job.row = static_cast<uint8_t*>(q.mutable_data_ptr());
  auto peaks = empty({kernels::tiles_of(job)}, at::kInt, x.device());
  job.peaks = peaks_at(peaks, 0);
  kernels::quantize(&job, 1, {}, nullptr, stream);
  kernels::reduce_peaks(job.peaks, static_cast<int32_t>(peaks.numel()), amax.mutable_data_ptr<float>(), stream);
  return {q, amax};
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

Fp8Support support_of(c10::Device device) {
  const auto* properties = at::cuda::getDeviceProperties(device.index());
  switch (kernels::fp8_support(properties->major, properties->minor)) {
    case kernels::Fp8Support::kNative:
      return Fp8Support::kNative;
    case kernels::Fp8Support::kEmulated:
      return Fp8Support::kEmulated;
    case kernels::Fp8Support::kRefused:
      return Fp8Support::kRefused;
  }
  return Fp8Support::kRefused;
}

std::string name_of(c10::Device device) { return at::cuda::getDeviceProperties(device.index())->name; }

[[maybe_unused]] const bool registered = (register_cuda_device(&support_of, &name_of), true);

}  // namespace octavo::ops::cuda

TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  namespace cuda = octavo::ops::cuda;
  m.impl("quantize", &cuda::quantize);
  m.impl("_quantize_padded", &cuda::quantize_padded);
  m.impl("_advance", &cuda::advance);
  m.impl("_gather_rings", &cuda::gather_rings);
  m.impl("_apply_steps", &cuda::apply_steps);
}
