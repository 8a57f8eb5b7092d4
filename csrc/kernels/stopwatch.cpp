// SPDX-License-Identifier: Apache-2.0
#include "stopwatch.h"

#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "check.h"
#include "hold.h"

namespace octavo::kernels {
namespace {

constexpr size_t kMostCopies = 32;
constexpr double kWindowMicroseconds = 100.0;
constexpr int kMostLaunches = 20;
constexpr int64_t kHeldNanoseconds = 20000;     // beside what each launch adds
constexpr int64_t kLongestPerLaunch = 1000000;  // to be held up for; a host slower than that is timed as it is
constexpr int64_t kSampledRows = 512;

size_t l2_bytes() {
  int number = 0, bytes = 0;
  OCTAVO_CHECK(cudaGetDevice(&number));
  OCTAVO_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, number));
  return static_cast<size_t>(bytes);
}

size_t bytes_of(int64_t rows, int64_t cols, cudaDataType_t type) {
  return static_cast<size_t>(rows) * static_cast<size_t>(cols) * size_of(type);
}

float to_float(const uint8_t* element, cudaDataType_t type) {
  if (type == CUDA_R_32F) {
    float value;
    std::memcpy(&value, element, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return type == CUDA_R_16BF ? std::bit_cast<float>(uint32_t{bits} << 16) : __half2float(std::bit_cast<__half>(bits));
}

}  // namespace

DeviceBytes::DeviceBytes(size_t count) { OCTAVO_CHECK(cudaMalloc(&data_, count)); }

DeviceBytes::~DeviceBytes() {
  if (data_ != nullptr) static_cast<void>(cudaFree(data_));
}

Rotation::Rotation(const Product& p, const ProductOperands& operands, cudaStream_t stream)
    : d_bytes_(bytes_of(p.m, p.ld, p.d_type)) {
  const size_t a_bytes = bytes_of(p.m, p.k, p.a_type), b_bytes = bytes_of(p.n, p.k, p.b_type);
  const auto copy = [&](const void* from, size_t bytes) {
    memory_.emplace_back(bytes);
    OCTAVO_CHECK(cudaMemcpyAsync(memory_.back().get(), from, bytes, cudaMemcpyDeviceToDevice, stream));
    return memory_.back().get();
  };
  const size_t count = std::clamp<size_t>(2 * l2_bytes() / (a_bytes + b_bytes + d_bytes_) + 1, 2, kMostCopies);
  for (size_t i = 0; i < count; ++i) {
    ProductOperands own = operands;
    own.a = copy(operands.a, a_bytes);
    own.b = copy(operands.b, b_bytes);
    memory_.emplace_back(d_bytes_);
    own.d = memory_.back().get();
    OCTAVO_CHECK(cudaMemsetAsync(own.d, 0, d_bytes_, stream));
    copies_.push_back(own);
  }
}

Stopwatch::Stopwatch(const LtDevice& device, const Product& product, const ProductOperands& operands,
                     cudaStream_t stream)
    : device_(device), product_(product), rotation_(product, operands, stream), stream_(stream) {
  OCTAVO_CHECK(cudaEventCreate(&begin_));
  OCTAVO_CHECK(cudaEventCreate(&end_));
}

Stopwatch::~Stopwatch() {
  for (const cudaEvent_t event : {begin_, end_}) {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(event));
  }
}

cublasStatus_t Stopwatch::launch(const Candidate& candidate, const ProductOperands& operands) {
  return run(device_.handle, problem_of(product_, operands), product_, operands, candidate.algorithm, device_.workspace,
             stream_);
}

bool Stopwatch::try_out(const Candidate& candidate) {
  if (launch(candidate, rotation_.next()) != CUBLAS_STATUS_SUCCESS) return false;
  OCTAVO_CHECK(cudaStreamSynchronize(stream_));
  return true;
}

double Stopwatch::timed(const Candidate& candidate, int launches) {
  for (;;) {
    hold(kHeldNanoseconds + held_ns_per_launch_ * launches, stream_);
    OCTAVO_CHECK(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < launches; ++i) OCTAVO_CHECK(launch(candidate, rotation_.next()));
    const bool ahead = cudaEventQuery(begin_) == cudaErrorNotReady;
    static_cast<void>(cudaGetLastError());  // "not ready" is none
    OCTAVO_CHECK(cudaEventRecord(end_, stream_));
    OCTAVO_CHECK(cudaEventSynchronize(end_));
    float milliseconds = 0.0f;
    OCTAVO_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    if (ahead || held_ns_per_launch_ >= kLongestPerLaunch) return 1e3 * milliseconds / launches;
    held_ns_per_launch_ *= 2;
  }
}

void Stopwatch::calibrate(const Candidate& candidate) {
  const double microseconds = timed(candidate, 3);
  launches_ = static_cast<int>(std::clamp(kWindowMicroseconds / microseconds, 1.0, double{kMostLaunches}));
}

double Stopwatch::window(const Candidate& candidate) { return timed(candidate, launches_); }

std::vector<float> Stopwatch::sampled_result(const Candidate& candidate) {
  const ProductOperands& operands = rotation_.first();
  OCTAVO_CHECK(cudaMemsetAsync(operands.d, product_.accumulate ? 0 : 0xff, rotation_.d_bytes(), stream_));
  OCTAVO_CHECK(launch(candidate, operands));
  const int64_t rows = std::min(product_.m, kSampledRows), step = product_.m / rows;
  const size_t element = size_of(product_.d_type), row_bytes = bytes_of(1, product_.n, product_.d_type);
  std::vector<uint8_t> bytes(rows * row_bytes);
  OCTAVO_CHECK(cudaMemcpy2DAsync(bytes.data(), row_bytes, operands.d, bytes_of(step, product_.ld, product_.d_type),
                                 row_bytes, rows, cudaMemcpyDeviceToHost, stream_));
  OCTAVO_CHECK(cudaStreamSynchronize(stream_));
  std::vector<float> values(bytes.size() / element);
  for (size_t i = 0; i < values.size(); ++i) values[i] = to_float(&bytes[i * element], product_.d_type);
  return values;
}

}  // namespace octavo::kernels
