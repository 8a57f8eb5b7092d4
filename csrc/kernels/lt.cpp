// SPDX-License-Identifier: Apache-2.0
#include "lt.h"

#include <cublasLt.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "algorithm.h"
#include "check.h"
#include "lt_problem.h"
#include "tables.h"

namespace octavo::kernels {
namespace {

struct Plan {
  Problem problem;
  cublasLtMatmulAlgo_t algorithm;
  bool has_run = false;
};

struct ProductHash {
  size_t operator()(const Product& p) const {
    size_t hash = 0;
    const int64_t flags =
        int64_t{p.scaled} + 2 * int64_t{p.fast_accumulation} + 4 * int64_t{p.accumulate} + 8 * int64_t{p.alignment};
    for (const int64_t value : {p.m, p.n, p.k, p.ld, int64_t{p.a_type}, int64_t{p.b_type}, int64_t{p.d_type},
                                p.bias_type ? int64_t{*p.bias_type} : int64_t{-1}, flags}) {
      hash = (hash ^ static_cast<size_t>(value)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct Device {
  cublasLtHandle_t handle = nullptr;
  std::string name;
  ComputeCapability capability;
  std::unordered_map<Product, Plan, ProductHash> plans;
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

std::map<int, Device>& devices_locked() {
  static std::map<int, Device>& devices = *new std::map<int, Device>;
  return devices;
}

// The current device. Call with the mutex held.
Device& device_locked() {
  int number = 0;
  OCTAVO_CHECK(cudaGetDevice(&number));
  Device& device = devices_locked()[number];
  if (device.handle == nullptr) {
    const RelaxedCapture relaxed;
    cudaDeviceProp properties;
    OCTAVO_CHECK(cudaGetDeviceProperties(&properties, number));
    device.name = properties.name;
    device.capability = {properties.major, properties.minor};
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

cublasLtMatmulAlgo_t algorithm_for(const Device& device, const Product& p, const Problem& problem) {
  if (const auto entry = find_entry(device.name, cublasLtGetVersion(), p)) {
    const Rebuilt rebuilt = rebuild(device.handle, p, problem, entry->algorithm);
    if (rebuilt.refused.empty()) return rebuilt.algorithm;
    note_refused(*entry, rebuilt.refused);
  }
  const auto found = ask_heuristic(device.handle, problem, p, 1);
  if (found.empty()) throw std::runtime_error("octavo: cuBLASLt has no algorithm for " + in_words(p));
  return found.front().algo;
}

const Plan& plan_locked(Device& device, const Product& p, const ProductOperands& operands) {
  const auto found = device.plans.find(p);
  if (found != device.plans.end()) return found->second;
  const RelaxedCapture relaxed;
  Plan plan{.problem = problem_of(p, operands), .algorithm = {}};
  plan.algorithm = algorithm_for(device, p, plan.problem);
  return device.plans.emplace(p, plan).first->second;
}

}  // namespace

void multiply(const Product& product, const ProductOperands& operands, cudaStream_t stream) {
  std::unique_lock lock(devices_mutex());
  Device& device = device_locked();
  void* workspace = workspace_locked(device, stream);
  Plan plan = plan_locked(device, product, operands);  // a copy: the pointers are this call's own
  const cublasLtHandle_t handle = device.handle;
  lock.unlock();

  set_pointers(plan.problem, product, operands);
  const auto start = [&] {
    OCTAVO_CHECK(run(handle, plan.problem, product, operands, plan.algorithm, workspace, stream));
  };
  if (plan.has_run) return start();
  const RelaxedCapture relaxed;  // the first call of a plan loads its kernel
  start();
  lock.lock();
  if (const auto found = device.plans.find(product); found != device.plans.end()) found->second.has_run = true;
}

void drop_plans() {
  const std::lock_guard lock(devices_mutex());
  for (auto& [number, device] : devices_locked()) device.plans.clear();
}

ComputeCapability compute_capability() {
  const std::lock_guard lock(devices_mutex());
  return device_locked().capability;
}

LtDevice lt_device(cudaStream_t stream) {
  const std::lock_guard lock(devices_mutex());
  Device& device = device_locked();
  return {device.handle, device.name, workspace_locked(device, stream)};
}

}  // namespace octavo::kernels
