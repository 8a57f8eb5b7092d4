// SPDX-License-Identifier: Apache-2.0
// FP8 products against float64 products of the decoded bytes.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels_matrix.h"

namespace octavo::testing {
namespace {

using kernels::Gemm;

struct Shape {
  int64_t m, n, k;
};

// n: multiples of 16, of 8, of 4, and none; m: one row, odd, whole tiles; k: shortest, odd multiples of 16, long.
constexpr Shape kShapes[] = {{16, 16, 16}, {1, 16, 32},    {1, 1, 16},     {3, 8, 16},      {5, 24, 64},
                             {17, 33, 48}, {64, 100, 176}, {257, 101, 80}, {128, 256, 512}, {200, 136, 96}};

struct Formats {
  Fp8 a, b;
};
constexpr Formats kOperandFormats[] = {
    {Fp8::kE4M3, Fp8::kE4M3}, {Fp8::kE5M2, Fp8::kE4M3}, {Fp8::kE4M3, Fp8::kE5M2}, {Fp8::kE5M2, Fp8::kE5M2}};

struct Bias {
  const char* name;
  std::optional<DType> dtype;  // none: no bias
  int64_t offset = 0;          // elements from an aligned address
};
const std::vector<Bias> kBiases = {{"none", std::nullopt},
                                   {"bf16", DType::kBF16},
                                   {"fp16", DType::kFP16},
                                   {"fp32", DType::kFP32},
                                   {"misaligned bf16", DType::kBF16, 1}};

// A quantised copy as `quantize` leaves it, but with NaN in the rows that pad it: they must not reach the result.
struct Copy {
  Copy(Fp8 fp8, int64_t rows, int64_t k, const std::function<double()>& value)
      : format(reference::format_of(fp8)), codes(round_up_16(rows) * k, 0x7f), device(codes.size()) {
    for (int64_t i = 0; i < rows * k; ++i) codes[i] = reference::cast(static_cast<float>(value()), 1.0f, fp8);
    device.write(codes);
    for (const uint8_t code : codes) values.push_back(reference::decode(code, format));
  }
  reference::Format format;
  std::vector<uint8_t> codes;
  std::vector<double> values;
  Buffer<uint8_t> device;
};

size_t size_of(DType dtype) { return dtype == DType::kFP32 ? 4 : 2; }

std::vector<uint32_t> widened(const std::vector<uint8_t>& bytes, DType dtype) {
  std::vector<uint32_t> all(bytes.size() / size_of(dtype), 0);
  for (size_t i = 0; i < all.size(); ++i) std::memcpy(&all[i], &bytes[i * size_of(dtype)], size_of(dtype));
  return all;
}

// What d holds before something is added to it.
double before(size_t element) { return static_cast<double>(element % 7) - 3.0; }

// One product with everything that it needs, run and read back.
struct Case {
  Case(const Shape& shape, const Formats& formats, const Bias& bias, float step_a, float step_b,
       const std::function<double()>& value)
      : shape(shape),
        bias(bias),
        a(formats.a, shape.m, shape.k, value),
        b(formats.b, shape.n, shape.k, value),
        scales(static_cast<double>(step_a) * step_b),
        scale_a(std::vector<float>{step_a}),
        scale_b(std::vector<float>{step_b}),
        bias_values(shape.n, 0.0),
        bias_bytes((shape.n + bias.offset) * 4) {
    gemm.m = shape.m, gemm.n = shape.n, gemm.k = shape.k;
    gemm.a = a.device.get(), gemm.b = b.device.get();
    gemm.format_a = formats.a, gemm.format_b = formats.b;
    gemm.scale_a = scale_a.get(), gemm.scale_b = scale_b.get();
    if (!bias.dtype) return;
    const size_t size = size_of(*bias.dtype);
    std::vector<uint8_t> bytes(bias_bytes.size(), 0xff);
    for (int64_t n = 0; n < shape.n; ++n) {
      const uint32_t bits = reference::to_bits(std::round(4 * value()), *bias.dtype);
      bias_values[n] = reference::to_float(bits, *bias.dtype);
      std::memcpy(&bytes[(n + bias.offset) * size], &bits, size);
    }
    bias_bytes.write(bytes);
    gemm.bias = bias_bytes.get() + bias.offset * size;
    gemm.bias_dtype = *bias.dtype;
  }

  std::vector<uint32_t> run(DType dtype, bool fast, bool emulate, cudaStream_t stream, bool accumulate = false) {
    Buffer<uint8_t> d(shape.m * shape.n * size_of(dtype));
    if (accumulate) {
      std::vector<uint8_t> bytes(d.size());
      for (size_t i = 0; i * size_of(dtype) < bytes.size(); ++i) {
        const uint32_t bits = reference::to_bits(before(i), dtype);
        std::memcpy(&bytes[i * size_of(dtype)], &bits, size_of(dtype));
      }
      d.write(bytes);
    }
    Gemm g = gemm;
    g.d = d.get();
    g.d_dtype = dtype;
    g.fast_accumulation = fast;
    g.accumulate = accumulate;
    g.emulate = emulate;
    Buffer<uint8_t> scratch(kernels::gemm_scratch_bytes(g));
    kernels::gemm(g, scratch.get(), stream);
    return widened(d.read(), dtype);
  }

  struct Exact {
    double value;      // before the rounding to d's dtype
    double magnitude;  // sum of |a| |b|, times both scales
  };
  Exact exact(int64_t i, int64_t j) const {
    double sum = 0.0, magnitude = 0.0;
    for (int64_t k = 0; k < shape.k; ++k) {
      const double product = a.values[i * shape.k + k] * b.values[j * shape.k + k];
      sum += product, magnitude += std::fabs(product);
    }
    return {sum * scales + bias_values[j], magnitude * scales};
  }

  Shape shape;
  Bias bias;
  Copy a, b;
  double scales;
  Buffer<float> scale_a, scale_b;
  std::vector<double> bias_values;
  Buffer<uint8_t> bias_bytes;
  Gemm gemm;
};

std::string describe(const Shape& s, const Formats& f, const Bias& bias, DType dtype, bool fast, bool emulate) {
  return "[" + std::to_string(s.m) + ", " + std::to_string(s.n) + ", " + std::to_string(s.k) + "], formats " +
         std::to_string(static_cast<int>(f.a)) + std::to_string(static_cast<int>(f.b)) + ", bias " + bias.name +
         ", dtype " + std::to_string(static_cast<int>(dtype)) + (fast ? ", fast" : "") + (emulate ? ", emulated" : "");
}

class GemmKernel : public GpuTest {
 protected:
  // Every way to run the product, each compared by `expect(bits, dtype, fast, is_emulated)`.
  template <typename Expect>
  void in_every_way(Case& product, const Formats& formats, Expect&& expect, bool accumulate = false) {
    for (const DType dtype : kDTypes) {
      for (const auto& [fast, emulate] : {std::pair{false, false}, {true, false}, {false, true}}) {
        SCOPED_TRACE(describe(product.shape, formats, product.bias, dtype, fast, emulate));
        const bool is_emulated = emulate || (formats.a == Fp8::kE5M2 && formats.b == Fp8::kE5M2);
        expect(product.run(dtype, fast, emulate, stream_, accumulate), dtype, fast, is_emulated);
      }
    }
  }
};

// Small integers and powers of two for scales: every partial sum is exact even in the shortest accumulator, so that
// the result is known to the bit. This finds any mistake about layouts, bias, scales, cropping and rounding, and about
// adding to d.
TEST_F(GemmKernel, IntegersAreExact) {
  std::mt19937 random(1);
  const auto integer = [&] { return static_cast<double>(random() % 5) - 2.0; };
  for (const Shape& shape : kShapes) {
    for (const Formats& formats : kOperandFormats) {
      for (const Bias& bias : kBiases) {
        Case product(shape, formats, bias, 0.5f, 4.0f, integer);
        for (const bool accumulate : {false, true}) {
          SCOPED_TRACE(accumulate ? "added to d" : "");
          std::vector<double> exact;
          for (int64_t i = 0; i < shape.m * shape.n; ++i) {
            exact.push_back(product.exact(i / shape.n, i % shape.n).value + (accumulate ? before(exact.size()) : 0.0));
          }
          const auto expect = [&](const std::vector<uint32_t>& got, DType dtype, bool, bool) {
            std::vector<uint32_t> expected;
            // An exact 0 may come out with either sign.
            for (const double x : exact) expected.push_back(reference::to_bits(x == 0.0 ? 0.0 : x, dtype));
            std::vector<uint32_t> unsigned_zeros = got;
            for (uint32_t& bits : unsigned_zeros) bits = reference::to_float(bits, dtype) == 0.0f ? 0 : bits;
            EXPECT_TRUE(same(unsigned_zeros, expected, shape.n));
          };
          in_every_way(product, formats, expect, accumulate);
        }
      }
    }
  }
}

// How far from the exact product, as a part of the sum of |a| |b|. A step of Hopper's FP8 units adds 32 products to
// the accumulator, all shifted to the largest exponent among them and cut below its 13th bit or so; without fast
// accumulation such sums are added up in float32 before they are many (at most 4 steps). The 8 stands for the addends
// of a single step. 16-bit products are added 16 at a time and keep the 22nd bit.
double accumulation_error(int64_t k, bool fast, bool is_emulated) {
  if (is_emulated) return static_cast<double>(k / 16 + 8) * 0x1p-22;
  const int64_t steps = (k + 31) / 32;
  return static_cast<double>((fast ? steps : std::min<int64_t>(steps, 4)) + 8) * 0x1p-13;
}

TEST_F(GemmKernel, NormalValuesAreWithinTheBound) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal;
  const auto value = [&] { return normal(random); };
  for (const Shape& shape : kShapes) {
    for (const Formats& formats : kOperandFormats) {
      for (const Bias& bias : {kBiases[0], kBiases[1], kBiases[3]}) {
        Case product(shape, formats, bias, 0.0123f, 1.7f, value);
        std::vector<Case::Exact> exact;
        for (int64_t i = 0; i < shape.m * shape.n; ++i) exact.push_back(product.exact(i / shape.n, i % shape.n));
        in_every_way(product, formats, [&](const std::vector<uint32_t>& got, DType dtype, bool fast, bool emulated) {
          for (size_t i = 0; i < exact.size(); ++i) {
            const double y = reference::to_float(got[i], dtype);
            const double before_rounding = accumulation_error(shape.k, fast, emulated) * exact[i].magnitude +
                                           0x1p-21 * (exact[i].magnitude + std::fabs(exact[i].value));
            const double furthest = std::fabs(exact[i].value) + before_rounding;
            ASSERT_LE(std::fabs(y - exact[i].value), before_rounding + reference::half_ulp(furthest, dtype))
                << "element " << i;
          }
        });
      }
    }
  }
}

TEST_F(GemmKernel, NaNAndInfReachTheResult) {
  for (const bool emulate : {false, true}) {
    Case product({16, 16, 16}, {Fp8::kE5M2, Fp8::kE4M3}, kBiases[0], 1.0f, 1.0f, [] { return 1.0; });
    product.a.codes[2 * 16 + 5] = 0x7c;  // Inf
    product.b.codes[3 * 16 + 7] = 0x7f;  // NaN
    product.a.device.write(product.a.codes);
    product.b.device.write(product.b.codes);
    const std::vector<uint32_t> d = product.run(DType::kFP32, false, emulate, stream_);
    for (int64_t i = 0; i < 16; ++i) {
      for (int64_t j = 0; j < 16; ++j) {
        const float y = std::bit_cast<float>(d[i * 16 + j]);
        EXPECT_EQ(std::isnan(y), j == 3) << i << ", " << j;
        EXPECT_EQ(std::isinf(y), i == 2 && j != 3) << i << ", " << j;
      }
    }
  }
}

TEST_F(GemmKernel, TheSameBitsEveryTime) {
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  const Formats formats = {Fp8::kE5M2, Fp8::kE4M3};
  Case product({64, 128, 4096}, formats, kBiases[1], 0.01f, 0.02f, [&] { return normal(random); });
  for (const DType dtype : kDTypes) {
    const std::vector<uint32_t> first = product.run(dtype, false, false, stream_);
    for (int i = 0; i < 3; ++i) {
      const Buffer<uint8_t> unrelated(1000 + 300 * i);
      EXPECT_TRUE(same(product.run(dtype, false, false, stream_), first, 128));
    }
  }
}

// The first product on a stream, and of its shape, may be captured: handle, plan and workspace come into being then.
TEST_F(GemmKernel, FirstUseInAGraphCapture) {
  for (const bool emulate : {false, true}) {
    cudaStream_t fresh = nullptr;
    require(cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking), "cudaStreamCreate");
    const int64_t k = emulate ? 336 : 304;  // shapes of no other test
    Case product({32, 48, k}, kOperandFormats[0], kBiases[3], 0.5f, 2.0f, [] { return 1.0; });
    Buffer<uint8_t> d(32 * 48 * 2);
    Gemm g = product.gemm;
    g.d = d.get();
    g.emulate = emulate;
    Buffer<uint8_t> scratch(kernels::gemm_scratch_bytes(g));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    require(cudaStreamBeginCapture(fresh, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    kernels::gemm(g, scratch.get(), fresh);
    require(cudaStreamEndCapture(fresh, &graph), "cudaStreamEndCapture");
    require(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    EXPECT_EQ(widened(d.read(), DType::kBF16)[0], 0u);  // captured, not run
    require(cudaGraphLaunch(executable, fresh), "cudaGraphLaunch");
    const double exact = product.exact(31, 47).value;
    EXPECT_EQ(widened(d.read(), DType::kBF16).back(), reference::to_bits(exact, DType::kBF16));
    static_cast<void>(cudaGraphExecDestroy(executable));
    static_cast<void>(cudaGraphDestroy(graph));
    static_cast<void>(cudaStreamDestroy(fresh));
  }
}

}  // namespace
}  // namespace octavo::testing
