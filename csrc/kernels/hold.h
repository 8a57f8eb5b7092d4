// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace octavo::kernels {

// Keeps the stream busy for that long, on a single thread, so that what is timed after it is enqueued before it starts.
void hold(int64_t nanoseconds, cudaStream_t stream);

}  // namespace octavo::kernels
