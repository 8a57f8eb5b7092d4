// SPDX-License-Identifier: Apache-2.0
// Where a quantisation takes its step from.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels_state.h"

namespace octavo::testing {
namespace {

// The formula, bit for bit: all magnitudes, both ends, next to powers of two.
TEST_F(State, StepFromAmax) {
  std::vector<float> amaxes = {0.0f,   1e-45f,  0x1p-149f, 1.17549435e-38f, std::numeric_limits<float>::max(),
                               448.0f, 57344.0f};
  for (int e = -140; e <= 127; e += 3) {
    const float power = std::ldexp(448.0f, e - 8);
    for (const float amax : {power, std::nextafter(power, 0.0f), std::nextafter(power, 1e38f), power * 1.3f}) {
      if (std::isfinite(amax)) amaxes.push_back(amax);
    }
  }
  const TestMatrix x(DType::kBF16, 1, 1, all_strides()[0], [](int64_t, int64_t) { return 0; });
  Buffer<uint8_t> row(1);
  Buffer<float> no_history(1);
  // The amax is the largest of several, and an Inf beside it changes nothing.
  std::vector<Peak> all;
  for (const float amax : amaxes) all.insert(all.end(), {0, std::bit_cast<Peak>(amax) | kNonFinite, kNonFinite});
  const Buffer<Peak> measured(all);
  Quantize q;
  q.x = x.view();
  q.padded_rows = q.padded_cols = 1;
  q.row = row.get();
  q.source = StepSource::kHistory;
  q.given = no_history.get();
  q.measured_count = 3;
  for (const float multiplier : {1.0f, 2.0f, 1.4142135f, 0x1p-140f, 0x1p120f}) {
    for (const int32_t power_of_two : {0, 1}) {
      for (const Operand operand : {kX, kG}) {
        Buffer<float> used(amaxes.size());
        ScalingPolicy policy = kWindow;
        policy.multiplier = multiplier;
        policy.power_of_two = power_of_two;
        q.operand = operand;
        for (size_t i = 0; i < amaxes.size(); ++i) {
          q.used = used.get() + i;
          q.measured = measured.get() + 3 * i;
          kernels::quantize(&q, 1, policy, nullptr, stream_);
        }
        const std::vector<float> after = used.read();
        for (size_t i = 0; i < amaxes.size(); ++i) {
          const float expected = reference::step_from_amax(amaxes[i], kFp8Max[operand], multiplier, power_of_two != 0);
          ASSERT_EQ(std::bit_cast<uint32_t>(after[i]), std::bit_cast<uint32_t>(expected))
              << "amax " << amaxes[i] << ", multiplier " << multiplier << ", power of two " << power_of_two;
        }
      }
    }
  }
}

TEST_F(State, AForwardUsesTheSlotOrTheTensor) {
  const TestMatrix x(DType::kBF16, 40, 48, all_strides()[0], Values(DType::kBF16, 9, false, 1u << 30));
  const float own = reference::step_from_amax(x.amax(), 448.0f, 1.0f, false);

  EXPECT_EQ(quantized(x, kWindow, kX), own) << "empty ring";
  EXPECT_EQ(measured_amax_, x.amax());

  record(kWindow, 3.0f, 5.0f, 7.0f);
  EXPECT_EQ(quantized(x, kWindow, kX), own) << "recorded, not advanced";
  advance();
  EXPECT_EQ(quantized(x, kWindow, kX), 3.0f / 448.0f);
  EXPECT_EQ(measured_amax_, 0.0f) << "the amax pass was needless and should have returned";
  EXPECT_EQ(quantized(x, kWindow, kW), 5.0f / 448.0f);
  EXPECT_EQ(quantized(x, kWindow, kG), 7.0f / 57344.0f);

  EXPECT_EQ(quantized(x, policy_of(8, ScalingKind::kWindowMax, 4), kX), own) << "another policy";

  EXPECT_EQ(quantized(x, kWindow, kX, kIndex, kGeneration + 1), own) << "another generation";
  EXPECT_EQ(quantized(x, kWindow, kX, -1, 0), own) << "stateless";

  EXPECT_EQ(quantized_from_slot(x, kWindow, kX), 3.0f / 448.0f);
  EXPECT_EQ(quantized_from_slot(x, kWindow, kW), 5.0f / 448.0f);
  EXPECT_TRUE(std::isnan(quantized_from_slot(x, kWindow, kX, kGeneration + 1))) << "no step, no number";
}

// The step on a tape, or, where that is missing, the tensor's own without another launch: bytes, peaks, sums and step
// as after an amax pass, and the tape ready for the next launch.
TEST_F(State, ATapeWithoutAHistoryIsMeasuredByTheCast) {
  struct Made {
    std::vector<uint8_t> row, col;
    std::vector<Peak> peaks;
    std::vector<float> sums, step;
    bool operator==(const Made&) const = default;
  };
  for (const DType dtype : {DType::kBF16, DType::kFP32})
    for (const auto& [rows, cols] : {std::pair{1, 1}, {40, 48}, {300, 520}, {129, 1000}})
      for (const auto& strides : all_strides())
        for (const bool with_sums : {false, true})
          for (const float scale : {0.0f, 0.125f}) {
            const TestMatrix x(dtype, rows, cols, strides, Values(dtype, 9, false, 1u << 30));
            Tape tape = {};
            tape.operand[kG].scale = scale;
            Buffer<Tape> on_device(std::vector<Tape>{tape});
            Quantize q;
            q.x = x.view();
            q.operand = kG;
            q.format = Fp8::kE5M2;
            q.padded_rows = (rows + 15) / 16 * 16;
            q.padded_cols = (cols + 15) / 16 * 16;
            Measure measure{.x = x.view(), .operand = kG, .known = step_on(on_device.get(), kG)};
            const auto run = [&](StepSource source) {
              const size_t bytes = q.padded_rows * q.padded_cols;
              Buffer<uint8_t> row(bytes), col(bytes);
              Buffer<Peak> peaks(kernels::tiles_of(q)), measured(kernels::peaks_of(measure));
              Buffer<float> sums((rows + Quantize::kSumRows - 1) / Quantize::kSumRows * cols), used(1);
              q.row = row.get();
              q.col = col.get();
              q.peaks = peaks.get();
              q.used = used.get();
              q.column_sums = with_sums ? sums.get() : nullptr;
              q.source = source;
              q.given = measure.known;
              q.own = &on_device.get()->operand[kG];
              measure.peaks = measured.get();
              q.measured = measured.get();
              q.measured_count = static_cast<int32_t>(measured.size());
              if (source == StepSource::kHistory) kernels::measure_amax(&measure, 1, nullptr, stream_);
              kernels::quantize(&q, 1, kWindow, nullptr, stream_);
              return Made{row.read(), col.read(), peaks.read(), sums.read(), used.read()};
            };
            const Made expected = run(StepSource::kHistory);
            for (const int again : {0, 1}) {
              const Made got = run(StepSource::kTape);
              ASSERT_TRUE(got == expected) << rows << " x " << cols << ", " << strides.name << ", " << with_sums << ", "
                                           << scale << ", " << again;
            }
            EXPECT_EQ(on_device.one().operand[kG].scale, scale);
            EXPECT_EQ(on_device.one().operand[kG].blocks, 0u);
          }
}

}  // namespace
}  // namespace octavo::testing
