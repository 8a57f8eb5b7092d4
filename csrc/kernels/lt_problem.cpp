// SPDX-License-Identifier: Apache-2.0
#include "lt_problem.h"

#include "check.h"

namespace octavo::kernels {
namespace {

template <typename Value>
void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  OCTAVO_CHECK(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
}

template <typename Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const Value& value) {
  OCTAVO_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
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

}  // namespace

Problem problem_of(const Product& p, const ProductOperands& operands) {
  Problem problem;
  OCTAVO_CHECK(cublasLtMatmulDescInit(&problem.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  set(problem.product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(problem.product, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(problem.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(p.fast_accumulation));
  if (p.bias_type) {
    set(problem.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(problem.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, *p.bias_type);
  }
  set_pointers(problem, p, operands);
  const auto unsigned_m = static_cast<uint64_t>(p.m), unsigned_n = static_cast<uint64_t>(p.n),
             unsigned_k = static_cast<uint64_t>(p.k);
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&problem.a, p.b_type, unsigned_k, unsigned_n, p.k));
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&problem.b, p.a_type, unsigned_k, unsigned_m, p.k));
  OCTAVO_CHECK(cublasLtMatrixLayoutInit(&problem.d, p.d_type, unsigned_n, unsigned_m, p.ld));
  return problem;
}

void set_pointers(Problem& problem, const Product& p, const ProductOperands& operands) {
  if (p.scaled) {
    set(problem.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.scale_b);
    set(problem.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.scale_a);
  }
  if (p.bias_type) set(problem.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
}

std::vector<cublasLtMatmulHeuristicResult_t> ask_heuristic(cublasLtHandle_t handle, Problem problem,
                                                           const Product& product, int count) {
  cublasLtMatmulPreferenceOpaque_t preference = preference_for(product);
  std::vector<cublasLtMatmulHeuristicResult_t> found(count);
  int written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, &problem.product, &problem.a, &problem.b, &problem.d, &problem.d,
                                     &preference, count, found.data(), &written);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  OCTAVO_CHECK(status);
  found.resize(written);
  std::erase_if(found, [](const auto& result) { return result.state != CUBLAS_STATUS_SUCCESS; });
  return found;
}

cublasStatus_t run(cublasLtHandle_t handle, Problem problem, const Product& product, const ProductOperands& operands,
                   const cublasLtMatmulAlgo_t& algorithm, void* workspace, cudaStream_t stream) {
  const float one = 1.0f, beta = product.accumulate ? 1.0f : 0.0f;
  return cublasLtMatmul(handle, &problem.product, &one, operands.b, &problem.a, operands.a, &problem.b, &beta,
                        operands.d, &problem.d, operands.d, &problem.d, &algorithm, workspace, kWorkspaceBytes, stream);
}

const char* name_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8F_E4M3:
      return "e4m3";
    case CUDA_R_8F_E5M2:
      return "e5m2";
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_16F:
      return "fp16";
    default:
      return "fp32";
  }
}

size_t size_of(cudaDataType_t type) {
  const bool is_fp8 = type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2;
  return is_fp8 ? 1 : type == CUDA_R_32F ? 4 : 2;
}

std::string in_words(const Product& p) {
  const auto matrix = [&](cudaDataType_t type, int64_t rows) {
    return std::string(name_of(type)) + " [" + std::to_string(rows) + ", " + std::to_string(p.k) + "]";
  };
  return matrix(p.a_type, p.m) + " x " + matrix(p.b_type, p.n) + "^T -> " + name_of(p.d_type) + " with rows of " +
         std::to_string(p.ld) + (p.bias_type ? std::string(", ") + name_of(*p.bias_type) + " bias" : "") +
         (p.fast_accumulation ? ", fast accumulation" : "") + (p.accumulate ? ", added to d" : "") + ", aligned to " +
         std::to_string(p.alignment) + " bytes";
}

}  // namespace octavo::kernels
