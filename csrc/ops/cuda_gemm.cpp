// SPDX-License-Identifier: Apache-2.0
// The products on a GPU, and the tuning of their algorithms.
#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../kernels/tables.h"
#include "../kernels/tune.h"
#include "checks.h"
#include "cuda_tensors.h"
#include "device.h"
#include "gemm_tables.h"
#include "primitives.h"

namespace octavo::ops::cuda {

using at::Tensor;

// Native, or emulated: because the device, the formats or the switch say so.
bool must_emulate(const Tensor& a, const Tensor& b) {
  const auto support = fp8_support(a.device());
  const bool both_e5m2 = a.scalar_type() == at::kFloat8_e5m2 && b.scalar_type() == at::kFloat8_e5m2;
  if (both_e5m2 && support == Fp8Support::kNative) {
    TORCH_WARN_ONCE(
        "octavo: FP8 tensor cores do not multiply E5M2 by E5M2; such products run on 16-bit tensor cores "
        "from the same bytes, no faster than bf16 (fp8_format=\"hybrid\" avoids them)");
  }
  return support == Fp8Support::kEmulated || both_e5m2 || is_emulated();
}

// A scale where cuBLASLt can take it, which a user's own need not be: then a copy, kept here.
class Scale {
 public:
  Scale(const Tensor& words, int64_t word) : at_(float_at(words, word)) {
    if (reinterpret_cast<uintptr_t>(at_) % 16 == 0) return;
    copy_ = words.narrow(0, word, 1).clone();
    at_ = float_at(copy_, 0);
  }
  const float* get() const { return at_; }

 private:
  const float* at_;
  Tensor copy_;
};

// A product of two padded copies into d [m, n].
kernels::Gemm gemm_of(const Tensor& d, const Tensor& a, const Tensor& b, const Scale& scale_a, const Scale& scale_b,
                      bool fast_accumulation) {
  kernels::Gemm g;
  g.m = d.size(0);
  g.n = d.size(1);
  g.k = a.size(1);
  g.a = static_cast<const uint8_t*>(a.const_data_ptr());
  g.b = static_cast<const uint8_t*>(b.const_data_ptr());
  g.format_a = fp8_of(a.scalar_type());
  g.format_b = fp8_of(b.scalar_type());
  g.scale_a = scale_a.get();
  g.scale_b = scale_b.get();
  g.d = d.mutable_data_ptr();
  g.d_dtype = dtype_of(d.scalar_type());
  g.fast_accumulation = fast_accumulation;
  g.emulate = must_emulate(a, b);
  return g;
}

// `bias` is contiguous, or undefined.
void add_bias(kernels::Gemm& g, const Tensor& bias) {
  if (!bias.defined()) return;
  g.bias = bias.const_data_ptr();
  g.bias_dtype = dtype_of(bias.scalar_type());
}

// Memory beside cuBLASLt's workspace, which most products need none of.
class Scratch {
 public:
  Scratch(const kernels::Gemm& g, c10::Device device) {
    if (const auto bytes = kernels::gemm_scratch_bytes(g)) memory_ = empty({bytes}, at::kByte, device);
  }
  void* get() const { return memory_.defined() ? memory_.mutable_data_ptr() : nullptr; }

 private:
  Tensor memory_;
};

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b,
          int64_t word_b, const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype,
          bool fast_accumulation) {
  const c10::cuda::CUDAGuard guard(a.device());
  auto d = empty({m, n}, out_dtype, a.device());
  const auto added = bias ? bias->contiguous() : Tensor();
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto g = gemm_of(d, a, b, on_a, on_b, fast_accumulation);
  add_bias(g, added);
  const Scratch scratch(g, a.device());
  kernels::gemm(g, scratch.get(), stream_of(a));
  return d;
}

void mm_into(const Tensor& d, const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a,
             const Tensor& scale_b, int64_t word_b, bool fast_accumulation) {
  check_sum(d);
  const c10::cuda::CUDAGuard guard(a.device());
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto g = gemm_of(d, a, b, on_a, on_b, fast_accumulation);
  g.accumulate = true;
  const Scratch scratch(g, a.device());
  kernels::gemm(g, scratch.get(), stream_of(a));
}

std::tuple<Tensor, std::vector<std::string>, std::vector<int64_t>> tune_mm(
    const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b, int64_t word_b,
    const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype, bool fast_accumulation,
    bool accumulate, bool exhaustive) {
  const c10::cuda::CUDAGuard guard(a.device());
  const auto d = empty({m, n}, out_dtype, a.device());
  const auto added = bias ? bias->contiguous() : Tensor();
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto g = gemm_of(d, a, b, on_a, on_b, fast_accumulation);
  add_bias(g, added);
  g.accumulate = accumulate;
  const Scratch scratch(g, a.device());
  const auto tuning = kernels::tune(g, scratch.get(), {.exhaustive = exhaustive}, stream_of(a));
  auto microseconds = at::empty({static_cast<int64_t>(tuning.finalists.size())}, at::kDouble);
  std::vector<std::string> lines;
  for (const auto& finalist : tuning.finalists) {
    microseconds.mutable_data_ptr<double>()[lines.size()] = finalist.microseconds;
    lines.push_back(finalist.line);
  }
  return {microseconds, lines, {tuning.in_force, tuning.winner, tuning.tried, tuning.wrong}};
}

std::vector<GemmTable> tables_in_force() {
  std::vector<GemmTable> tables;
  for (const auto& table : kernels::tables_in_force())
    tables.push_back({table.name, table.hash, static_cast<int64_t>(table.entries.size()), table.refused});
  return tables;
}

[[maybe_unused]] const bool registered = (register_gemm_tables({&kernels::load_table, &tables_in_force}), true);

}  // namespace octavo::ops::cuda

TORCH_LIBRARY_IMPL(octavo, CUDA, m) {
  namespace cuda = octavo::ops::cuda;
  m.impl("_mm", &cuda::mm);
  m.impl("_mm_into", &cuda::mm_into);
  m.impl("_tune_mm", &cuda::tune_mm);
}
