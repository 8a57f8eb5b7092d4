// SPDX-License-Identifier: Apache-2.0
// Tables of algorithms: their text, and, on a GPU, that products use them.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "algorithm_table.h"
#include "kernels_matrix.h"
#include "tables.h"
#include "tune.h"

namespace octavo::testing {
namespace {

using kernels::Gemm;
using kernels::parse_table;
using kernels::Product;
using kernels::TableEntry;
using kernels::to_line;
using kernels::Tuning;

const std::string kHeader = std::string(kernels::kTableHeader) + "\n";

TableEntry some_entry() {
  TableEntry entry{.device = "NVIDIA H200", .cublaslt = 130100, .product = {}, .algorithm = {}};
  entry.product = {.m = 16, .n = 4096, .k = 1536, .ld = 4096};
  entry.product.a_type = CUDA_R_8F_E5M2;
  entry.product.b_type = CUDA_R_8F_E4M3;
  entry.product.d_type = CUDA_R_16BF;
  entry.product.bias_type = CUDA_R_16BF;
  entry.product.scaled = entry.product.fast_accumulation = entry.product.accumulate = true;
  entry.product.alignment = kernels::kTunedAlignment;
  entry.algorithm = {.id = 66, .tile = 393, .stages = 36, .split_k = 3, .reduction = 2, .swizzle = 1, .custom = 4};
  entry.algorithm.inner_shape = 1, entry.algorithm.cluster_shape = 3;
  return entry;
}

std::string error_of(const std::string& text) {
  try {
    parse_table(text, "some.txt");
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

TEST(AlgorithmTable, RoundTrip) {
  TableEntry plain = some_entry();
  plain.device = "Some GPU of 2, 3";
  plain.product.bias_type = std::nullopt;
  plain.product.fast_accumulation = plain.product.accumulate = plain.product.scaled = false;
  plain.product.a_type = plain.product.b_type = CUDA_R_16BF;
  plain.product.d_type = CUDA_R_32F;
  plain.algorithm = {.id = 1, .split_k = -1};
  const std::vector<TableEntry> entries = {some_entry(), plain};
  const std::string text = "# first\r\n\n" + kHeader + "  # alone\n" + to_line(entries[0]) + "  # 12.5 us\r\n\n\t" +
                           to_line(entries[1]);  // no end of line
  EXPECT_EQ(parse_table(text, "some.txt"), entries);
  EXPECT_TRUE(parse_table(kHeader, "some.txt").empty());
}

TEST(AlgorithmTable, TheLineAsDocumented) {
  EXPECT_EQ(to_line(some_entry()),
            "device=\"NVIDIA H200\" cublaslt=130100 m=16 n=4096 k=1536 a=e5m2 b=e4m3 d=bf16 bias=bf16 fast=1 "
            "accumulate=1 id=66 tile=393 stages=36 splitk=3 reduction=2 swizzle=1 custom=4 inner=1 cluster=3");
}

TEST(AlgorithmTable, ErrorsNameTheFileTheLineAndWhatWasExpected) {
  const std::string line = to_line(some_entry());
  const auto error_with = [&](const std::string& from, const std::string& to) {
    return error_of(kHeader + "# comment\n" + replaced(line, from, to));
  };
  EXPECT_EQ(error_of(""), "octavo: some.txt:1: expected octavo-gemm-table 1, found the end of the line");
  EXPECT_EQ(error_of("octavo-gemm-table 2\n"),
            "octavo: some.txt:1: expected octavo-gemm-table 1, found octavo-gemm-table 2");
  EXPECT_EQ(error_of("# x\n" + line), "octavo: some.txt:2: expected octavo-gemm-table 1, found " + line);
  EXPECT_EQ(error_with("m=16", "m=0"), "octavo: some.txt:3: expected m=NUMBER from 1 to 9223372036854775807, found 0");
  EXPECT_EQ(error_with("tile=393", "tile=12x"),
            "octavo: some.txt:3: expected tile=NUMBER from 0 to 4294967295, found 12x");
  EXPECT_EQ(error_with("cluster=3", "cluster=65536"),
            "octavo: some.txt:3: expected cluster=NUMBER from 0 to 65535, found 65536");
  EXPECT_EQ(error_with("a=e5m2", "a=e9m9"), "octavo: some.txt:3: expected a=e4m3|e5m2|bf16, found e9m9");
  EXPECT_EQ(error_with("bias=bf16", "bias="),
            "octavo: some.txt:3: expected bias=none|bf16|fp16|fp32, found the end of the line");
  EXPECT_EQ(error_with("fast=1", "fast=2"), "octavo: some.txt:3: expected fast=NUMBER from 0 to 1, found 2");
  EXPECT_EQ(error_with("device=\"NVIDIA H200\"", "device=H200").substr(0, 50),
            "octavo: some.txt:3: expected device=\"NAME\", found ");
  EXPECT_EQ(error_with("cluster=3", "cluster=3 more=1"),
            "octavo: some.txt:3: expected the end of the line, found more=1");
  EXPECT_EQ(error_with(" cluster=3", ""),
            "octavo: some.txt:3: expected cluster=NUMBER from 0 to 65535, found the end of the line");
  // Sums split over k are put together in float32 alone.
  EXPECT_EQ(error_with("reduction=2", "reduction=4"),
            "octavo: some.txt:3: expected reduction=0 (none) or reduction=2 (in float32), found reduction=4 swizzle=1 "
            "custom=4 inner=1 cluster=3");
}

// A file of the test's own, there for the test's time.
class File {
 public:
  explicit File(const std::string& text)
      : path_(::testing::TempDir() + "octavo_" + ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::ofstream(path_) << text;
  }
  ~File() { static_cast<void>(std::remove(path_.c_str())); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(TablesInForce, AreAskedByDeviceVersionAndProductTheLastLoadedFirst) {
  const TableEntry entry = some_entry();
  TableEntry later = entry;
  later.algorithm.tile = 7;
  const size_t before = kernels::tables_in_force().size();
  EXPECT_GE(before, 1u);  // the library's own
  EXPECT_EQ(kernels::tables_in_force().back().name.substr(0, 9), "shipped: ");
  {
    const File file(kHeader + to_line(entry) + "\n" + to_line(later) + "\n");
    kernels::load_table(file.path());
    kernels::load_table(file.path());  // again: in its own place
    ASSERT_EQ(kernels::tables_in_force().size(), before + 1);
    EXPECT_EQ(kernels::tables_in_force().front().name, file.path());
    EXPECT_EQ(kernels::tables_in_force().front().entries.size(), 2u);
    EXPECT_EQ(kernels::tables_in_force().front().hash.size(), 16u);
  }
  EXPECT_EQ(kernels::find_entry(entry.device, entry.cublaslt, entry.product), later);
  EXPECT_EQ(kernels::find_entry("NVIDIA H100", entry.cublaslt, entry.product), std::nullopt);
  EXPECT_EQ(kernels::find_entry(entry.device, 130200, entry.product), std::nullopt);
  const auto found_with = [&](auto&& change) {
    Product p = entry.product;
    change(p);
    return kernels::find_entry(entry.device, entry.cublaslt, p).has_value();
  };
  EXPECT_FALSE(found_with([](Product& p) { p.m = 17; }));
  EXPECT_FALSE(found_with([](Product& p) { p.n = p.ld = 4112; }));
  EXPECT_FALSE(found_with([](Product& p) { p.k = 1552; }));
  EXPECT_FALSE(found_with([](Product& p) { p.ld = 4112; }));
  EXPECT_FALSE(found_with([](Product& p) { p.a_type = CUDA_R_8F_E4M3; }));
  EXPECT_FALSE(found_with([](Product& p) { p.d_type = CUDA_R_16F; }));
  EXPECT_FALSE(found_with([](Product& p) { p.bias_type = std::nullopt; }));
  EXPECT_FALSE(found_with([](Product& p) { p.fast_accumulation = false; }));
  EXPECT_FALSE(found_with([](Product& p) { p.accumulate = false; }));
  EXPECT_FALSE(found_with([](Product& p) { p.alignment = 16; }));
}

TEST(TablesInForce, ABadFileChangesNothing) {
  const size_t before = kernels::tables_in_force().size();
  EXPECT_THROW(kernels::load_table("/no/such/table.txt"), std::runtime_error);
  const File file(kHeader + "nonsense\n");
  EXPECT_THROW(kernels::load_table(file.path()), std::runtime_error);
  EXPECT_EQ(kernels::tables_in_force().size(), before);
}

// A product of small integers, which every algorithm gives exactly.
struct Exact {
  static constexpr int64_t kM = 64, kN = 96;
  explicit Exact(int64_t k)
      : a(std::vector<uint8_t>(kM * k, 0x38)),  // 1
        b(std::vector<uint8_t>(kN * k, 0x40)),  // 2
        scale(std::vector<float>{0.5f}),
        d(kM * kN) {
    gemm.m = kM, gemm.n = kN, gemm.k = k;
    gemm.a = a.get(), gemm.b = b.get();
    gemm.scale_a = gemm.scale_b = scale.get();
    gemm.d = d.get();
    gemm.d_dtype = DType::kFP32;
  }
  // Whether all of d is what it should be.
  bool is_right(cudaStream_t stream) {
    kernels::gemm(gemm, nullptr, stream);
    return d.read() == std::vector<float>(kM * kN, static_cast<float>(gemm.k) * 0.5f);
  }

  Buffer<uint8_t> a, b;
  Buffer<float> scale, d;
  Gemm gemm;
};

class TunedProducts : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const auto [major, minor] = kernels::compute_capability();
    if (kernels::fp8_support(major, minor) != kernels::Fp8Support::kNative) GTEST_SKIP() << "no FP8 tensor cores";
  }
};

TEST_F(TunedProducts, AnEntryOfTheTuningIsUsedAndGivesTheRightResult) {
  for (const bool exhaustive : {false, true}) {
    Exact exact(exhaustive ? 528 : 512);
    const Tuning tuning = kernels::tune(exact.gemm, nullptr, {.exhaustive = exhaustive, .seconds = 0.1}, stream_);
    ASSERT_FALSE(tuning.finalists.empty());
    EXPECT_GE(tuning.tried, static_cast<int64_t>(tuning.finalists.size()));
    EXPECT_EQ(tuning.wrong, 0);
    EXPECT_EQ(tuning.in_force, 0);
    EXPECT_EQ(exact.d.read(), std::vector<float>(Exact::kM * Exact::kN, 0.0f)) << "tuning wrote to d";
    EXPECT_TRUE(exact.is_right(stream_));
    for (size_t i = 0; i < tuning.finalists.size(); ++i) {
      const std::string& line = tuning.finalists[i].line;
      EXPECT_GT(tuning.finalists[i].microseconds, 0.0);
      if (line.empty()) continue;
      SCOPED_TRACE(line);
      const File file(kHeader + line + "\n");
      kernels::load_table(file.path());
      EXPECT_TRUE(exact.is_right(stream_));
      EXPECT_TRUE(kernels::tables_in_force().front().refused.empty());
      const Tuning again = kernels::tune(exact.gemm, nullptr, {.exhaustive = false, .seconds = 0.1}, stream_);
      EXPECT_EQ(again.finalists.at(again.in_force).line, line);
    }
  }
}

TEST_F(TunedProducts, AnEntryThatCublasltRefusesLeavesTheHeuristicAndIsSaid) {
  Exact exact(544);
  const Tuning tuning = kernels::tune(exact.gemm, nullptr, {.exhaustive = false, .seconds = 0.1}, stream_);
  EXPECT_TRUE(exact.is_right(stream_));  // a plan that loading has to drop
  std::string line;
  for (const kernels::Finalist& finalist : tuning.finalists) line = finalist.line.empty() ? line : finalist.line;
  if (line.empty()) GTEST_SKIP() << "cuBLASLt has no algorithm here that a table can hold";
  const size_t id = line.find(" id=") + 4;
  const File file(kHeader + line.substr(0, id) + "123456789" + line.substr(line.find(' ', id)) + "\n");
  kernels::load_table(file.path());
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(exact.is_right(stream_));
  const std::vector<std::string> refused = kernels::tables_in_force().front().refused;
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_NE(refused[0].find("cublasLtMatmulAlgoInit"), std::string::npos) << refused[0];
}

}  // namespace
}  // namespace octavo::testing
