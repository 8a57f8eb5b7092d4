// SPDX-License-Identifier: Apache-2.0
// A linear's forward and backward on a GPU: quantise, multiply, record. Temporaries share one allocation each.
#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <array>

#include "../arena.h"
#include "../policy.h"
#include "checks.h"
#include "cuda_gemm.h"
#include "primitives.h"

namespace octavo::ops::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Several temporaries in one allocation. Room is asked for first, then all of it is allocated.
class Slab {
 public:
  // The place of `bytes` bytes.
  int64_t add(int64_t bytes) {
    const int64_t place = bytes_;
    bytes_ += (bytes + 255) / 256 * 256;
    return place;
  }
  void allocate(c10::Device device) {
    if (bytes_) memory_ = empty({bytes_}, at::kByte, device);
  }
  uint8_t* at(int64_t place) const { return static_cast<uint8_t*>(memory_.mutable_data_ptr()) + place; }

 private:
  int64_t bytes_ = 0;
  Tensor memory_;
};

// Any tensor as a matrix of its last dimension's rows, without a view where its strides allow it.
kernels::Matrix as_kernel_matrix(const Tensor& x, Tensor& copy) {
  if (x.dim() == 2) return matrix_of(x);
  if (!x.is_contiguous()) return matrix_of(copy = as_matrix(x));
  const int64_t cols = x.dim() ? x.size(-1) : 1;
  return {x.const_data_ptr(), dtype_of(x.scalar_type()), x.numel() / cols, cols, cols, 1};
}

// One operand's quantisation: its copies are kept, or temporary, or not made.
class Job {
 public:
  Job(const Tensor& x, Operand operand, at::ScalarType type) : type_(type), device_(x.device()) {
    q.x = as_kernel_matrix(x, matrix_);
    q.operand = operand;
    q.format = fp8_of(type);
    q.padded_rows = round_up_16(q.x.rows);
    q.padded_cols = round_up_16(q.x.cols);
  }
  // `keep`: in tensors of their own; `use`: for this op alone.
  void plan(Copies keep, Copies use, Slab& slab) {
    const int64_t bytes = q.padded_rows * q.padded_cols;
    if (keep & kRow) row = kept(q.padded_rows, q.padded_cols, q.row);
    if (keep & kCol) col = kept(q.padded_cols, q.padded_rows, q.col);
    if (use & ~keep & kRow) row_place_ = slab.add(bytes);
    if (use & ~keep & kCol) col_place_ = slab.add(bytes);
  }
  void place(const Slab& slab) {
    if (row_place_ >= 0) q.row = slab.at(row_place_);
    if (col_place_ >= 0) q.col = slab.at(col_place_);
  }
  Factor row_factor(const float* step) const { return {q.row, type_, step}; }
  Factor col_factor(const float* step) const { return {q.col, type_, step}; }

  kernels::Quantize q;
  Tensor row, col;

 private:
  Tensor kept(int64_t rows, int64_t cols, uint8_t*& place) const {
    auto copy = empty({rows, cols}, type_, device_);
    place = static_cast<uint8_t*>(copy.mutable_data_ptr());
    return copy;
  }

  at::ScalarType type_;
  c10::Device device_;
  Tensor matrix_;
  int64_t row_place_ = -1, col_place_ = -1;
};

const uint8_t* codes_of(const Tensor& copy) { return static_cast<const uint8_t*>(copy.const_data_ptr()); }

// A tape as the kernels want it. One that saved-tensor hooks hand back may lie anywhere: then a copy.
Tensor aligned(const Tensor& tape) {
  return reinterpret_cast<uintptr_t>(tape.const_data_ptr()) % alignof(Tape) == 0 ? tape : tape.clone();
}
const Tape* tape_at(const Tensor& words) { return static_cast<const Tape*>(words.const_data_ptr()); }
Tensor aligned_or_none(const OptionalTensor& tape) { return tape ? aligned(*tape) : Tensor(); }
const Tape* tape_or_null(const Tensor& tape) { return tape.defined() ? tape_at(tape) : nullptr; }

constexpr int64_t kPeaksBytes = kernels::Measure::kMaxPeaks * sizeof(Peak);

// The amax pass before a quantisation without a known step, which then takes it from what that finds.
kernels::Measure measure_before(kernels::Quantize& q, const float* known, Peak* room) {
  const kernels::Measure measure{.x = q.x, .operand = q.operand, .known = known, .peaks = room};
  q.measured = room;
  q.measured_count = kernels::peaks_of(measure);
  q.source = kernels::StepSource::kHistory;
  return measure;
}

// Without an amax pass, where the step on the tape may be missing, but hardly ever is.
void take_from_tape(kernels::Quantize& q, const Tensor& tape) {
  q.own = &static_cast<Tape*>(tape.mutable_data_ptr())->operand[q.operand];
  q.source = kernels::StepSource::kTape;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_forward(
    const Tensor& x, const Tensor& w, const OptionalTensor& bias, int64_t slot, int64_t generation, int64_t ring,
    bool seeded, bool alone, bool likely, int64_t policy_id, at::ScalarType x_type, at::ScalarType w_type,
    at::ScalarType y_type, bool wants_y, bool fast, bool records, int64_t x_keep, int64_t w_keep,
    const OptionalTensor& x_row, const OptionalTensor& given_x_tape, const OptionalTensor& w_row,
    const OptionalTensor& given_w_tape) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto stream = stream_of(x);
  const auto& policy = policy_by_id(policy_id);
  const auto x_tape = aligned_or_none(given_x_tape), w_tape = aligned_or_none(given_w_tape);
  Job x_job(x, kX, x_type), w_job(w, kW, w_type);
  std::array<Job*, 2> jobs;
  int count = 0;
  const auto add = [&](Job& job, bool is_made, int64_t keep) {
    if (!is_made && (keep || wants_y)) jobs[count++] = &job;
  };
  add(x_job, x_tape.defined(), x_keep);
  add(w_job, w_tape.defined(), w_keep);

  Slab slab;
  const Copies use = wants_y ? kRow : kNoCopies;
  for (int i = 0; i < count; ++i) jobs[i]->plan(jobs[i] == &x_job ? x_keep : w_keep, use, slab);
  const bool measures = !seeded && !likely;  // in a pass of its own
  const int64_t measured = measures ? slab.add(count * kPeaksBytes) : 0;
  slab.allocate(x.device());

  kernels::Forward forward;
  forward.slot = static_cast<int32_t>(slot);
  forward.generation = static_cast<int32_t>(generation);
  forward.ring = static_cast<int32_t>(ring);
  forward.policy = policy.id;
  if (slot >= 0) forward.place = Arena::of(x.device()).slot_at(forward.slot);
  forward.x_tape = tape_or_null(x_tape);
  forward.w_tape = tape_or_null(w_tape);
  // Of what is taken over too: what backward saves has the same shape in a recomputation that shares nothing.
  if (records && (wants_y || x_keep)) forward.x_peaks = kernels::tiles_of(x_job.q);
  if (records && (wants_y || w_keep)) forward.w_peaks = kernels::tiles_of(w_job.q);
  auto tape = empty({kTapeWords + forward.x_peaks + forward.w_peaks}, at::kInt, x.device());
  forward.tape = reinterpret_cast<Tape*>(tape.mutable_data_ptr());

  std::array<kernels::Quantize, 2> quantizations;
  std::array<kernels::Measure, 2> measurements;
  for (int i = 0; i < count; ++i) {
    auto& q = jobs[i]->q;
    jobs[i]->place(slab);
    q.given = q.used = float_at(tape, tape_word(q.operand));
    q.source = kernels::StepSource::kSlot;
    // With steps that another stream may move, the blocks have to see one reading of them: the tape's.
    if (measures) {
      auto* const room = reinterpret_cast<Peak*>(slab.at(measured + i * kPeaksBytes));
      measurements[i] = measure_before(q, alone ? nullptr : q.given, room);
    }
    if (likely) take_from_tape(q, tape);
    if (records) q.peaks = peaks_at(tape, kTapeWords + (q.operand == kW ? forward.x_peaks : 0));
    quantizations[i] = q;
  }
  if (count == 0 || likely || (measures && !alone)) kernels::begin_tape(forward, stream);
  if (count && measures) kernels::measure_amax(measurements.data(), count, alone ? &forward : nullptr, stream);
  if (count) kernels::quantize(quantizations.data(), count, policy, &forward, stream);

  Tensor y;
  if (wants_y) {
    at::DimVector sizes(x.sizes());
    sizes.back() = w.size(0);
    y = empty(sizes, y_type, x.device());
    auto a = x_job.row_factor(float_at(tape, tape_word(kX))), b = w_job.row_factor(float_at(tape, tape_word(kW)));
    if (x_row) a.codes = codes_of(*x_row);
    if (w_row) b.codes = codes_of(*w_row);
    multiply({.a = a,
              .b = b,
              .m = x_job.q.x.rows,
              .n = w.size(0),
              .k = x_job.q.padded_cols,
              .bias = bias ? bias->contiguous() : Tensor(),
              .fast = fast},
             y);
  }
  return {y, x_job.row, x_job.col, w_job.row, w_job.col, tape};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& g, const Tensor& given_tape, const OptionalTensor& w, const OptionalTensor& w_col,
    const OptionalTensor& x_col, const OptionalTensor& given_w_tape, int64_t policy_id, at::ScalarType g_type,
    at::ScalarType w_type, at::IntArrayRef dx_sizes, at::ScalarType dx_type, at::ScalarType dw_type, bool dx_fast,
    bool dw_fast, std::optional<at::ScalarType> db_type, bool seeded, bool likely, bool records) {
  const c10::cuda::CUDAGuard guard(g.device());
  const auto stream = stream_of(g);
  const auto device = g.device();
  const auto& policy = policy_by_id(policy_id);
  const auto tape = aligned(given_tape), w_tape = given_w_tape ? aligned(*given_w_tape) : tape;
  const bool wants_dx = w || w_col, wants_dw = x_col.has_value();

  Slab slab;
  Job g_job(g, kG, g_type);
  g_job.plan(kNoCopies, copies(wants_dx, wants_dw), slab);
  std::optional<Job> w_job;
  if (w && !w_col) w_job.emplace(*w, kW, w_type).plan(kNoCopies, kCol, slab);
  const int64_t rows = g_job.q.x.rows, cols = g_job.q.x.cols, k = dx_sizes.back();
  const int32_t tiles = records ? kernels::tiles_of(g_job.q) : 0;
  const int64_t step = slab.add(sizeof(float)), peaks = slab.add(tiles * sizeof(Peak)),
                measured = seeded || likely ? 0 : slab.add(kPeaksBytes);
  const int64_t sum_tiles = (rows + kernels::Quantize::kSumRows - 1) / kernels::Quantize::kSumRows;
  const int64_t partial = db_type ? slab.add(sum_tiles * cols * sizeof(float)) : 0;
  slab.allocate(device);

  auto& q = g_job.q;
  g_job.place(slab);
  q.given = float_at(tape, tape_word(kG));
  q.used = reinterpret_cast<float*>(slab.at(step));
  kernels::EndOfBackward end;
  Tensor db;
  if (records) {
    end.tape = tape_at(tape);
    end.g_peaks = q.peaks = reinterpret_cast<Peak*>(slab.at(peaks));
    end.g_count = tiles;
    end.policy = policy;
    end.arena = Arena::of(device).view();
  }
  if (db_type) {
    db = empty({cols}, *db_type, device);
    end.partial_sums = q.column_sums = reinterpret_cast<float*>(slab.at(partial));
    end.tiles = sum_tiles;
    end.cols = cols;
    end.sums = db.mutable_data_ptr();
    end.sums_dtype = dtype_of(*db_type);
  }
  if (!seeded && likely) take_from_tape(q, tape);
  if (!seeded && !likely) {
    const auto measure = measure_before(q, q.given, reinterpret_cast<Peak*>(slab.at(measured)));
    kernels::measure_amax(&measure, 1, nullptr, stream);
  }
  std::array<kernels::Quantize, 2> quantizations = {q};
  if (w_job) {
    w_job->place(slab);
    w_job->q.given = float_at(tape, tape_word(kW));
    quantizations[1] = w_job->q;
  }
  kernels::quantize(quantizations.data(), w_job ? 2 : 1, policy, nullptr, stream);
  kernels::end_backward(end, stream);

  Tensor dx, dw;
  if (wants_dx) {
    dx = empty(dx_sizes, dx_type, device);
    auto b = w_job ? w_job->col_factor(nullptr) : Factor{codes_of(*w_col), w_col->scalar_type(), nullptr};
    b.step = float_at(w_job ? tape : w_tape, tape_word(kW));
    multiply({.a = g_job.row_factor(q.used), .b = b, .m = rows, .n = k, .k = q.padded_cols, .fast = dx_fast}, dx);
  }
  if (wants_dw) {
    dw = empty({cols, k}, dw_type, device);
    const Factor b{codes_of(*x_col), x_col->scalar_type(), float_at(tape, tape_word(kX))};
    multiply({.a = g_job.col_factor(q.used), .b = b, .m = cols, .n = k, .k = q.padded_rows, .fast = dw_fast}, dw);
  }
  return {dx, dw, db};
}

void record(const Tensor& given_tape, int64_t policy) {
  const c10::cuda::CUDAGuard guard(given_tape.device());
  const auto tape = aligned(given_tape);
  kernels::EndOfBackward end;
  end.tape = tape_at(tape);
  end.policy = policy_by_id(policy);
  end.arena = Arena::of(tape.device()).view();
  kernels::end_backward(end, stream_of(tape));
}

}  // namespace octavo::ops::cuda

TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  namespace cuda = octavo::ops::cuda;
  m.impl("_linear_forward", &cuda::linear_forward);
  m.impl("_linear_backward", &cuda::linear_backward);
  m.impl("_record", &cuda::record);
}
