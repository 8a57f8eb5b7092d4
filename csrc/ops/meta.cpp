// SPDX-License-Identifier: Apache-2.0
// Shapes and types alone, of the public ops, on symbolic sizes.
#include <ATen/Functions.h>
#include <torch/library.h>

#include "checks.h"

namespace octavo::ops::meta {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The dispatcher comes here if *any* tensor is on meta: a real one beside it would get a result without contents.
void check_meta(const char* op, std::initializer_list<std::pair<const char*, const Tensor*>> operands) {
  for (const auto& [name, tensor] : operands)
    TORCH_CHECK(tensor->is_meta(), op, ": ", name, " is on ", tensor->device(),
                " and others on meta; bring all to one");
}

Tensor scalar(const Tensor& like) { return at::empty({}, like.options().dtype(at::kFloat)); }

Tensor contiguous_like(const Tensor& like, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  return at::empty_symint(sizes, like.options().dtype(dtype));
}

std::tuple<Tensor, Tensor> quantize(const Tensor& x, const Tensor&, at::ScalarType dtype) {
  check_meta("quantize", {{"x", &x}});
  check_high("quantize", "x", x);
  check_fp8_type("quantize", "dtype", dtype);
  return {contiguous_like(x, x.sym_sizes(), dtype), scalar(x)};
}

Tensor mm_fp8(const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b, const OptionalTensor&,
              at::ScalarType out_dtype, const OptionalTensor& out_scale, bool) {
  check_meta("mm_fp8", {{"a", &a}, {"b", &b}});
  check_mm("mm_fp8", a, b, scale_a, scale_b, out_dtype, out_scale);
  return contiguous_like(a, {a.sym_size(0), b.sym_size(0)}, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor> linear_forward_fp8(const Tensor& x, const Tensor& w, const OptionalTensor&,
                                                      const Tensor&, const Tensor&, at::ScalarType) {
  check_meta("linear_forward_fp8", {{"x", &x}, {"w", &w}});
  TORCH_CHECK(x.dim() >= 1 && w.dim() == 2, "linear_forward_fp8: x must have 1 or more dimensions and w 2, not ",
              x.dim(), " and ", w.dim());
  auto sizes = x.sym_sizes().vec();
  sizes.back() = w.sym_size(0);
  return {contiguous_like(x, sizes, x.scalar_type()), scalar(x), scalar(x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_fp8(const Tensor& g, const Tensor& x, const Tensor& w,
                                                               std::array<bool, 3> masks, const Tensor&, const Tensor&,
                                                               const Tensor&, at::ScalarType, at::ScalarType) {
  check_meta("linear_backward_fp8", {{"g", &g}, {"x", &x}, {"w", &w}});
  TORCH_CHECK(w.dim() == 2, "linear_backward_fp8: w must have 2 dimensions, not ", w.dim());
  const auto dtype = g.scalar_type();
  return {masks[0] ? contiguous_like(g, x.sym_sizes(), dtype) : Tensor(),
          masks[1] ? contiguous_like(g, w.sym_sizes(), dtype) : Tensor(),
          masks[2] ? contiguous_like(g, {w.sym_size(0)}, dtype) : Tensor(), scalar(g)};
}

}  // namespace octavo::ops::meta

TORCH_LIBRARY_IMPL(octavo, Meta, m) {
  namespace meta = octavo::ops::meta;
  m.impl("quantize", &meta::quantize);
  m.impl("mm_fp8", &meta::mm_fp8);
  m.impl("linear_forward_fp8", &meta::linear_forward_fp8);
  m.impl("linear_backward_fp8", &meta::linear_backward_fp8);
}
