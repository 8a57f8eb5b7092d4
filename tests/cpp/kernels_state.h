// SPDX-License-Identifier: Apache-2.0
// A slot in an arena on the device, and what a training loop does with it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels_matrix.h"

namespace octavo::testing {

using kernels::StepRule;
using kernels::StepSource;

constexpr float kFp8Max[kOperands] = {448.0f, 448.0f, 57344.0f};

inline ScalingPolicy policy_of(int32_t id, ScalingKind kind, int32_t history_len) {
  ScalingPolicy policy;
  policy.id = id;
  policy.kind = kind;
  policy.history_len = history_len;
  for (int o = 0; o < kOperands; ++o) policy.fp8_max[o] = kFp8Max[o];
  return policy;
}

inline const ScalingPolicy kWindow = policy_of(7, ScalingKind::kWindowMax, 4);

// An arena of two chunks. The slot in use lies in the second one, and its rings span the border of both.
class State : public GpuTest {
 protected:
  static constexpr int32_t kIndex = 1500;
  static constexpr int32_t kRing = ArenaView::kFirstFloats - 5;
  static constexpr int32_t kGeneration = 3;

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    for (int c = 0; c < 2; ++c) {
      slots_.emplace_back(size_t{ArenaView::kFirstSlots} << c);
      floats_.emplace_back(size_t{ArenaView::kFirstFloats} << c);
    }
    arena_ = {};
    for (int c = 0; c < 2; ++c) {
      arena_.slots[c] = slots_[c].get();
      arena_.floats[c] = floats_[c].get();
    }
    arena_.slot_count = kIndex + 1;
    tape_.emplace_back(1);
    put({.generation = kGeneration});
    init_tape(tape(), kWindow);
  }
  void TearDown() override {
    slots_.clear();
    floats_.clear();
    tape_.clear();
    GpuTest::TearDown();
  }

  struct Given {
    int32_t generation = kGeneration;
    int32_t owner = 0;
  };
  void put(const Given& given) {
    Slot slot = {};
    slot.generation = given.generation;
    slot.owner = given.owner;
    write(slot);
  }
  Slot read() { return slots_[1].read()[kIndex - ArenaView::kFirstSlots]; }
  void write(const Slot& slot) {
    std::vector<Slot> all = slots_[1].read();
    all[kIndex - ArenaView::kFirstSlots] = slot;
    slots_[1].write(all);
  }
  Tape* tape() { return tape_[0].get(); }
  void init_tape(Tape* tape, const ScalingPolicy& policy, int32_t slot = kIndex, int32_t generation = kGeneration) {
    kernels::init_tape(tape, slot, generation, kRing, policy, arena_, stream_);
  }

  // A backward that saw these amaxes.
  void record(const ScalingPolicy& policy, float x, float w, float g, int32_t g_nonfinite = 0) {
    Tape seen = tape_[0].one();
    seen.operand[kX].amax = x;
    seen.operand[kW].amax = w;
    Buffer<Tape> copy(std::vector<Tape>{seen});
    Buffer<TapedOperand> gradient(std::vector<TapedOperand>{{1.0f, g, g_nonfinite, 0}});
    kernels::record(copy.get(), gradient.get(), policy, arena_, stream_);
    require(cudaStreamSynchronize(stream_), "record");
  }
  void advance(int32_t owner = 0) {
    kernels::advance(arena_, owner, nullptr, stream_);
    require(cudaStreamSynchronize(stream_), "advance");
  }
  void expect_scale(int32_t operand, float amax, const ScalingPolicy& policy) {
    EXPECT_EQ(read().operand[operand].scale,
              reference::step_from_amax(amax, policy.fp8_max[operand], policy.multiplier, policy.power_of_two != 0));
  }

  // The quantisation of an operand by what a new tape says: the amax pass, then the cast.
  TapedOperand quantized(const TestMatrix& x, const ScalingPolicy& policy, Operand operand, int32_t slot = kIndex,
                         int32_t generation = kGeneration) {
    StepRule rule;
    rule.source = StepSource::kHistory;
    rule.operand = operand;
    rule.policy = policy;
    Buffer<Tape> tape(1);
    init_tape(tape.get(), policy, slot, generation);
    Buffer<TapedOperand> taped(std::vector<TapedOperand>{tape.one().operand[operand]});
    if (operand == kG) kernels::init_gradient(taped.get(), tape.get(), stream_);
    Buffer<uint8_t> row(x.rows() * x.cols());
    kernels::measure_amax(x.view(), taped.get(), rule, stream_);
    measured_amax_ = taped.one().amax;
    Quantize q;
    q.x = x.view();
    q.rule = rule;
    q.taped = taped.get();
    q.padded_rows = x.rows();
    q.padded_cols = x.cols();
    q.row = row.get();
    kernels::quantize(q, stream_);
    const TapedOperand after = taped.one();
    EXPECT_TRUE(same(row.read(), expected_copy(x, q.format, after.scale, x.rows(), x.cols(), false), x.cols()));
    EXPECT_EQ(after.amax, x.amax());
    return after;
  }

  std::vector<Buffer<Slot>> slots_;
  std::vector<Buffer<float>> floats_;
  std::vector<Buffer<Tape>> tape_;
  ArenaView arena_;
  float measured_amax_ = -1.0f;  // what the amax pass of `quantized` left
};

}  // namespace octavo::testing
