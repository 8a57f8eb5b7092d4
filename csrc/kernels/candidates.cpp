// SPDX-License-Identifier: Apache-2.0
#include "candidates.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <set>

#include "check.h"

namespace octavo::kernels {
namespace {

constexpr int kAskedFor = 256;
constexpr size_t kMostFound = 1000;     // by the exhaustive search
constexpr int64_t kMostTries = 300000;  // configurations put together by it, over all algorithms
constexpr uint32_t kMostOptions = 16;   // of the custom option's values
// The shapes of clusters that Hopper's products come in.
constexpr uint16_t kClusters[] = {CUBLASLT_CLUSTER_SHAPE_AUTO,  CUBLASLT_CLUSTER_SHAPE_1x1x1,
                                  CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                                  CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1,
                                  CUBLASLT_CLUSTER_SHAPE_1x4x1};
constexpr int32_t kSplits[] = {2, 3, 4, 6, 8, 12, 16};

// A capability that an algorithm does not know is 0.
template <typename Value>
Value capability(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoCapAttributes_t attribute) {
  Value value{};
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : Value{};
}

// 0, which means that there is no choice, where the algorithm lists none.
std::vector<uint32_t> listed(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoCapAttributes_t attribute) {
  size_t bytes = 0;
  if (cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, nullptr, 0, &bytes) != CUBLAS_STATUS_SUCCESS) return {0};
  std::vector<uint32_t> values(bytes / sizeof(uint32_t));
  if (values.empty()) return {0};
  const cublasStatus_t status = cublasLtMatmulAlgoCapGetAttribute(&algorithm, attribute, values.data(), bytes, &bytes);
  return status == CUBLAS_STATUS_SUCCESS ? values : std::vector<uint32_t>{0};
}

// Every configuration of one algorithm that cuBLASLt accepts, as far as `tries` goes.
class Search {
 public:
  Search(cublasLtHandle_t handle, const Product& product, const Problem& problem, int64_t tries)
      : handle_(handle), product_(product), problem_(problem), tries_(tries) {}

  std::vector<Candidate> run(int id) {
    cublasLtMatmulAlgo_t algorithm;
    if (initial(handle_, product_, id, algorithm) != CUBLAS_STATUS_SUCCESS) return {};
    const auto options =
        static_cast<uint32_t>(std::max(0, capability<int32_t>(algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX)));
    const auto swizzles = capability<uint32_t>(algorithm, CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT);
    const auto schemes = capability<uint32_t>(algorithm, CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK);
    may_split_ = capability<int32_t>(algorithm, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT) != 0 &&
                 (schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0;
    const std::vector<uint32_t> tiles = listed(algorithm, CUBLASLT_ALGO_CAP_TILE_IDS);
    const std::vector<uint32_t> stages = listed(algorithm, CUBLASLT_ALGO_CAP_STAGES_IDS);
    Algorithm a{.id = id};
    for (a.custom = 0; a.custom <= std::min(options, kMostOptions); ++a.custom) {
      for (a.swizzle = 0; a.swizzle <= std::min(swizzles, 1u); ++a.swizzle) {
        for (a.inner_shape = 0; a.inner_shape < CUBLASLT_MATMUL_INNER_SHAPE_END; ++a.inner_shape) {
          for (const uint16_t cluster : kClusters) {
            a.cluster_shape = cluster;
            for (const uint32_t tile : tiles) {
              a.tile = tile;
              for (const uint32_t stage : stages) {
                a.stages = stage;
                add(a);
                if (tries_ <= 0) return found_;
              }
            }
          }
        }
      }
    }
    return found_;
  }

 private:
  void add(const Algorithm& whole) {
    const float waves = add_one(whole);
    if (!may_split_ || waves <= 0.0f || waves >= 1.0f) return;  // splitting is for devices that are not full
    Algorithm split = whole;
    split.reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    for (const int32_t parts : kSplits) {
      split.split_k = parts;
      add_one(split);
    }
  }

  // Its waves, or 0 where it is not accepted.
  float add_one(const Algorithm& a) {
    --tries_;
    const Rebuilt rebuilt = rebuild(handle_, product_, problem_, a);
    if (!rebuilt.refused.empty()) return 0.0f;
    found_.push_back({.algorithm = rebuilt.algorithm, .configuration = a, .is_reproducible = true});
    return rebuilt.waves;
  }

  cublasLtHandle_t handle_;
  const Product& product_;
  const Problem& problem_;
  int64_t tries_;
  bool may_split_ = false;
  std::vector<Candidate> found_;
};

std::vector<Candidate> search(cublasLtHandle_t handle, const Product& p, const Problem& problem) {
  int ids[128];
  int count = 0;
  OCTAVO_CHECK(cublasLtMatmulAlgoGetIds(handle, CUBLAS_COMPUTE_32F, CUDA_R_32F, p.b_type, p.a_type, p.d_type, p.d_type,
                                        static_cast<int>(std::size(ids)), ids, &count));
  std::vector<Candidate> all;
  for (int i = 0; i < count; ++i) {
    const std::vector<Candidate> found = Search(handle, p, problem, kMostTries / count).run(ids[i]);
    all.insert(all.end(), found.begin(), found.end());
  }
  const size_t wanted = std::min(all.size(), kMostFound);
  std::vector<Candidate> thinned;
  for (size_t i = 0; i < wanted; ++i) thinned.push_back(all[i * all.size() / wanted]);
  return thinned;
}

}  // namespace

std::vector<Candidate> candidates_for(cublasLtHandle_t handle, const Product& product, const Problem& problem,
                                      bool exhaustive) {
  std::vector<Candidate> candidates;
  std::set<Algorithm> reproducible;
  const auto add = [&](const Candidate& candidate) {
    if (candidate.is_reproducible && !reproducible.insert(candidate.configuration).second) return;
    candidates.push_back(candidate);
  };
  for (const auto& offered : ask_heuristic(handle, problem, product, kAskedFor)) {
    Candidate candidate{.algorithm = offered.algo, .configuration = configuration_of(offered.algo)};
    const Rebuilt rebuilt = rebuild(handle, product, problem, candidate.configuration);
    candidate.is_reproducible =
        rebuilt.refused.empty() && std::memcmp(&rebuilt.algorithm, &offered.algo, sizeof offered.algo) == 0;
    add(candidate);
    // What the configuration alone gives is another algorithm then, perhaps as good.
    if (rebuilt.refused.empty() && !candidate.is_reproducible) {
      add({.algorithm = rebuilt.algorithm, .configuration = candidate.configuration, .is_reproducible = true});
    }
  }
  if (exhaustive) {
    for (const Candidate& candidate : search(handle, product, problem)) add(candidate);
  }
  return candidates;
}

}  // namespace octavo::kernels
