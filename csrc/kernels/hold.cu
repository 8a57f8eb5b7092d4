// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "check.h"
#include "hold.h"

namespace octavo::kernels {
namespace {

__device__ inline int64_t now() {
  int64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__global__ void hold_kernel(int64_t nanoseconds) {
  const int64_t begin = now();
  while (now() - begin < nanoseconds) {
  }
}

}  // namespace

void hold(int64_t nanoseconds, cudaStream_t stream) {
  hold_kernel<<<1, 1, 0, stream>>>(nanoseconds);
  OCTAVO_CHECK(cudaGetLastError());
}

}  // namespace octavo::kernels
