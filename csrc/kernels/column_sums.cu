// SPDX-License-Identifier: Apache-2.0
// The second half of a bias gradient: the tiles' partial sums (quantize.cuh) become one sum for each column.
#include <cstdint>

#include "check.h"
#include "dispatch.cuh"
#include "matrix.h"
#include "rounding.cuh"

namespace octavo::kernels {
namespace {

constexpr int kThreads = 64;  // few, so that a bias of some thousand elements still spreads over the device
constexpr int kUnroll = 16;   // loads in flight; the additions stay in order

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

template <typename T>
__global__ void __launch_bounds__(kThreads)
    reduce_column_sums_kernel(const float* partials, int64_t tiles, int64_t cols, T* out) {
  const int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (col >= cols) return;
  const float* from = partials + col;
  double sum = 0.0;
  int64_t tile = 0;
  for (; tile + kUnroll <= tiles; tile += kUnroll) {
    float part[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) part[u] = from[(tile + u) * cols];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += part[u];
  }
  for (; tile < tiles; ++tile) sum += from[tile * cols];
  out[col] = Rounded<T>::from(sum);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void reduce_column_sums(const float* partials, int64_t tiles, int64_t cols, void* out, DType dtype,
                        cudaStream_t stream) {
  if (cols == 0) return;
  dispatch(dtype, [&]<typename T>() {
    const unsigned blocks = static_cast<unsigned>(ceil_div(cols, kThreads));
    reduce_column_sums_kernel<T><<<blocks, kThreads, 0, stream>>>(partials, tiles, cols, static_cast<T*>(out));
  });
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
