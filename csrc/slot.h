// SPDX-License-Identifier: Apache-2.0
// The memory layout of the scaling state: what lies in the arena, and the "tape" that a forward hands to its backward.
// Layout only, no arithmetic: the host, the CPU kernels and the CUDA kernels each bring their own, so that the CPU
// kernels stay an independent specification.
#pragma once

#include <cstdint>

namespace octavo {

// The operands of a linear, as indices: input [M, K], weight [N, K], gradient of the output [M, N].
enum Operand : int32_t { kX = 0, kW = 1, kG = 2, kOperands = 3 };

enum class ScalingKind : int32_t {
  kWindowMax = 0,   // delayed: the largest amax of the window
  kMostRecent = 1,  // delayed: the amax of the step before
  kDynamic = 2,     // the tensor's own amax, no history
  kCustom = 3,      // a window, and a step that the user's recipe computes from it
};

// How a slot turns amaxes into steps, by value. Two recipes that scale alike have the same `id` (never 0).
struct ScalingPolicy {
  int32_t id = 0;
  ScalingKind kind = ScalingKind::kWindowMax;
  int32_t history_len = 0;
  float multiplier = 1.0f;  // float32(exp2(margin))
  int32_t power_of_two = 0;
  float fp8_max[kOperands] = {448.0f, 448.0f, 448.0f};
};

struct OperandState {
  float scale;      // the step in force; meaningless while `seeded` is 0
  float pending;    // the largest amax recorded since the last advance; 0: nothing recorded
  int32_t cursor;   // where the ring's next entry goes, which is also its oldest one
  int32_t seeded;   // 0: the ring is empty
  int32_t due;      // custom policies: the ring moved, and the recipe has yet to give the step
  int32_t clipped;  // steps whose amax went past the scale in force, since the ring was last empty
};

// An amax that exceeds scale * fp8_max by more than the roundings of that product was clipped.
constexpr float kClippedFrom = 1.000001f;

// One linear's state. A slot that was freed and given to another parameter has another generation.
struct Slot {
  int32_t generation;
  int32_t version;       // changes whenever the host empties or loads the slot; unique in the arena
  int32_t owner;         // number of the optimizer that steps the parameter, 0: none known
  int32_t ring;          // position of the three rings in the arena's pool of floats, [kOperands, policy.history_len]
  ScalingPolicy policy;  // policy.id 0: never recorded
  OperandState operand[kOperands];
};

// The arena seen from a kernel, passed by value. Chunks double in size and never move, so that an index stays good:
// chunk c holds kFirst << c entries and begins at index kFirst * (2^c - 1).
struct ArenaView {
  static constexpr int32_t kFirstSlots = 1024;
  static constexpr int32_t kFirstFloats = 1 << 17;
  static constexpr int kChunks = 14;
  Slot* slots[kChunks];
  float* floats[kChunks];
  int32_t* seeded[kChunks];  // as `slots`, kOperands each: the slot's version, written after the operand's first
                             // history under it, in memory that the host can read without waiting
  int32_t slot_count;        // slots ever handed out; a freed one keeps its contents until it is taken again
};

// The largest finite |x| of one part of a tensor, as the bits of that float, which are ordered like the floats
// themselves; kNonFinite is set in it where an Inf or a NaN was among the elements.
using Peak = uint32_t;
constexpr Peak kNonFinite = 0x80000000u;

// Travels, as values, from a forward to its backward: never an address, since saved-tensor hooks may copy it away
// and back. It holds the slot's steps as they were at forward, g's too, and is followed by the peaks of x, then those
// of w: one for each tile that a kernel worked on, so that nothing has to be zero before, or added up between blocks.
// slot < 0: stateless, nothing is recorded.
struct Tape {
  struct alignas(16) Operand {  // cuBLASLt wants the scales so aligned
    float scale;                // what the bytes were made with; g's is 0 where it has no history
    int32_t peaks;              // how many of them follow; none of g
    uint32_t blocks;            // a GPU's: 0 between kernels, as is
    Peak amax;                  // this
  } operand[kOperands];
  int32_t slot;
  int32_t generation;
  int32_t ring;
};

// A GPU's tiles are this wide and high; on a CPU a matrix is one tile.
constexpr int64_t kPeakTile = 128;

constexpr int64_t kTapeWords = sizeof(Tape) / sizeof(int32_t);
static_assert(kTapeWords == 16);

}  // namespace octavo
