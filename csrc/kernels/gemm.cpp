// SPDX-License-Identifier: Apache-2.0
// FP8 products. Three ways, by what cuBLASLt offers:
//   straight into d, with the bias in cuBLASLt's epilogue;
//   through float32 accumulators, which `finish` crops, completes and rounds: ragged n, or a bias that the epilogue
//   does not take. Where d is float32, has the right shape and is not added to, they lie in d itself;
//   emulated: the bytes decoded to bf16, multiplied there, then finished as above.
// What d is to be added to is cuBLASLt's beta = 1 in the first, and an addition in `finish` in the others.
#include <cstdint>

#include "finish.h"
#include "kernels.h"
#include "lt.h"
#include "matrix.h"
#include "tune.h"

namespace octavo::kernels {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

uintptr_t bits(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::kBF16 ? CUDA_R_16BF : dtype == DType::kFP16 ? CUDA_R_16F : CUDA_R_32F;
}

cudaDataType_t cuda_type(Fp8 format) { return format == Fp8::kE4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

bool is_emulated(const Gemm& g) {
  if (g.emulate || (g.format_a == Fp8::kE5M2 && g.format_b == Fp8::kE5M2)) return true;
  const ComputeCapability device = compute_capability();
  return fp8_support(device.major, device.minor) != Fp8Support::kNative;
}

// bf16 bias for bf16 and float32 results, fp16 bias for fp16 ones.
bool epilogue_takes_bias(const Gemm& g) {
  const DType wanted = g.d_dtype == DType::kFP16 ? DType::kFP16 : DType::kBF16;
  return g.bias_dtype == wanted && bits(g.bias) % 16 == 0;
}

struct Way {
  bool emulated = false;
  bool bias_in_epilogue = false;
  bool finished = false;  // a pass over float32 accumulators follows
  bool into_d = false;    // cuBLASLt writes d
  int64_t columns = 0;    // that cuBLASLt computes: n, or n rounded up to what the padded rows of b allow
  // Scratch, in bytes, each part a multiple of 256.
  int64_t decoded_a = 0;
  int64_t decoded_b = 0;
  int64_t accumulators = 0;
};

Way way_for(const Gemm& g) {
  Way way;
  way.emulated = is_emulated(g);
  way.bias_in_epilogue = g.bias != nullptr && !way.emulated && epilogue_takes_bias(g);
  way.finished = way.emulated || (g.bias != nullptr && !way.bias_in_epilogue);
  const bool is_aligned = g.n * element_size(g.d_dtype) % 16 == 0 && bits(g.d) % 16 == 0;
  const bool is_float = g.d_dtype == DType::kFP32;
  // cuBLASLt rounds a product to 16 bits before it adds it to a 16-bit d: only float32 accumulates in place.
  way.into_d = is_aligned && (g.accumulate ? is_float && !way.finished : is_float || !way.finished);
  if (!way.into_d) {
    way.finished = true;
    way.bias_in_epilogue = false;
  }
  way.columns = way.into_d ? g.n : round_up(g.n, 16);
  if (way.emulated) {
    way.decoded_a = round_up(g.m * g.k * 2, 256);
    way.decoded_b = round_up(way.columns * g.k * 2, 256);
  }
  if (!way.into_d) way.accumulators = round_up(g.m * way.columns * 4, 256);
  return way;
}

// The product as cuBLASLt is to run it, its operands decoded where that has to be.
struct Prepared {
  Product product;
  ProductOperands operands;
};

Prepared prepare(const Gemm& g, const Way& way, void* scratch, cudaStream_t stream) {
  auto* const bytes = static_cast<uint8_t*>(scratch);
  const void *a = g.a, *b = g.b;
  if (way.emulated) {
    auto* const decoded_a = reinterpret_cast<uint16_t*>(bytes);
    auto* const decoded_b = reinterpret_cast<uint16_t*>(bytes + way.decoded_a);
    decode(g.a, g.format_a, g.m * g.k, decoded_a, stream);
    decode(g.b, g.format_b, way.columns * g.k, decoded_b, stream);
    a = decoded_a, b = decoded_b;
  }
  void* const d = way.into_d ? g.d : bytes + way.decoded_a + way.decoded_b;
  const uintptr_t all = bits(a) | bits(b) | bits(d);
  Product product = {.m = g.m, .n = way.columns, .k = g.k, .ld = way.columns};
  product.d_type = way.finished ? CUDA_R_32F : cuda_type(g.d_dtype);
  product.alignment = all % kTunedAlignment == 0 ? kTunedAlignment : 16;
  product.accumulate = way.into_d && g.accumulate;
  if (!way.emulated) {
    product.a_type = cuda_type(g.format_a);
    product.b_type = cuda_type(g.format_b);
    product.scaled = true;
    product.fast_accumulation = g.fast_accumulation;
  }
  if (way.bias_in_epilogue) product.bias_type = cuda_type(g.bias_dtype);
  return {product, {.a = a, .b = b, .scale_a = g.scale_a, .scale_b = g.scale_b, .bias = g.bias, .d = d}};
}

}  // namespace

int64_t gemm_scratch_bytes(const Gemm& g) {
  const Way way = way_for(g);
  return way.decoded_a + way.decoded_b + way.accumulators;
}

void gemm(const Gemm& g, void* scratch, cudaStream_t stream) {
  const Way way = way_for(g);
  const Prepared prepared = prepare(g, way, scratch, stream);
  multiply(prepared.product, prepared.operands, stream);
  if (!way.finished) return;
  finish({.m = g.m,
          .n = g.n,
          .ld = way.columns,
          .accumulators = static_cast<const float*>(prepared.operands.d),
          .scale_a = way.emulated ? g.scale_a : nullptr,
          .scale_b = way.emulated ? g.scale_b : nullptr,
          .bias = g.bias,
          .bias_dtype = g.bias_dtype,
          .d = g.d,
          .d_dtype = g.d_dtype,
          .accumulate = g.accumulate},
         stream);
}

Tuning tune(const Gemm& g, void* scratch, const TuneOptions& options, cudaStream_t stream) {
  const Prepared prepared = prepare(g, way_for(g), scratch, stream);
  return tune(prepared.product, prepared.operands, options, stream);
}

Fp8Support fp8_support(int major, int minor) {
  if ((major == 8 && minor == 9) || (major == 9 && minor == 0) || major == 10 || major == 12) {
    return Fp8Support::kNative;
  }
  return major == 8 ? Fp8Support::kEmulated : Fp8Support::kRefused;
}

}  // namespace octavo::kernels
