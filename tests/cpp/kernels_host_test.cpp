// SPDX-License-Identifier: Apache-2.0
// What needs no GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include "check.h"
#include "kernels.h"
#include "kernels_reference.h"

namespace octavo::kernels {
namespace {

TEST(Fp8SupportTable, ByComputeCapability) {
  const auto support = [](int major, int minor) { return fp8_support(major, minor); };
  EXPECT_EQ(support(7, 5), Fp8Support::kRefused);
  EXPECT_EQ(support(8, 0), Fp8Support::kEmulated);
  EXPECT_EQ(support(8, 6), Fp8Support::kEmulated);
  EXPECT_EQ(support(8, 7), Fp8Support::kEmulated);
  EXPECT_EQ(support(8, 9), Fp8Support::kNative);
  EXPECT_EQ(support(9, 0), Fp8Support::kNative);
  EXPECT_EQ(support(10, 0), Fp8Support::kNative);
  EXPECT_EQ(support(10, 3), Fp8Support::kNative);
  EXPECT_EQ(support(11, 0), Fp8Support::kRefused);
  EXPECT_EQ(support(12, 0), Fp8Support::kNative);
  EXPECT_EQ(support(12, 1), Fp8Support::kNative);
  EXPECT_EQ(support(13, 0), Fp8Support::kRefused);
}

template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(Check, NamesTheCallAndTheError) {
  const std::string cuda = message_of([] { OCTAVO_CHECK(cudaErrorInvalidValue); });
  EXPECT_NE(cuda.find("kernels_host_test.cpp:"), std::string::npos) << cuda;
  EXPECT_NE(cuda.find("cudaErrorInvalidValue failed"), std::string::npos) << cuda;
  EXPECT_NE(cuda.find("invalid argument"), std::string::npos) << cuda;
  const std::string cublas = message_of([] { OCTAVO_CHECK(CUBLAS_STATUS_NOT_SUPPORTED); });
  EXPECT_NE(cublas.find("CUBLAS_STATUS_NOT_SUPPORTED failed"), std::string::npos) << cublas;
  EXPECT_EQ(message_of([] { OCTAVO_CHECK(cudaSuccess); }), "");
}

// Both operands as bf16, and float32 accumulators where d is not float32 itself; each part a multiple of 256.
TEST(GemmScratch, OfAnEmulatedProduct) {
  Gemm g;
  g.emulate = true;
  g.m = 3, g.n = 20, g.k = 32;
  EXPECT_EQ(gemm_scratch_bytes(g), 256 + 32 * 32 * 2 + 512);
  g.d_dtype = DType::kFP32;
  EXPECT_EQ(gemm_scratch_bytes(g), 256 + 1280);
  g.accumulate = true;  // d cannot hold the accumulators then; 20 columns are computed as 32
  EXPECT_EQ(gemm_scratch_bytes(g), 256 + 2048 + 512);
}

// The reference itself, at values that can be looked up.
TEST(Reference, KnownCodes) {
  EXPECT_EQ(reference::decode(0x7e, reference::kE4M3), 448.0);
  EXPECT_EQ(reference::decode(0x7b, reference::kE5M2), 57344.0);
  EXPECT_EQ(reference::decode(0x01, reference::kE4M3), 0x1p-9);
  EXPECT_EQ(reference::decode(0x01, reference::kE5M2), 0x1p-16);
  EXPECT_TRUE(std::isnan(reference::decode(0x7f, reference::kE4M3)));
  EXPECT_TRUE(std::isinf(reference::decode(0x7c, reference::kE5M2)));
  EXPECT_EQ(reference::cast(1.0f, 1.0f, Fp8::kE4M3), 0x38);
  EXPECT_EQ(reference::cast(-1.0f, 1.0f, Fp8::kE5M2), 0xbc);
  EXPECT_EQ(reference::cast(1.0625f, 1.0f, Fp8::kE4M3), 0x38);  // a tie goes to the even code
  EXPECT_EQ(reference::cast(1.1875f, 1.0f, Fp8::kE4M3), 0x3a);
  EXPECT_EQ(reference::cast(1e30f, 1.0f, Fp8::kE4M3), 0x7e);
  EXPECT_EQ(reference::cast(-1e30f, 1.0f, Fp8::kE5M2), 0xfb);
  EXPECT_EQ(reference::cast(-INFINITY, 1.0f, Fp8::kE5M2), 0xfc);
  EXPECT_EQ(reference::cast(-INFINITY, 1.0f, Fp8::kE4M3), 0x7f);
  EXPECT_EQ(reference::cast(-0.0f, 1.0f, Fp8::kE4M3), 0x80);
  EXPECT_EQ(reference::to_bits(1.0, DType::kBF16), 0x3f80u);
  EXPECT_EQ(reference::to_bits(65520.0, DType::kFP16), 0x7c00u);
  EXPECT_EQ(reference::to_bits(65519.0, DType::kFP16), 0x7bffu);
  EXPECT_EQ(reference::step_from_amax(3.0f, 448.0f, 1.0f, true), 0x1p-7f);
}

}  // namespace
}  // namespace octavo::kernels
