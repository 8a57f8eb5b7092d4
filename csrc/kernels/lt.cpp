// SPDX-License-Identifier: Apache-2.0
#include "lt.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "check.h"

namespace octavo::kernels {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Plain values, so that nothing needs destroying and a copy costs nothing.
struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t d;
  cublasLtMatmulAlgo_t algorithm;
};

struct ProductHash {
  size_t operator()(const Product& p) const {
    size_t hash = 0;
    for (const int64_t value : {p.m, p.n, p.k, p.ld, int64_t{p.a_type}, int64_t{p.b_type}, int64_t{p.d_type},
                                p.bias_type ? int64_t{*p.bias_type} : int64_t{-1},
                                int64_t{p.scaled} + 2 * int64_t{p.fast_accumulation} + 4 * int64_t{p.alignment}}) {
      hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Device {
  cublasLtHandle_t handle = nullptr;
  ComputeCapability capability;
  std::unordered_map<Product, Plan, ProductHash> plans;  // its elements never move, and none is ever removed
  std::unordered_map<cudaStream_t, void*> workspaces;
};

// A first use may fall into a graph capture, where allocating is refused unless this thread says that it means it.
class RelaxedCapture {
 public:
  RelaxedCapture() { OCTAVO_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::mutex& devices_mutex() {
  static std::mutex& mutex = *new std::mutex;  // outlives every thread that may still be multiplying at exit
  return mutex;
}

// The current device. Call with the mutex held.
Device& device_locked() {
  static std::map<int, Device>& devices = *new std::map<int, Device>;
  int number = 0;
  OCTAVO_CHECK(cudaGetDevice(&number));
  Device& device = devices[number];
  if (device.handle == nullptr) {
    const RelaxedCapture relaxed;
    ComputeCapability& capability = device.capability;
    OCTAVO_CHECK(cudaDeviceGetAttribute(&capability.major, cudaDevAttrComputeCapabilityMajor, number));
    OCTAVO_CHECK(cudaDeviceGetAttribute(&capability.minor, cudaDevAttrComputeCapabilityMinor, number));
    OCTAVO_CHECK(cublasLtCreate(&device.handle));
  }
  return device;
}

void* workspace_locked(Device& device, cudaStream_t stream) {
  void*& workspace = device.workspaces[stream];
  if (workspace == nullptr) {
    const RelaxedCapture relaxed;
    OCTAVO_CHECK(cudaMalloc(&workspace, kWorkspaceBytes));
  }
  return workspace;
}

template <typename Value>
void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  OCTAVO_CHECK(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
}

template <typename Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
  OCTAVO_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// cuBLASLt's matrices are column-major: our d[m, n] is its D[n, m], our b its A (transposed), our a its B.
void set_pointers(cublasLtMatmulDescOpaque_t& product, const Product& p, const ProductOperands& operands) {
  if (p.scaled) {
    set(product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scale_b);
    set(product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scale_a);
  }
  if (p.bias_type) set(product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
}

cublasLtMatmulPreferenceOpaque_t preference_for(const Product& p) {
  cublasLtMatmulPreferenceOpaque_t preference;
  OCTAVO_CHECK(cublasLtMatmulPreferenceInit(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // Sums split over k are put together in float32: the other schemes round in between.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  for (const auto matrix : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(preference, matrix, p.alignment);
  }
  return preference;
}

std::string in_words(const Product& p) {
  const auto type = [](cudaDataType_t t) -> std::string {
    switch (t) {
      case CUDA_R_8F_E4M3:
        return "E4M3";
      case CUDA_R_8F_E5M2:
        return "E5M2";
      case CUDA_R_16BF:
        return "bf16";
      case CUDA_R_16F:
        return "fp16";
      default:
        return "fp32";
    }
  };
  return type(p.a_type) + " [" + std::to_string(p.m) + ", " + std::to_string(p.k) + "] x " + type(p.b_type) + " [" +
         std::to_string(p.n) + ", " + std::to_string(p.k) + "]^T -> " + type(p.d_type) + " with rows of " +
         std::to_string(p.ld) + (p.bias_type ? ", " + type(*p.bias_type) + " bias" : "") +
         (p.fast_accumulation ? ", fast accumulation" : "") + ", aligned to " + std::to_string(p.alignment) + " bytes";
}

Plan make_plan(cublasLtHandle_t handle, const Product& p, const ProductOperands& operands) {
  Plan plan;
  OCTAVO_CHECK(cublasLtMatmulDescInit(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast_accumulation));
  if (p.bias_type) {
    set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, *p.bias_type);
  }
  set_pointers(plan.product, p, operands);
  const auto unsigned_m = static_cast<uint64_t>(p.m), unsigned_n = static_cast<uint64_t>(p.n),
             unsigned_k = static_cast<uint64_t>(p.k);
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&plan.a, p.b_type, unsigned_k, unsigned_n, p.k));
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&plan.b, p.a_type, unsigned_k, unsigned_m, p.k));
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&plan.d, p.d_type, unsigned_n, unsigned_m, p.ld));

  cublasLtMatmulPreferenceOpaque_t preference = preference_for(p);
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &plan.product, &plan.a, &plan.b, &plan.d,
                                                               &plan.d, &preference, 1, &found, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) {
    throw std::runtime_error("octavo: cuBLASLt has no algorithm for " + in_words(p));
  }
  OCTAVO_CHECK(status);
  plan.algorithm = found.algo;
  return plan;
}

const Plan& plan_locked(Device& device, const Product& p, const ProductOperands& operands) {
  const auto found = device.plans.find(p);
  if (found != device.plans.end()) return found->second;
  const RelaxedCapture relaxed;
  return device.plans.emplace(p, make_plan(device.handle, p, operands)).first->second;
}

}  // namespace

void multiply(const Product& product, const ProductOperands& operands, cudaStream_t stream) {
  std::unique_lock lock(devices_mutex());
  Device& device = device_locked();
  void* workspace = workspace_locked(device, stream);
  Plan plan = plan_locked(device, product, operands);  // a copy: the pointers are this call's own
  const cublasLtHandle_t handle = device.handle;
  lock.unlock();

  set_pointers(plan.product, product, operands);
  const float one = 1.0f, zero = 0.0f;
  const RelaxedCapture relaxed;  // the first call of a plan loads its kernel
  OCTAVO_CHECK(cublasLtMatmul(handle, &plan.product, &one, operands.b, &plan.a, operands.a, &plan.b, &zero, operands.d,
                              &plan.d, operands.d, &plan.d, &plan.algorithm, workspace, kWorkspaceBytes, stream));
}

ComputeCapability compute_capability() {
  const std::lock_guard lock(devices_mutex());
  return device_locked().capability;
}

}  // namespace octavo::kernels
