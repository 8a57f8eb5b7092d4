// SPDX-License-Identifier: Apache-2.0
// The products on a GPU, and the tuning of their algorithms.
#include "cuda_gemm.h"

#include <ATen/Functions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../kernels/tables.h"
#include "../kernels/tune.h"
#include "checks.h"
#include "device.h"
#include "gemm_tables.h"
#include "primitives.h"

namespace octavo::ops::cuda {

using at::Tensor;

// Native, or emulated: because the device, the formats or the switch say so.
bool must_emulate(const Multiplication& x, c10::Device device) {
  const auto support = fp8_support(device);
  const bool both_e5m2 = x.a.type == at::kFloat8_e5m2 && x.b.type == at::kFloat8_e5m2;
  if (both_e5m2 && support == Fp8Support::kNative) {
    TORCH_WARN_ONCE(
        "octavo: FP8 tensor cores do not multiply E5M2 by E5M2; such products run on 16-bit tensor cores "
        "from the same bytes, no faster than bf16 (fp8_format=\"hybrid\" avoids them)");
  }
  return support == Fp8Support::kEmulated || both_e5m2 || is_emulated();
}

kernels::Gemm gemm_of(const Multiplication& x, const Tensor& d) {
  kernels::Gemm g;
  g.m = x.m;
  g.n = x.n;
  g.k = x.k;
  g.a = x.a.codes;
  g.b = x.b.codes;
  g.format_a = fp8_of(x.a.type);
  g.format_b = fp8_of(x.b.type);
  g.scale_a = x.a.step;
  g.scale_b = x.b.step;
  if (x.bias.defined()) {
    g.bias = x.bias.const_data_ptr();
    g.bias_dtype = dtype_of(x.bias.scalar_type());
  }
  g.d = d.mutable_data_ptr();
  g.d_dtype = dtype_of(d.scalar_type());
  g.fast_accumulation = x.fast;
  g.accumulate = x.accumulate;
  g.emulate = must_emulate(x, d.device());
  return g;
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

void multiply(const Multiplication& x, const Tensor& d) {
  const auto g = gemm_of(x, d);
  const Scratch scratch(g, d.device());
  kernels::gemm(g, scratch.get(), stream_of(d));
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

Multiplication multiplication_of(const Tensor& a, const Tensor& b, const Scale& scale_a, const Scale& scale_b,
                                 int64_t m, int64_t n, bool fast) {
  const auto factor = [](const Tensor& codes, const Scale& scale) {
    return Factor{static_cast<const uint8_t*>(codes.const_data_ptr()), codes.scalar_type(), scale.get()};
  };
  return {.a = factor(a, scale_a), .b = factor(b, scale_b), .m = m, .n = n, .k = a.size(1), .fast = fast};
}

Tensor mm(const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b,
          int64_t word_b, const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype,
          bool fast_accumulation) {
  const c10::cuda::CUDAGuard guard(a.device());
  auto d = empty({m, n}, out_dtype, a.device());
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto x = multiplication_of(a, b, on_a, on_b, m, n, fast_accumulation);
  if (bias) x.bias = bias->contiguous();
  multiply(x, d);
  return d;
}

void mm_into(const Tensor& d, const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a,
             const Tensor& scale_b, int64_t word_b, bool fast_accumulation) {
  check_sum(d);
  const c10::cuda::CUDAGuard guard(a.device());
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto x = multiplication_of(a, b, on_a, on_b, d.size(0), d.size(1), fast_accumulation);
  x.accumulate = true;
  multiply(x, d);
}

std::tuple<Tensor, std::vector<std::string>, std::vector<int64_t>> tune_mm(
    const Tensor& a, const Tensor& b, const Tensor& scale_a, int64_t word_a, const Tensor& scale_b, int64_t word_b,
    const std::optional<Tensor>& bias, int64_t m, int64_t n, at::ScalarType out_dtype, bool fast_accumulation,
    bool accumulate, bool exhaustive) {
  const c10::cuda::CUDAGuard guard(a.device());
  const auto d = empty({m, n}, out_dtype, a.device());
  const Scale on_a(scale_a, word_a), on_b(scale_b, word_b);
  auto x = multiplication_of(a, b, on_a, on_b, m, n, fast_accumulation);
  if (bias) x.bias = bias->contiguous();
  x.accumulate = accumulate;
  const auto g = gemm_of(x, d);
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
