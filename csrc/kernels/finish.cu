// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include "check.h"
#include "dispatch.cuh"
#include "element.cuh"
#include "finish.h"
#include "matrix.h"
#include "rounding.cuh"

namespace octavo::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int64_t kBlocks = 4096;  // enough to fill any device; the rest is a loop

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// `added`: what d held, or null.
template <typename T, typename Bias>
__device__ inline T finished(float x, float scale_a, float scale_b, const Bias* bias, int64_t col, const T* added) {
  x = __fmul_rn(__fmul_rn(x, scale_a), scale_b);
  if (bias != nullptr) x = __fadd_rn(x, Element<Bias>::to_float(bias[col]));
  if (added != nullptr) x = __fadd_rn(x, Element<T>::to_float(*added));
  return Rounded<T>::from(x);
}

// Four columns a thread. `d` may be `accumulators`: each thread has read its four before it writes them.
template <typename T, typename Bias>
__global__ void __launch_bounds__(kThreads) finish_kernel(const Finish f) {
  const float scale_a = f.scale_a != nullptr ? *f.scale_a : 1.0f;
  const float scale_b = f.scale_b != nullptr ? *f.scale_b : 1.0f;
  const Bias* bias = static_cast<const Bias*>(f.bias);
  const int64_t per_row = (f.n + kPerThread - 1) / kPerThread;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < f.m * per_row; i += step) {
    const int64_t row = i / per_row, col = i % per_row * kPerThread;
    const float4 x = *reinterpret_cast<const float4*>(f.accumulators + row * f.ld + col);
    const float in[kPerThread] = {x.x, x.y, x.z, x.w};
    T* out = static_cast<T*>(f.d) + row * f.n + col;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (col + j < f.n) out[j] = finished<T>(in[j], scale_a, scale_b, bias, col + j, f.accumulate ? out + j : nullptr);
    }
  }
}

// float32 holds both formats exactly, and its upper half all of their bits.
template <Fp8 kFormat>
__device__ inline uint32_t decode_pair(uint32_t two_bytes) {
  const __half2 halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two_bytes), kInterpretation<kFormat>);
  const float2 x = __half22float2(halves);
  return __float_as_uint(x.x) >> 16 | (__float_as_uint(x.y) & 0xffff0000u);
}

template <Fp8 kFormat>
__global__ void __launch_bounds__(kThreads) decode_kernel(const uint4* bytes, int64_t words, uint4* bf16) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < words; i += step) {
    const uint4 in = bytes[i];
    const uint32_t part[4] = {in.x, in.y, in.z, in.w};
    uint32_t out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = decode_pair<kFormat>(part[j / 2] >> (j % 2 * 16) & 0xffffu);
    bf16[2 * i] = {out[0], out[1], out[2], out[3]};
    bf16[2 * i + 1] = {out[4], out[5], out[6], out[7]};
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(threads, kThreads), 1, kBlocks));
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

void finish(const Finish& f, cudaStream_t stream) {
  const unsigned blocks = blocks_for(f.m * ceil_div(f.n, kPerThread));
  dispatch(f.d_dtype, [&]<typename T>() {
    dispatch(f.bias_dtype, [&]<typename Bias>() { finish_kernel<T, Bias><<<blocks, kThreads, 0, stream>>>(f); });
  });
  OCTAVO_CHECK(cudaGetLastError());
}

void decode(const uint8_t* bytes, Fp8 format, int64_t count, uint16_t* bf16, cudaStream_t stream) {
  const int64_t words = count / 16;
  dispatch(format, [&]<Fp8 kFormat>() {
    decode_kernel<kFormat><<<blocks_for(words), kThreads, 0, stream>>>(reinterpret_cast<const uint4*>(bytes), words,
                                                                       reinterpret_cast<uint4*>(bf16));
  });
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
