// SPDX-License-Identifier: Apache-2.0
// Device code of the quantise kernel: one tile of 128 x 128 elements, in the order in which it is worked.
//
// Note [Tile]. 256 threads. Thread (warp w, lane l) owns the 8 x 8 block at row 16 w + 8 (l / 16), column 8 (l % 16):
// a warp's loads and its stores of the row copy cover whole 128-byte lines. Blocks are transposed in registers, then
// meet in shared memory, laid out [column][row], from where a column of the tile leaves as 128 contiguous bytes.
// There the 16-byte words of a column are permuted (`tile_offset`), so that neither side meets a bank twice.
#pragma once

#include <cstdint>

#include "element.cuh"
#include "kernels.h"
#include "step.cuh"

namespace octavo::kernels {

constexpr int kTile = kPeakTile;
constexpr int kThreads = 256;
constexpr int kBlock = 8;
constexpr int kGroups = kTile / kBlock;
static_assert(Quantize::kSumRows == kTile);

struct QuantizeArgs {
  const void* x;
  int64_t rows, cols, row_stride, col_stride;
  int64_t padded_rows, padded_cols;
  uint8_t* row;
  uint8_t* col;
  float* column_sums;
  const float* given;
  Tape::Operand* own;
  float* used;
  const Peak* measured;
  Peak* peaks;
  int32_t measured_count;
  Operand operand;
  StepSource source;
  Fp8 format;
  uint32_t tiles;
  uint32_t tiles_across;
  bool aligned;      // x can be read in 16-byte words, and its columns come in eights
  bool row_aligned;  // the row copy can be written 8 bytes at a time
  bool col_aligned;  // the transposed copy can be written 16 bytes at a time
  bool backwards;    // last tile first
};

// The tiles of the first, then those of the second; unused ones have no tiles.
struct QuantizeLaunch {
  QuantizeArgs args[2];
  Forward forward;
  ScalingPolicy policy;
};

template <bool kSums>
struct QuantizeShared {
  alignas(16) uint8_t tile[kTile * kTile];
  alignas(16) float sums[kSums ? kGroups / 2 : 1][kTile];  // one partial sum for each 16 rows
  float step;
  float inv_scale;
  uint32_t amax_bits;
  int32_t nonfinite;
};

// A thread's block of FP8 bytes: row i is low[i] (columns 0 to 3) and high[i] (columns 4 to 7).
struct ByteBlock {
  uint32_t low[kBlock];
  uint32_t high[kBlock];
};

struct Corner {
  int64_t row;
  int64_t col;
};

__device__ inline int block_row() { return static_cast<int>(threadIdx.x / 16) * kBlock; }
__device__ inline int block_col() { return static_cast<int>(threadIdx.x % 16) * kBlock; }

// The first warp finds the step, the others wait for it with their loads under way. Where `used` is `given`, others may
// read it before or after it is written: the step is the same.
template <bool kSums>
__device__ inline void prepare(const QuantizeLaunch& launch, const QuantizeArgs& p, bool is_first_tile,
                               QuantizeShared<kSums>& s) {
  if (blockIdx.x == 0 && p.source == StepSource::kSlot) write_tape<false>(launch.forward);
  if (threadIdx.x >= kWarp) return;
  float step;
  if (p.source == StepSource::kSlot) {
    step = step_of_slot(launch.forward, p.operand);
    if (step == 0.0f) step = __uint_as_float(0x7fffffffu);
  } else {
    // One reading of it for the warp.
    step = __shfl_sync(0xffffffffu, p.source == StepSource::kTape ? p.own->scale : *p.given, 0);
    if (p.source == StepSource::kHistory && step == 0.0f) {
      step = step_from_amax(largest_peak(p.measured, p.measured_count), launch.policy, p.operand);
    }
  }
  if (threadIdx.x != 0) return;
  const bool is_known = p.source != StepSource::kTape || step != 0.0f;
  if (is_first_tile && p.used != nullptr && is_known) *p.used = step;
  s.step = step;
  s.inv_scale = __fdiv_rn(1.0f, step);
  s.amax_bits = 0;
  s.nonfinite = 0;
}

// Finite values and a usable step: nothing to decide.
template <typename T, Fp8 kFormat, bool kSums>
__device__ inline void cast_block(const Vector<T, kBlock> (&x)[kBlock], QuantizeShared<kSums>& s, ByteBlock& bytes) {
  const float inv_scale = s.inv_scale;
  [[maybe_unused]] float sums[kBlock] = {};
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float2 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = Element<T>::pair(x[i].words, j);
      if constexpr (kSums) {
        sums[2 * j] = __fadd_rn(sums[2 * j], v[j].x);
        sums[2 * j + 1] = __fadd_rn(sums[2 * j + 1], v[j].y);
      }
      v[j] = {__fmul_rn(v[j].x, inv_scale), __fmul_rn(v[j].y, inv_scale)};
    }
    bytes.low[i] = cast4<kFormat>(v[0], v[1]);
    bytes.high[i] = cast4<kFormat>(v[2], v[3]);
  }
  if constexpr (kSums) {  // the other half of the warp has the next 8 rows of the same columns
#pragma unroll
    for (int j = 0; j < kBlock; ++j) sums[j] = __fadd_rn(sums[j], __shfl_xor_sync(0xffffffffu, sums[j], 16));
    if (threadIdx.x % kWarp < 16) {
      float4* out = reinterpret_cast<float4*>(&s.sums[block_row() / (2 * kBlock)][block_col()]);
      out[0] = {sums[0], sums[1], sums[2], sums[3]};
      out[1] = {sums[4], sums[5], sums[6], sums[7]};
    }
  }
}

// Any strides, any values, any step, ragged edges: element by element, a thread down half a column of the tile, the
// bytes through shared memory. The sums are taken in the same order as in cast_block.
template <typename T, Fp8 kFormat, bool kSums>
__device__ inline Seen cast_elements(const QuantizeArgs& p, Corner tile, QuantizeShared<kSums>& s) {
  const int local_col = threadIdx.x % kTile;
  const int first_row = static_cast<int>(threadIdx.x / kTile) * (kTile / 2);
  const int64_t col = tile.col + local_col;
  const float inv_scale = s.inv_scale;
  const bool valid = is_valid_step(s.step);
  const T* x = static_cast<const T*>(p.x) + col * p.col_stride;
  Seen seen;
  [[maybe_unused]] float before = 0.0f;  // the sum of the 8 rows before these
#pragma unroll 1
  for (int local_row = first_row; local_row < first_row + kTile / 2; local_row += kBlock) {
    float v[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const int64_t row = tile.row + local_row + i;
      v[i] = row < p.rows && col < p.cols ? Element<T>::to_float(x[row * p.row_stride]) : 0.0f;
    }
    [[maybe_unused]] float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const bool inside = tile.row + local_row + i < p.rows && col < p.cols;
      const uint8_t byte = valid ? cast_any<kFormat>(v[i], inv_scale) : 0x7f;
      s.tile[(local_row + i) * kTile + local_col] = inside ? byte : 0;
      seen.meet(v[i]);
      if constexpr (kSums) sum = __fadd_rn(sum, v[i]);
    }
    if constexpr (kSums) {
      if (local_row / kBlock % 2 != 0) s.sums[local_row / (2 * kBlock)][local_col] = __fadd_rn(before, sum);
      before = sum;
    }
  }
  return seen;
}

// What cast_elements left in shared memory, as blocks. The tile is free again afterwards.
__device__ inline void collect_block(const uint8_t* tile, ByteBlock& bytes) {
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    const uint2 row = *reinterpret_cast<const uint2*>(tile + (block_row() + i) * kTile + block_col());
    bytes.low[i] = row.x, bytes.high[i] = row.y;
  }
  __syncthreads();
}

__device__ inline void store_rows(const QuantizeArgs& p, Corner tile, const ByteBlock& bytes) {
  const int64_t first_row = tile.row + block_row();
  const int64_t col = tile.col + block_col();
  if (col >= p.padded_cols) return;
  uint8_t* out = p.row + first_row * p.padded_cols + col;
  if (p.row_aligned) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i, out += p.padded_cols) {
      if (first_row + i < p.padded_rows) *reinterpret_cast<uint2*>(out) = {bytes.low[i], bytes.high[i]};
    }
    return;
  }
  const int columns = static_cast<int>(min(p.padded_cols - col, int64_t{kBlock}));
#pragma unroll
  for (int i = 0; i < kBlock; ++i, out += p.padded_cols) {
    if (first_row + i >= p.padded_rows) return;
    uint64_t rest = bytes.low[i] | static_cast<uint64_t>(bytes.high[i]) << 32;
#pragma unroll 1
    for (int j = 0; j < columns; ++j, rest >>= 8) out[j] = static_cast<uint8_t>(rest);
  }
}

// Where the byte of a local column and row lies: 16-byte words are permuted within their column, and in the right half
// of the tile the two halves of each word change places. Each half warp of store_transposed_block then writes 16
// different 8-byte banks, and each 8 lanes of store_columns read 8 different 16-byte ones.
__device__ inline int tile_offset(int col, int row) {
  const int word = (row / 16) ^ (col / 8 % 8);
  return col * kTile + word * 16 + ((row % 16) ^ (col / 64 * 8));
}

__device__ inline void store_transposed_block(uint8_t* tile, ByteBlock& b) {
  transpose_4x4(b.low[0], b.low[1], b.low[2], b.low[3]);
  transpose_4x4(b.low[4], b.low[5], b.low[6], b.low[7]);
  transpose_4x4(b.high[0], b.high[1], b.high[2], b.high[3]);
  transpose_4x4(b.high[4], b.high[5], b.high[6], b.high[7]);
  // The permutation is the same for the eight columns of a block.
  uint8_t* out = tile + tile_offset(block_col(), block_row());
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<uint2*>(out + j * kTile) = {b.low[j], b.low[j + 4]};
    *reinterpret_cast<uint2*>(out + (j + 4) * kTile) = {b.high[j], b.high[j + 4]};
  }
}

__device__ inline void store_columns(const QuantizeArgs& p, Corner tile, const uint8_t* bytes) {
  if (!p.col_aligned) {
#pragma unroll 1
    for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
      const int64_t col = tile.col + i / kTile, row = tile.row + i % kTile;
      if (col >= p.padded_cols) return;
      if (row < p.padded_rows) p.col[col * p.padded_rows + row] = bytes[tile_offset(i / kTile, i % kTile)];
    }
    return;
  }
  const int local_row = static_cast<int>(threadIdx.x % 8) * 16;
  if (tile.row + local_row >= p.padded_rows) return;
#pragma unroll
  for (int i = 0; i < kTile; i += kThreads / 8) {
    const int local_col = static_cast<int>(threadIdx.x / 8) + i;
    const int64_t col = tile.col + local_col;
    if (col >= p.padded_cols) return;
    uint4 word = *reinterpret_cast<const uint4*>(bytes + (tile_offset(local_col, local_row) & ~15));
    if (local_col >= kTile / 2) word = {word.z, word.w, word.x, word.y};
    *reinterpret_cast<uint4*>(p.col + col * p.padded_rows + tile.row + local_row) = word;
  }
}

// The sum of a column of the tile: a tree over its groups of rows. With the 8 rows of a group one after the other, no
// element meets more than 11 roundings.
__device__ inline void store_column_sum(const QuantizeArgs& p, Corner tile, float (&sums)[kGroups / 2][kTile]) {
  const int64_t col = tile.col + threadIdx.x;
  if (threadIdx.x >= kTile || col >= p.cols || tile.row >= p.rows) return;
  constexpr int kParts = kGroups / 2;
  float part[kParts];
#pragma unroll
  for (int g = 0; g < kParts; ++g) part[g] = sums[g][threadIdx.x];
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
#pragma unroll
    for (int g = 0; g < kParts; g += 2 * step) part[g] = __fadd_rn(part[g], part[g + step]);
  }
  p.column_sums[tile.row / kTile * p.cols + col] = part[0];
}

}  // namespace octavo::kernels
