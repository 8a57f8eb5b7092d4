// SPDX-License-Identifier: Apache-2.0
// What a test on a GPU needs: memory, a stream, and a skip that cannot hide a broken GPU lane.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace octavo::testing {

inline void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// `count` elements on the device, zero unless given. Between guard bytes, which the destructor checks.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count) : count_(count) {
    require(cudaMalloc(reinterpret_cast<void**>(&base_), count * sizeof(T) + 2 * kGuard), "cudaMalloc");
    require(cudaMemset(base_, kGuardByte, count * sizeof(T) + 2 * kGuard), "cudaMemset");
    require(cudaMemset(base_ + kGuard, 0, count * sizeof(T)), "cudaMemset");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the tests' streams do not wait for the default one
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { write(values); }
  Buffer(Buffer&& other) noexcept : count_(other.count_), base_(std::exchange(other.base_, nullptr)) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (base_ == nullptr) return;
    EXPECT_TRUE(guards_hold()) << "something was written beside a buffer of " << count_ << " elements";
    static_cast<void>(cudaFree(base_));
  }

  T* get() { return reinterpret_cast<T*>(base_ + kGuard); }
  const T* get() const { return reinterpret_cast<const T*>(base_ + kGuard); }
  size_t size() const { return count_; }

  void write(const std::vector<T>& values) {
    if (values.size() != count_) throw std::runtime_error("a buffer is written whole");
    require(cudaMemcpy(get(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  // Waits for everything before it.
  std::vector<T> read() const {
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> values(count_);
    require(cudaMemcpy(values.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }
  T one() const { return read().at(0); }

 private:
  static constexpr size_t kGuard = 256;  // keeps what is between as aligned as cudaMalloc's own
  static constexpr int kGuardByte = 0xa5;

  bool guards_hold() const {
    std::vector<uint8_t> bytes(count_ * sizeof(T) + 2 * kGuard);
    if (cudaDeviceSynchronize() != cudaSuccess) return false;
    if (cudaMemcpy(bytes.data(), base_, bytes.size(), cudaMemcpyDeviceToHost) != cudaSuccess) return false;
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes[i] != kGuardByte || bytes[bytes.size() - 1 - i] != kGuardByte) return false;
    }
    return true;
  }

  size_t count_;
  uint8_t* base_ = nullptr;
};

// Skips without a GPU; fails instead where OCTAVO_REQUIRE_CUDA=1.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {
      require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
      return;
    }
    static_cast<void>(cudaGetLastError());
    const char* required = std::getenv("OCTAVO_REQUIRE_CUDA");
    if (required != nullptr && std::strcmp(required, "1") == 0) FAIL() << "OCTAVO_REQUIRE_CUDA=1, and no GPU";
    GTEST_SKIP() << "no GPU";
  }
  void TearDown() override {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
  }

  cudaStream_t stream_ = nullptr;
};

}  // namespace octavo::testing
