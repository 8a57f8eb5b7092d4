// SPDX-License-Identifier: Apache-2.0
// Memory for the arena on a GPU: straight from the driver, outside PyTorch's caching allocator and so outside every
// CUDA graph's pool.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>

#include "../arena.h"

namespace octavo::ops {
namespace {

void* allocate(std::size_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&memory, bytes));
  // On the default stream and waited for: other streams may use the chunk at once. Once a chunk, never in a capture.
  C10_CUDA_CHECK(cudaMemset(memory, 0, bytes));
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}

void* allocate_shared(std::size_t bytes, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  void* memory = nullptr;
  C10_CUDA_CHECK(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  std::memset(memory, 0, bytes);
  return memory;
}

uint64_t capture_on(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &number));
  return status == cudaStreamCaptureStatusNone ? 0 : number + 1;
}

uint64_t capture(c10::Device device) { return capture_on(c10::cuda::getCurrentCUDAStream(device.index())); }

void join(uint64_t stream, c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream other(c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream)));
  if (capture_on(other)) return;  // what it has now will run when it is replayed
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  C10_CUDA_CHECK(cudaEventRecord(event, other));
  C10_CUDA_CHECK(cudaStreamWaitEvent(c10::cuda::getCurrentCUDAStream(device.index()), event));
  C10_CUDA_CHECK(cudaEventDestroy(event));
}

uint64_t stream(c10::Device device) {
  return static_cast<uint64_t>(c10::cuda::getCurrentCUDAStream(device.index()).id());
}

[[maybe_unused]] const bool registered = [] {
  register_device_memory(c10::kCUDA, {&allocate, &allocate_shared, &capture, &stream, &join});
  return true;
}();

}  // namespace
}  // namespace octavo::ops
