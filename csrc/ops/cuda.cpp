// SPDX-License-Identifier: Apache-2.0
// The ops on a GPU but for the products (cuda_gemm.cpp): check, prepare, dispatch to csrc/kernels. Nothing here
// computes.
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

// A quantisation, with room for its copies.
struct Job {
  Job(const Tensor& x, Operand operand, at::ScalarType type, int64_t copies) {
    q.x = matrix_of(x);
    q.operand = operand;
    q.format = fp8_of(type);
    q.padded_rows = round_up_16(x.size(0));
    q.padded_cols = round_up_16(x.size(1));
    const auto make = [&](int64_t rows, int64_t cols, uint8_t*& place) {
      auto copy = empty({rows, cols}, type, x.device());
      place = static_cast<uint8_t*>(copy.mutable_data_ptr());
      return copy;
    };
    if (copies & kRow) row = make(q.padded_rows, q.padded_cols, q.row);
    if (copies & kCol) col = make(q.padded_cols, q.padded_rows, q.col);
  }

  kernels::Quantize q;
  Tensor row, col;
};

// The sums of a quantisation's columns, which `end` is to complete.
struct ColumnSums {
  ColumnSums(Job& job, std::optional<at::ScalarType> dtype, c10::Device device, kernels::EndOfBackward& end) {
    if (!dtype) return;
    constexpr int64_t rows = kernels::Quantize::kSumRows;
    end.tiles = (job.q.x.rows + rows - 1) / rows;
    end.cols = job.q.x.cols;
    partial = empty({end.tiles, end.cols}, at::kFloat, device);
    sums = empty({end.cols}, *dtype, device);
    job.q.column_sums = partial.mutable_data_ptr<float>();
    end.partial_sums = job.q.column_sums;
    end.sums = sums.mutable_data_ptr();
    end.sums_dtype = dtype_of(*dtype);
  }

  Tensor partial, sums;
};

// Room for what measure_amax finds in a tensor, which the quantisation then takes its step from.
kernels::Measure measure_before(Job& job, const float* known, const Tensor& room, int64_t position) {
  kernels::Measure measure{.x = job.q.x, .operand = job.q.operand, .known = known};
  measure.peaks = peaks_at(room, position);
  job.q.measured = measure.peaks;
  job.q.measured_count = kernels::peaks_of(measure);
  job.q.source = kernels::StepSource::kHistory;
  return measure;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_forward(const Tensor& x, const Tensor& w, int64_t slot,
                                                                    int64_t generation, int64_t ring, bool seeded,
                                                                    int64_t policy_id, at::ScalarType x_type,
                                                                    at::ScalarType w_type, int64_t x_copies,
                                                                    int64_t w_copies, bool records) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  const auto& policy = policy_by_id(policy_id);
  Job x_job(x, kX, x_type, x_copies), w_job(w, kW, w_type, w_copies);

  kernels::Forward forward;
  forward.slot = static_cast<int32_t>(slot);
  forward.generation = static_cast<int32_t>(generation);
  forward.ring = static_cast<int32_t>(ring);
  forward.x_peaks = records && x_copies ? kernels::tiles_of(x_job.q) : 0;
  forward.w_peaks = records && w_copies ? kernels::tiles_of(w_job.q) : 0;
  forward.policy = policy.id;
  if (slot >= 0) forward.place = Arena::of(x.device()).slot_at(forward.slot);
  auto tape = empty({kTapeWords + forward.x_peaks + forward.w_peaks}, at::kInt, x.device());
  forward.tape = reinterpret_cast<Tape*>(tape.mutable_data_ptr());

  std::array<Job*, 2> wanted = {&x_job, &w_job};
  const int count = x_copies && w_copies ? 2 : 1;
  if (!x_copies) wanted[0] = &w_job;
  std::array<kernels::Quantize, 2> quantizations;
  std::array<kernels::Measure, 2> measures;
  Tensor room;
  if (!seeded) room = empty({count * kernels::Measure::kMaxPeaks}, at::kInt, x.device());
  int64_t peaks = kTapeWords;
  for (int i = 0; i < count; ++i) {
    auto& q = wanted[i]->q;
    q.given = q.used = float_at(tape, tape_word(q.operand));
    q.source = kernels::StepSource::kSlot;
    if (!seeded) measures[i] = measure_before(*wanted[i], nullptr, room, i * kernels::Measure::kMaxPeaks);
    if (records) q.peaks = peaks_at(tape, peaks);
    peaks += q.operand == kX ? forward.x_peaks : forward.w_peaks;
    quantizations[i] = q;
  }
  if (!seeded) kernels::measure_amax(measures.data(), count, &forward, stream);
  kernels::quantize(quantizations.data(), count, policy, &forward, stream);
  return {x_job.row, x_job.col, w_job.row, w_job.col, tape};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_backward(
    const Tensor& g, const std::optional<Tensor>& w, const Tensor& tape, int64_t policy_id, at::ScalarType g_type,
    at::ScalarType w_type, int64_t g_copies, std::optional<at::ScalarType> sums_dtype, bool seeded, bool records) {
  const c10::cuda::CUDAGuard guard(g.device());
  const auto stream = stream_of(g);
  const auto& policy = policy_by_id(policy_id);
  Job g_job(g, kG, g_type, g_copies);
  const int32_t peaks = records ? kernels::tiles_of(g_job.q) : 0;
  auto g_tape = empty({1 + peaks + (seeded ? 0 : kernels::Measure::kMaxPeaks)}, at::kInt, g.device());

  kernels::EndOfBackward end;
  const ColumnSums sums(g_job, sums_dtype, g.device(), end);
  g_job.q.given = float_at(tape, tape_word(kG));
  g_job.q.used = float_at(g_tape, 0);
  if (records) {
    end.tape = reinterpret_cast<const Tape*>(tape.const_data_ptr());
    end.g_peaks = g_job.q.peaks = peaks_at(g_tape, 1);
    end.g_count = peaks;
    end.policy = policy;
    end.arena = Arena::of(g.device()).view();
  }
  if (!seeded) {
    const auto measure = measure_before(g_job, g_job.q.given, g_tape, 1 + peaks);
    kernels::measure_amax(&measure, 1, nullptr, stream);
  }
  std::array<kernels::Quantize, 2> quantizations = {g_job.q};
  std::optional<Job> w_job;
  if (w) {
    w_job.emplace(*w, kW, w_type, kCol);
    w_job->q.given = float_at(tape, tape_word(kW));
    quantizations[1] = w_job->q;
  }
  kernels::quantize(quantizations.data(), w ? 2 : 1, policy, nullptr, stream);
  kernels::end_backward(end, stream);
  return {g_job.row, g_job.col, w_job ? w_job->col : Tensor(), sums.sums, g_tape};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_padded(const Tensor& x, const Tensor& step, at::ScalarType type,
                                                           int64_t copies, std::optional<at::ScalarType> sums_dtype) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  const auto words = step_words(step, x.device());
  Job job(x, kX, type, copies);
  kernels::EndOfBackward end;
  const ColumnSums sums(job, sums_dtype, x.device(), end);
  job.q.given = float_at(words, 0);
  auto peaks = empty({kernels::tiles_of(job.q)}, at::kInt, x.device());
  job.q.peaks = peaks_at(peaks, 0);
  kernels::quantize(&job.q, 1, {}, nullptr, stream);
  kernels::end_backward(end, stream);
  auto amax = empty({}, at::kFloat, x.device());
  kernels::reduce_peaks(job.q.peaks, static_cast<int32_t>(peaks.numel()), amax.mutable_data_ptr<float>(), stream);
  return {job.row, job.col, sums.sums, amax};
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

void record(const Tensor& tape, int64_t policy) {
  const c10::cuda::CUDAGuard guard(tape.device());
  kernels::EndOfBackward end;
  end.tape = reinterpret_cast<const Tape*>(tape.const_data_ptr());
  end.policy = policy_by_id(policy);
  end.arena = Arena::of(tape.device()).view();
  kernels::end_backward(end, stream_of(tape));
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

[[maybe_unused]] const bool registered = (register_fp8_support(&support_of), true);

}  // namespace octavo::ops::cuda

TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  namespace cuda = octavo::ops::cuda;
  m.impl("quantize", &cuda::quantize);
  m.impl("_quantize_forward", &cuda::quantize_forward);
  m.impl("_quantize_backward", &cuda::quantize_backward);
  m.impl("_quantize_padded", &cuda::quantize_padded);
  m.impl("_record", &cuda::record);
  m.impl("_advance", &cuda::advance);
  m.impl("_gather_rings", &cuda::gather_rings);
  m.impl("_apply_steps", &cuda::apply_steps);
}
