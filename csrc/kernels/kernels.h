// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels, seen from the host. Nothing here knows torch: pointers, sizes and a stream. All launches are
// asynchronous and capturable; errors of the CUDA runtime and of cuBLASLt throw std::runtime_error (check.h).
// Arithmetic: docs/numerics.md, bit for bit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../slot.h"

namespace octavo::kernels {

enum class DType : int32_t { kBF16, kFP16, kFP32 };
enum class Fp8 : int32_t { kE4M3, kE5M2 };

// A matrix of any strides (in elements; 0 and transposed ones too), read only.
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
};

// Where a quantisation takes its step from.
enum class StepSource : int32_t {
  kTaped,    // `taped->scale`, as it stands; one that is not finite and positive makes every byte 0x7f
  kAmax,     // policy's formula on `taped->amax`, which measure_amax left there
  kHistory,  // `taped->scale`, unless that is 0, the history being empty: then as kAmax
};

// The step's source, and the policy and operand that the formula is for.
struct StepRule {
  StepSource source = StepSource::kTaped;
  Operand operand = kX;
  ScalingPolicy policy;
};

// Writes a tape: amaxes 0, the slot's coordinates, and its steps where the slot is still of that generation, holds this
// policy and has a history, else 0.
void init_tape(Tape* tape, int32_t slot, int32_t generation, int32_t ring, const ScalingPolicy& policy,
               const ArenaView& arena, cudaStream_t stream);
// What backward begins with: g's step from the tape, amax 0.
void init_gradient(TapedOperand* gradient, const Tape* tape, cudaStream_t stream);

// taped->amax = max(taped->amax, largest finite |x|), taped->nonfinite |= any Inf or NaN. `taped` is zeroed before.
// With rule.source kHistory it returns at once on the device where there is a history.
void measure_amax(const Matrix& x, TapedOperand* taped, const StepRule& rule, cudaStream_t stream);

// One pass over x [rows, cols]: the row-major copy, the transposed copy, or both; zero bytes beyond the matrix up to
// padded_rows x padded_cols in the copies only; amax and non-finite flag accumulated into `taped` if `measure`;
// taped->scale set to the step used. column_sums: float32 partial sums of each column over fixed tiles of kSumRows
// rows, [ceil(rows / kSumRows), cols], in a fixed order whatever the strides.
struct Quantize {
  static constexpr int64_t kSumRows = 128;
  Matrix x;
  Fp8 format = Fp8::kE4M3;
  StepRule rule;
  TapedOperand* taped = nullptr;
  bool measure = true;
  int64_t padded_rows = 0;
  int64_t padded_cols = 0;
  uint8_t* row = nullptr;  // [padded_rows, padded_cols] or null
  uint8_t* col = nullptr;  // [padded_cols, padded_rows] or null
  float* column_sums = nullptr;
};
void quantize(const Quantize& q, cudaStream_t stream);

// out[cols] = the sum over tiles of partials[tiles, cols], in float64 and in order, rounded once to `dtype`.
void reduce_column_sums(const float* partials, int64_t tiles, int64_t cols, void* out, DType dtype,
                        cudaStream_t stream);

// Backward's record. Where tape's slot is still of its generation: if the slot holds another policy, its rings are
// emptied (seeded = due = cursor = 0, pending = 0) and policy and ring taken over; then pending = max(pending,
// amax) for x and w from the tape, and for g from `gradient` unless it is null or saw a non-finite element.
void record(const Tape* tape, const TapedOperand* gradient, const ScalingPolicy& policy, const ArenaView& arena,
            cudaStream_t stream);

// After an optimizer's step: every slot in use with owner == `owner` or owner 0 (all slots if `owner` is 0), each of
// its operands with pending > 0: the amax enters the ring (an empty ring is filled with it), pending = 0, and the
// built-in policies give the new scale; a custom one is marked due. Nothing happens where *found_inf != 0 (may be
// null).
void advance(const ArenaView& arena, int32_t owner, const float* found_inf, cudaStream_t stream);

// For custom policies. gather: amax[i, o, :] = the ring of slots[i], oldest first, [count, kOperands, history_len];
// due[i, o] = 1 where the slot holds `policy` and is due. apply: where due[i, o], a finite positive steps[i, o] becomes
// the scale (clamped to [2^-126, 2^126]), any other leaves the old one and adds 1 to *rejected; a slot that never had
// a scale takes the built-in formula then. due is cleared in the slot.
void gather_rings(const ArenaView& arena, const ScalingPolicy& policy, const int32_t* slots, int64_t count, float* amax,
                  int32_t* due, cudaStream_t stream);
void apply_steps(const ArenaView& arena, const ScalingPolicy& policy, const int32_t* slots, int64_t count,
                 const int32_t* due, const float* steps, int32_t* rejected, cudaStream_t stream);

// d[m, n] = (sum over k of a[m, k] * b[n, k]) * *scale_a * *scale_b + bias[n], one rounding to d's dtype.
// a [>= m, k] and b [>= n, k] are quantised copies, row-major without gaps, k a multiple of 16, both 16-byte aligned
// and with their rows padded to 16. d is row-major [m, n] without gaps. emulate: on 16-bit tensor cores, from the same
// bytes (always so for E5M2 x E5M2, and for devices without FP8 products).
struct Gemm {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const uint8_t* a = nullptr;
  const uint8_t* b = nullptr;
  Fp8 format_a = Fp8::kE4M3;
  Fp8 format_b = Fp8::kE4M3;
  const float* scale_a = nullptr;  // device
  const float* scale_b = nullptr;  // device
  const void* bias = nullptr;      // [n] or null
  DType bias_dtype = DType::kBF16;
  void* d = nullptr;
  DType d_dtype = DType::kBF16;
  bool fast_accumulation = false;
  bool emulate = false;
};

// Bytes of scratch that `gemm` needs beside the cuBLASLt workspace (operands decoded to 16 bits, an unrounded
// result); the caller brings them, 256-byte aligned.
int64_t gemm_scratch_bytes(const Gemm& g);
void gemm(const Gemm& g, void* scratch, cudaStream_t stream);

// Native, emulated or refused, for FP8 products on a device of this compute capability.
enum class Fp8Support : int32_t { kNative, kEmulated, kRefused };
Fp8Support fp8_support(int major, int minor);

}  // namespace octavo::kernels
