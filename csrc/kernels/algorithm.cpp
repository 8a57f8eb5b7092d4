// SPDX-License-Identifier: Apache-2.0
#include "algorithm.h"

namespace octavo::kernels {
namespace {

// Calls `use(attribute, member)` for every attribute but the id, which is never set.
template <typename Use>
void for_each_attribute(Use&& use) {
  use(CUBLASLT_ALGO_CONFIG_TILE_ID, &Algorithm::tile);
  use(CUBLASLT_ALGO_CONFIG_STAGES_ID, &Algorithm::stages);
  use(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &Algorithm::split_k);
  use(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &Algorithm::reduction);
  use(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, &Algorithm::swizzle);
  use(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &Algorithm::custom);
  use(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, &Algorithm::inner_shape);
  use(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &Algorithm::cluster_shape);
}

// Leaves `value` as it is where this algorithm has no such attribute.
template <typename Value>
void get(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, Value& value) {
  Value read{};
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &read, sizeof read, &written);
  if (status == CUBLAS_STATUS_SUCCESS) value = read;  // of any other size it is an error
}

}  // namespace

Algorithm configuration_of(const cublasLtMatmulAlgo_t& algorithm) {
  Algorithm configuration;
  get(algorithm, CUBLASLT_ALGO_CONFIG_ID, configuration.id);
  for_each_attribute([&](auto attribute, auto member) { get(algorithm, attribute, configuration.*member); });
  return configuration;
}

bool sums_in_float32(const Algorithm& algorithm) {
  return algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_NONE ||
         algorithm.reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

cublasStatus_t initial(cublasLtHandle_t handle, const Product& p, int id, cublasLtMatmulAlgo_t& algorithm) {
  algorithm = {};
  return cublasLtMatmulAlgoInit(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, p.b_type, p.a_type, p.d_type, p.d_type, id,
                                &algorithm);
}

Rebuilt rebuild(cublasLtHandle_t handle, const Product& product, Problem problem, const Algorithm& wanted) {
  Rebuilt rebuilt{};
  const auto refuse = [&](const char* call, cublasStatus_t status) {
    rebuilt.refused = std::string(call) + " said " + cublasLtGetStatusName(status);
    return rebuilt;
  };
  cublasStatus_t status = initial(handle, product, wanted.id, rebuilt.algorithm);
  if (status != CUBLAS_STATUS_SUCCESS) return refuse("cublasLtMatmulAlgoInit", status);
  const Algorithm has = configuration_of(rebuilt.algorithm);
  for_each_attribute([&](auto attribute, auto member) {
    // What it has already is not set: an algorithm without the attribute would refuse even the default.
    const auto& value = wanted.*member;
    if (status != CUBLAS_STATUS_SUCCESS || value == has.*member) return;
    status = cublasLtMatmulAlgoConfigSetAttribute(&rebuilt.algorithm, attribute, &value, sizeof value);
  });
  if (status != CUBLAS_STATUS_SUCCESS) return refuse("cublasLtMatmulAlgoConfigSetAttribute", status);
  cublasLtMatmulHeuristicResult_t result{};
  status = cublasLtMatmulAlgoCheck(handle, &problem.product, &problem.a, &problem.b, &problem.d, &problem.d,
                                   &rebuilt.algorithm, &result);
  if (status != CUBLAS_STATUS_SUCCESS) return refuse("cublasLtMatmulAlgoCheck", status);
  rebuilt.waves = result.wavesCount;
  if (result.workspaceSize > kWorkspaceBytes) {
    rebuilt.refused = "it needs a workspace of " + std::to_string(result.workspaceSize) + " bytes";
  } else if (!sums_in_float32(wanted)) {
    rebuilt.refused = "it does not put split sums together in float32";
  }
  return rebuilt;
}

}  // namespace octavo::kernels
