// SPDX-License-Identifier: Apache-2.0
// The life of a slot: tape, record, advance, custom recipes.
#include "kernels_state.h"

#include <cstring>
#include <limits>
#include <vector>

namespace octavo::testing {
namespace {

TEST_F(State, AFreshTape) {
  const TestMatrix x(DType::kBF16, 1, 1, all_strides()[0], [](int64_t, int64_t) { return 0; });
  Buffer<Tape> begun(unwritten_tape());
  Buffer<Peak> peaks(1);
  Forward f = forward(kWindow, begun.get());
  f.x_peaks = 11;
  f.w_peaks = 13;
  const Measure measure{.x = x.view(), .peaks = peaks.get()};
  kernels::measure_amax(&measure, 1, &f, stream_);
  const Tape tape = begun.one();
  for (const Tape::Operand& operand : tape.operand) EXPECT_EQ(operand.scale, 0.0f);
  EXPECT_EQ(tape.slot, kIndex);
  EXPECT_EQ(tape.generation, kGeneration);
  EXPECT_EQ(tape.ring, kRing);
  EXPECT_EQ(tape.operand[kX].peaks, 11);
  EXPECT_EQ(tape.operand[kW].peaks, 13);
}

// The step and the peaks of x come from another tape, whichever kernel begins this one.
TEST_F(State, ATapeThatTakesOver) {
  const int32_t x_peaks = 300, w_peaks = 2;
  Tape other = {};
  other.operand[kX].scale = 0.75f;
  other.operand[kX].peaks = x_peaks;
  std::vector<Peak> words(kTapeWords + x_peaks);
  std::memcpy(words.data(), &other, sizeof other);
  for (int32_t i = 0; i < x_peaks; ++i) words[kTapeWords + i] = 1000 + i;
  const Buffer<Peak> from(words);
  record(kWindow, 3.0f, 5.0f, 7.0f);
  advance();

  const TestMatrix w(DType::kBF16, 1, 1, all_strides()[0], [](int64_t, int64_t) { return 0x3f80; });
  for (const int way : {0, 1, 2}) {
    std::vector<Peak> unwritten_words(kTapeWords + x_peaks + w_peaks, 0xffffffffu);
    Buffer<Peak> tape(unwritten_words);
    Buffer<Peak> measured(1);
    Buffer<uint8_t> row(1);
    Forward f = forward(kWindow, reinterpret_cast<Tape*>(tape.get()));
    f.x_tape = reinterpret_cast<const Tape*>(from.get());
    f.x_peaks = x_peaks;
    f.w_peaks = w_peaks;
    const Measure measure{.x = w.view(), .operand = kW, .peaks = measured.get()};
    Quantize q;
    q.x = w.view();
    q.operand = kW;
    q.source = StepSource::kSlot;
    q.used = step_on(f.tape, kW);
    q.padded_rows = q.padded_cols = 1;
    q.row = row.get();
    if (way == 0) kernels::begin_tape(f, stream_);
    if (way == 1) kernels::measure_amax(&measure, 1, &f, stream_);
    if (way == 2) kernels::quantize(&q, 1, kWindow, &f, stream_);
    const std::vector<Peak> got = tape.read();
    Tape begun;
    std::memcpy(&begun, got.data(), sizeof begun);
    EXPECT_EQ(begun.operand[kX].scale, 0.75f) << way;
    EXPECT_EQ(begun.operand[kX].peaks, x_peaks) << way;
    EXPECT_EQ(begun.operand[kW].scale, 5.0f / 448.0f) << way;
    EXPECT_EQ(begun.operand[kW].peaks, w_peaks) << way;
    EXPECT_EQ(begun.operand[kG].scale, 7.0f / 57344.0f) << way;
    EXPECT_EQ(begun.slot, kIndex) << way;
    for (int32_t i = 0; i < x_peaks; ++i) ASSERT_EQ(got[kTapeWords + i], 1000u + i) << way;
    EXPECT_EQ(got[kTapeWords + x_peaks], 0xffffffffu) << way;
  }
}

TEST_F(State, RecordKeepsTheLargest) {
  record(kWindow, 3.0f, 5.0f, 7.0f);
  record(kWindow, 2.0f, 6.0f, 0.0f);
  record(kWindow, 3.0f, 5.0f, 100.0f, /*g_nonfinite=*/true);
  const Slot slot = read();
  EXPECT_EQ(slot.policy.id, kWindow.id);
  EXPECT_EQ(slot.policy.history_len, kWindow.history_len);
  EXPECT_EQ(slot.policy.fp8_max[kG], 57344.0f);
  EXPECT_EQ(slot.ring, kRing);
  EXPECT_EQ(slot.operand[kX].pending, 3.0f);
  EXPECT_EQ(slot.operand[kW].pending, 6.0f);
  EXPECT_EQ(slot.operand[kG].pending, 7.0f);
}

// More of them than the kernel has threads.
TEST_F(State, RecordOfManyTiles) {
  record(kWindow, {3.0f, 5.0f, 7.0f}, false, 3001);
  EXPECT_EQ(read().operand[kX].pending, 3.0f);
  EXPECT_EQ(read().operand[kW].pending, 5.0f);
  EXPECT_EQ(read().operand[kG].pending, 7.0f);
  record(kWindow, {8.0f, 9.0f, 10.0f}, true, 3001);
  EXPECT_EQ(read().operand[kX].pending, 8.0f);
  EXPECT_EQ(read().operand[kW].pending, 9.0f);
  EXPECT_EQ(read().operand[kG].pending, 7.0f);
}

TEST_F(State, TheHostIsToldOfAHistory) {
  record(kWindow, 3.0f, 0.0f, 7.0f);
  EXPECT_EQ(seeded(), (std::vector<int32_t>{0, 0, 0}));
  advance();
  EXPECT_EQ(seeded(), (std::vector<int32_t>{kVersion, 0, kVersion}));
  Slot loaded = read();
  loaded.version = kVersion + 1;
  write(loaded);
  advance();  // nothing is pending: told all the same
  EXPECT_EQ(seeded(), (std::vector<int32_t>{kVersion + 1, 0, kVersion + 1}));
}

TEST_F(State, RecordLeavesASlotOfAnotherGenerationAlone) {
  put({.generation = kGeneration + 1});
  record(kWindow, 3.0f, 5.0f, 7.0f);
  EXPECT_EQ(read().policy.id, 0);
  EXPECT_EQ(read().operand[kX].pending, 0.0f);
}

TEST_F(State, AnotherPolicyEmptiesTheRings) {
  record(kWindow, 3.0f, 5.0f, 7.0f);
  advance();
  record(kWindow, 9.0f, 9.0f, 9.0f);
  record(policy_of(8, ScalingKind::kMostRecent, 2), 1.0f, 0.0f, 2.0f);
  const Slot slot = read();
  EXPECT_EQ(slot.policy.id, 8);
  EXPECT_EQ(slot.policy.history_len, 2);
  for (const OperandState& operand : slot.operand) {
    EXPECT_EQ(operand.seeded, 0);
    EXPECT_EQ(operand.due, 0);
    EXPECT_EQ(operand.cursor, 0);
  }
  EXPECT_EQ(slot.operand[kX].pending, 1.0f);
  EXPECT_EQ(slot.operand[kW].pending, 0.0f);
  EXPECT_EQ(slot.operand[kG].pending, 2.0f);
}

TEST_F(State, TheWindowMoves) {
  record(kWindow, 8.0f, 1.0f, 1.0f);
  advance();  // fills the ring with 8
  expect_scale(kX, 8.0f, kWindow);
  for (const float amax : {3.0f, 2.0f, 1.0f}) {
    record(kWindow, amax, 0.0f, 0.0f);
    advance();
    expect_scale(kX, 8.0f, kWindow);
  }
  record(kWindow, 1.5f, 0.0f, 0.0f);
  advance();  // the last 8 is gone
  expect_scale(kX, 3.0f, kWindow);
  expect_scale(kW, 1.0f, kWindow);  // nothing pending: as it was
  EXPECT_EQ(read().operand[kX].pending, 0.0f);
  advance();
  expect_scale(kX, 3.0f, kWindow);
}

TEST_F(State, ClippedStepsAreCounted) {
  const auto step_with = [&](float amax) {
    record(kWindow, amax, amax, amax);
    advance();
  };
  step_with(3.0f);  // the first one had no scale to exceed
  step_with(3.0f);  // the same amax is not past it, whatever the roundings
  step_with(2.0f);
  for (const OperandState& operand : read().operand) EXPECT_EQ(operand.clipped, 0);
  step_with(3.001f);
  step_with(1e30f);
  for (const OperandState& operand : read().operand) EXPECT_EQ(operand.clipped, 2);
}

TEST_F(State, ALongWindow) {
  const ScalingPolicy policy = policy_of(11, ScalingKind::kWindowMax, 100);
  record(policy, 50.0f, 1.0f, 1.0f);
  advance();
  for (int i = 0; i < 99; ++i) {
    record(policy, 1.0f, 0.0f, 0.0f);
    advance();
  }
  expect_scale(kX, 50.0f, policy);
  record(policy, 1.0f, 0.0f, 0.0f);
  advance();
  expect_scale(kX, 1.0f, policy);
}

TEST_F(State, MostRecent) {
  ScalingPolicy policy = policy_of(12, ScalingKind::kMostRecent, 1);
  policy.multiplier = 2.0f;
  policy.power_of_two = 1;
  for (const float amax : {8.0f, 3.0f, 5.0f}) {
    record(policy, amax, amax, amax);
    advance();
    for (const int32_t operand : {kX, kW, kG}) expect_scale(operand, amax, policy);
  }
}

TEST_F(State, AnOptimizerAdvancesItsOwnSlotsAndThoseOfNone) {
  const auto advances = [&](int32_t owner, int32_t optimizer) {
    put({.owner = owner});
    record(kWindow, 3.0f, 5.0f, 7.0f);
    advance(optimizer);
    return read().operand[kX].seeded != 0;
  };
  EXPECT_TRUE(advances(0, 0));
  EXPECT_TRUE(advances(0, 2));
  EXPECT_TRUE(advances(2, 2));
  EXPECT_TRUE(advances(2, 0));
  EXPECT_FALSE(advances(2, 1));
}

TEST_F(State, AStepMadeEmptyAdvancesNothing) {
  Buffer<float> found_inf(std::vector<float>{1.0f});
  record(kWindow, 3.0f, 5.0f, 7.0f);
  kernels::advance(arena_, 0, found_inf.get(), stream_);
  EXPECT_EQ(read().operand[kX].seeded, 0);
  EXPECT_EQ(read().operand[kX].pending, 3.0f);
  found_inf.write({0.0f});
  kernels::advance(arena_, 0, found_inf.get(), stream_);
  EXPECT_EQ(read().operand[kX].seeded, 1);
}

class Custom : public State {
 protected:
  const ScalingPolicy policy_ = policy_of(20, ScalingKind::kCustom, 3);

  void gather() {
    const std::vector<int32_t> indices = {kIndex, 2};  // the second was never in use
    slot_indices_.clear();
    slot_indices_.emplace_back(indices);
    Buffer<float> amax(2 * kOperands * 3);
    Buffer<int32_t> due(2 * kOperands);
    kernels::gather_rings(arena_, policy_, slot_indices_[0].get(), 2, amax.get(), due.get(), stream_);
    amax_ = amax.read();
    due_ = due.read();
  }
  // Gives all three operands a step; returns how many were rejected.
  int32_t apply(float x, float w, float g) {
    Buffer<float> steps(std::vector<float>{x, w, g, 1.0f, 1.0f, 1.0f});
    Buffer<int32_t> due(due_), rejected(1);
    kernels::apply_steps(arena_, policy_, slot_indices_[0].get(), 2, due.get(), steps.get(), rejected.get(), stream_);
    return rejected.one();
  }
  void TearDown() override {
    slot_indices_.clear();
    State::TearDown();
  }

  std::vector<Buffer<int32_t>> slot_indices_;
  std::vector<float> amax_;
  std::vector<int32_t> due_;
};

TEST_F(Custom, TheRingComesOldestFirst) {
  record(policy_, 4.0f, 5.0f, 0.0f);
  advance();
  record(policy_, 1.0f, 0.0f, 0.0f);
  advance();
  record(policy_, 2.0f, 0.0f, 0.0f);
  advance();
  gather();
  EXPECT_EQ(std::vector<float>(amax_.begin(), amax_.begin() + 6), (std::vector<float>{4, 1, 2, 5, 5, 5}));
  EXPECT_EQ(due_, (std::vector<int32_t>{1, 1, 0, 0, 0, 0}));
  record(policy_, 3.0f, 0.0f, 0.0f);
  advance();
  gather();
  EXPECT_EQ(std::vector<float>(amax_.begin(), amax_.begin() + 3), (std::vector<float>{1, 2, 3}));
}

TEST_F(Custom, StepsAreTakenClampedOrRejected) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  record(policy_, 4.0f, 5.0f, 6.0f);
  advance();
  gather();
  EXPECT_EQ(apply(0.25f, 1e-45f, 3e38f), 0);
  EXPECT_EQ(read().operand[kX].scale, 0.25f);
  EXPECT_EQ(read().operand[kW].scale, 0x1p-126f);
  EXPECT_EQ(read().operand[kG].scale, 0x1p126f);
  for (const OperandState& operand : read().operand) EXPECT_EQ(operand.due, 0);

  gather();
  EXPECT_EQ(apply(9.0f, 9.0f, 9.0f), 0);  // none is due
  EXPECT_EQ(read().operand[kX].scale, 0.25f);

  record(policy_, 4.0f, 5.0f, 6.0f);
  advance();
  gather();
  EXPECT_EQ(apply(nan, inf, -1.0f), 3);
  EXPECT_EQ(read().operand[kX].scale, 0.25f);  // the old ones stay
  EXPECT_EQ(read().operand[kW].scale, 0x1p-126f);
  EXPECT_EQ(read().operand[kG].scale, 0x1p126f);
}

TEST_F(Custom, WithoutAnyStepTheFormulaHolds) {
  record(policy_, 4.0f, 5.0f, 6.0f);
  advance();
  gather();
  EXPECT_EQ(apply(0.0f, -0.0f, std::numeric_limits<float>::quiet_NaN()), 3);
  expect_scale(kX, 4.0f, policy_);
  expect_scale(kW, 5.0f, policy_);
  expect_scale(kG, 6.0f, policy_);
}

}  // namespace
}  // namespace octavo::testing
