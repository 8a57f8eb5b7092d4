// SPDX-License-Identifier: Apache-2.0
// A slot in an arena on the device, and what a training loop does with it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels_matrix.h"

namespace octavo::testing {

using kernels::Forward;
using kernels::Measure;
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
  static constexpr int32_t kVersion = 5;

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    for (int c = 0; c < 2; ++c) {
      slots_.emplace_back(size_t{ArenaView::kFirstSlots} << c);
      floats_.emplace_back(size_t{ArenaView::kFirstFloats} << c);
      seeded_.emplace_back(kOperands * (size_t{ArenaView::kFirstSlots} << c));
    }
    arena_ = {};
    for (int c = 0; c < 2; ++c) {
      arena_.slots[c] = slots_[c].get();
      arena_.floats[c] = floats_[c].get();
      arena_.seeded[c] = seeded_[c].get();
    }
    arena_.slot_count = kIndex + 1;
    put({.generation = kGeneration});
  }
  void TearDown() override {
    slots_.clear();
    floats_.clear();
    seeded_.clear();
    GpuTest::TearDown();
  }

  struct Given {
    int32_t generation = kGeneration;
    int32_t owner = 0;
  };
  void put(const Given& given) {
    Slot slot = {};
    slot.generation = given.generation;
    slot.version = kVersion;
    slot.owner = given.owner;
    write(slot);
  }
  Slot read() { return slots_[1].read()[kIndex - ArenaView::kFirstSlots]; }
  void write(const Slot& slot) {
    std::vector<Slot> all = slots_[1].read();
    all[kIndex - ArenaView::kFirstSlots] = slot;
    slots_[1].write(all);
  }
  // A new allocation holds anything.
  static std::vector<Tape> unwritten_tape() {
    std::vector<Tape> tape(1);
    std::memset(tape.data(), 0xff, sizeof(Tape));
    return tape;
  }
  // What the device has told the host of the slot.
  std::vector<int32_t> seeded() {
    const std::vector<int32_t> all = seeded_[1].read();
    const auto first = all.begin() + kOperands * (kIndex - ArenaView::kFirstSlots);
    return {first, first + kOperands};
  }
  Forward forward(const ScalingPolicy& policy, Tape* tape, int32_t slot = kIndex, int32_t generation = kGeneration) {
    Forward f;
    f.slot = slot;
    f.generation = generation;
    f.ring = kRing;
    f.tape = tape;
    f.policy = policy.id;
    f.place = slots_[1].get() + (kIndex - ArenaView::kFirstSlots);
    return f;
  }

  // A backward that saw these amaxes, each in the second one of two tiles.
  void record(const ScalingPolicy& policy, float x, float w, float g, bool g_nonfinite = false) {
    record(policy, {x, w, g}, g_nonfinite, 2);
  }
  void record(const ScalingPolicy& policy, const std::vector<float>& amax, bool g_nonfinite, int32_t tiles) {
    Tape tape = {.operand = {}, .slot = kIndex, .generation = kGeneration, .ring = kRing};
    tape.operand[kX].peaks = tape.operand[kW].peaks = tiles;
    std::vector<Peak> words(kTapeWords + 2 * tiles), g_words(tiles);
    std::memcpy(words.data(), &tape, sizeof tape);
    words[kTapeWords + tiles - 1] = std::bit_cast<Peak>(amax[kX]);
    words[kTapeWords + 2 * tiles - 1] = std::bit_cast<Peak>(amax[kW]);
    g_words[tiles - 1] = std::bit_cast<Peak>(amax[kG]);
    if (g_nonfinite) g_words[0] |= kNonFinite;
    const Buffer<Peak> taped(words), g(g_words);
    kernels::EndOfBackward end;
    end.tape = reinterpret_cast<const Tape*>(taped.get());
    end.g_peaks = g.get();
    end.g_count = tiles;
    end.policy = policy;
    end.arena = arena_;
    kernels::end_backward(end, stream_);
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

  // The step of an operand's quantisation: the amax pass, then the cast, as a forward does it, or, for g, a backward.
  float quantized(const TestMatrix& x, const ScalingPolicy& policy, Operand operand, int32_t slot = kIndex,
                  int32_t generation = kGeneration) {
    Buffer<Tape> tape(unwritten_tape());
    const Forward f = forward(policy, tape.get(), slot, generation);
    float* const on_tape = step_on(tape.get(), operand);
    Measure measure{.x = x.view(), .operand = operand};
    Buffer<Peak> measured(unwritten(kernels::peaks_of(measure)));
    measure.peaks = measured.get();
    if (operand == kG) {
      Measure of_x = measure;
      of_x.operand = kX;
      kernels::measure_amax(&of_x, 1, &f, stream_);
      measure.known = on_tape;
    }
    kernels::measure_amax(&measure, 1, operand == kG ? nullptr : &f, stream_);
    measured_amax_ = combined(measured.read()).amax;

    Buffer<float> g_step(1);
    Quantize q = row_of(x, operand);
    q.source = StepSource::kHistory;
    q.given = on_tape;
    q.used = operand == kG ? g_step.get() : on_tape;
    q.measured = measured.get();
    q.measured_count = static_cast<int32_t>(measured.size());
    return run(q, x, policy, f);
  }
  // The same for a slot that is known to have a history.
  float quantized_from_slot(const TestMatrix& x, const ScalingPolicy& policy, Operand operand,
                            int32_t generation = kGeneration) {
    Buffer<Tape> tape(unwritten_tape());
    const Forward f = forward(policy, tape.get(), kIndex, generation);
    Quantize q = row_of(x, operand);
    q.source = StepSource::kSlot;
    q.used = step_on(tape.get(), operand);
    const float step = run(q, x, policy, f);
    EXPECT_EQ(tape.one().slot, kIndex);
    EXPECT_EQ(tape.one().generation, generation);
    EXPECT_EQ(tape.one().ring, kRing);
    EXPECT_EQ(tape.one().operand[kX].peaks, 0);
    EXPECT_EQ(tape.one().operand[kW].peaks, 0);
    const Slot slot = read();
    EXPECT_EQ(tape.one().operand[kG].scale, generation == kGeneration ? slot.operand[kG].scale : 0.0f);
    return step;
  }

  std::vector<Buffer<int32_t>> seeded_;
  std::vector<Buffer<Slot>> slots_;
  std::vector<Buffer<float>> floats_;
  ArenaView arena_;
  float measured_amax_ = -1.0f;  // what the amax pass of `quantized` left

  static float* step_on(Tape* tape, Operand operand) {
    return reinterpret_cast<float*>(reinterpret_cast<Tape::Operand*>(tape) + operand);
  }

 private:
  static Quantize row_of(const TestMatrix& x, Operand operand) {
    Quantize q;
    q.x = x.view();
    q.operand = operand;
    q.padded_rows = x.rows();
    q.padded_cols = x.cols();
    return q;
  }
  // Runs q, and checks its bytes and peaks against the step that it says it used.
  float run(Quantize q, const TestMatrix& x, const ScalingPolicy& policy, const Forward& f) {
    Buffer<uint8_t> row(x.rows() * x.cols());
    Buffer<Peak> peaks(unwritten(kernels::tiles_of(q)));
    q.row = row.get();
    q.peaks = peaks.get();
    kernels::quantize(&q, 1, policy, &f, stream_);
    float step;
    require(cudaStreamSynchronize(stream_), "quantize");
    require(cudaMemcpy(&step, q.used, sizeof step, cudaMemcpyDeviceToHost), "cudaMemcpy");
    EXPECT_TRUE(same(row.read(), expected_copy(x, q.format, step, x.rows(), x.cols(), false), x.cols()));
    EXPECT_EQ(combined(peaks.read()).amax, x.amax());
    return step;
  }
};

}  // namespace octavo::testing
