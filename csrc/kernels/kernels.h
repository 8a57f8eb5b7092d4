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

// The slot of a forward, as the host knows it, and the tape to begin. slot < 0: stateless.
struct Forward {
  const Slot* place = nullptr;  // where the arena has that slot
  int32_t slot = -1;
  int32_t generation = 0;
  int32_t ring = 0;
  int32_t policy = 0;   // the id of it
  int32_t x_peaks = 0;  // room on the tape
  int32_t w_peaks = 0;
  Tape* tape = nullptr;
  const Tape* x_tape = nullptr;  // of an earlier forward whose copies of x are used: its step and peaks are taken over
  const Tape* w_tape = nullptr;  // the same of w
};
// The tape alone, where nothing is measured or quantised.
void begin_tape(const Forward& forward, cudaStream_t stream);

// One tensor whose amax is wanted.
struct Measure {
  static constexpr int32_t kMaxPeaks = 256;
  Matrix x;
  Operand operand = kX;
  const float* known = nullptr;  // device; where *known is not 0 the amax is needless
  Peak* peaks = nullptr;         // [peaks_of(x)], each block of the kernel its own
};
int32_t peaks_of(const Measure& m);

// In one launch: the peaks of one or two tensors. With a `forward`, its tape is begun, and the amax is needless where
// the slot has a step for the operand. Where it is needless the blocks return at once on the device, with peaks of 0.
void measure_amax(const Measure* all, int count, const Forward* forward, cudaStream_t stream);

// Where a quantisation takes its step from.
enum class StepSource : int32_t {
  kGiven,    // *given, as it stands; one that is not finite and positive makes every byte 0x7f
  kHistory,  // *given, unless that is 0, the history being empty: then the policy's formula on `measured`
  kSlot,     // the slot of the forward, whose tape is begun by the way; NaN where that has no step
  kTape,  // own->scale, unless that is 0, the history being empty: then the blocks find the amax and the last of them
          // casts all of it. For histories that are nearly always there: right without one, but slow
};

// One pass over x [rows, cols]: the row-major copy, the transposed copy, or both; zero bytes beyond the matrix up to
// padded_rows x padded_cols in the copies only; the peaks, one a tile. column_sums: float32 partial sums of each column
// over fixed tiles of kSumRows rows, [ceil(rows / kSumRows), cols], in a fixed order whatever the strides.
struct Quantize {
  static constexpr int64_t kSumRows = 128;
  Matrix x;
  Fp8 format = Fp8::kE4M3;
  Operand operand = kX;
  StepSource source = StepSource::kGiven;
  const float* given = nullptr;
  Tape::Operand* own = nullptr;    // kTape's
  float* used = nullptr;           // where the step goes, or null; may be `given`, or own->scale
  const Peak* measured = nullptr;  // kHistory: what measure_amax left, and how many
  int32_t measured_count = 0;
  int64_t padded_rows = 0;
  int64_t padded_cols = 0;
  uint8_t* row = nullptr;  // [padded_rows, padded_cols] or null
  uint8_t* col = nullptr;  // [padded_cols, padded_rows] or null
  Peak* peaks = nullptr;   // [tiles_of(q)] or null
  float* column_sums = nullptr;
};
int32_t tiles_of(const Quantize& q);
// One or two of them, in one launch where they have one dtype. `forward` is needed for kSlot, `policy` for kHistory.
void quantize(const Quantize* all, int count, const ScalingPolicy& policy, const Forward* forward, cudaStream_t stream);

// *amax = the largest of the peaks.
void reduce_peaks(const Peak* peaks, int32_t count, float* amax, cudaStream_t stream);

// What ends the quantisation of a backward, in one launch. Each half is left out where its pointers are null.
// Record: where tape's slot is still of its generation: if the slot holds another policy, its rings are emptied
// (seeded = due = cursor = 0, pending = 0) and policy and ring taken over; then pending = max(pending, amax) for x and
// w from the tape, and for g from its peaks unless one of them is non-finite.
// Column sums: sums[cols] = the sum over tiles of partial_sums[tiles, cols], in float64 and in a fixed order, rounded
// once to `dtype`.
struct EndOfBackward {
  const Tape* tape = nullptr;
  const Peak* g_peaks = nullptr;
  int32_t g_count = 0;
  ScalingPolicy policy;
  ArenaView arena;
  const float* partial_sums = nullptr;
  int64_t tiles = 0;
  int64_t cols = 0;
  void* sums = nullptr;
  DType sums_dtype = DType::kBF16;
};
void end_backward(const EndOfBackward& end, cudaStream_t stream);

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

// d[m, n] = (sum over k of a[m, k] * b[n, k]) * *scale_a * *scale_b + bias[n], one rounding to d's dtype. accumulate:
// what d holds is added, in float32, before that rounding.
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
  const float* scale_a = nullptr;  // device, 16-byte aligned
  const float* scale_b = nullptr;  // likewise
  const void* bias = nullptr;      // [n] or null
  DType bias_dtype = DType::kBF16;
  void* d = nullptr;
  DType d_dtype = DType::kBF16;
  bool fast_accumulation = false;
  bool accumulate = false;
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
