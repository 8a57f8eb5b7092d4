// SPDX-License-Identifier: Apache-2.0
// Errors of the CUDA runtime and of cuBLASLt become exceptions that name the call.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace octavo::kernels {

[[noreturn]] inline void throw_failed(const char* call, const char* name, const char* text, const char* file,
                                      int line) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + " failed: " + name + " (" +
                           text + ")");
}

inline void check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  // Fetching it also clears an error that is not sticky, so that the next, innocent launch does not report it again.
  static_cast<void>(cudaGetLastError());
  throw_failed(call, cudaGetErrorName(status), cudaGetErrorString(status), file, line);
}

inline void check(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_failed(call, cublasLtGetStatusName(status), cublasLtGetStatusString(status), file, line);
}

}  // namespace octavo::kernels

// Around every call of the two libraries; after a launch: OCTAVO_CHECK(cudaGetLastError()).
#define OCTAVO_CHECK(call) ::octavo::kernels::check((call), #call, __FILE__, __LINE__)
