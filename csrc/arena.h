// SPDX-License-Identifier: Apache-2.0
// Where the scaling state lives: per device, slots and rings at fixed addresses, in chunks that never move and are
// never given back, outside PyTorch's caching allocator (whose pools a CUDA graph may own). Bookkeeping is on the host,
// all values are on the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "slot.h"

namespace octavo {

// How to get memory on a type of device. The CPU's is built in; the CUDA half registers its own when it is loaded.
struct DeviceMemory {
  void* (*allocate)(std::size_t bytes, c10::Device device);         // zeroed, never freed
  void* (*allocate_shared)(std::size_t bytes, c10::Device device);  // the same, on the host, where both can write
  uint64_t (*capture)(c10::Device device);                          // the number of the graph that is captured, or 0
  uint64_t (*stream)(c10::Device device);                           // the current one, as a number
  void (*join)(uint64_t stream, c10::Device device);                // the current one waits for that one
};
void register_device_memory(c10::DeviceType type, DeviceMemory memory);

class Arena {
 public:
  // Where a call's kernels go: the number of the stream, and of the graph that is captured on it (0: none).
  struct Place {
    uint64_t stream = 0;
    uint64_t capture = 0;
  };

  // The arena of a device, made on first use. Throws where this build has no kernels for the device.
  static Arena& of(c10::Device device);
  // The arenas made so far.
  static std::vector<Arena*> all();

  explicit Arena(c10::Device device);

  struct Handle {
    int32_t slot;
    int32_t generation;  // the slot's first version too
  };
  using Rings = std::vector<std::pair<int64_t, int32_t>>;  // length of history, position in the pool
  // A clean slot. Throws while a CUDA graph is being captured: the cleaning would be replayed with it.
  Handle take_slot();
  // The slot's rings stay with it until it is taken again: until it is cleaned it may still be advanced.
  void free_slot(Handle handle, Rings rings) noexcept;

  // Three rings of `history_len` floats each, as a position in the pool; contents undefined.
  int32_t take_rings(int64_t history_len);

  ArenaView view();
  const Slot* slot_at(int32_t slot) const;  // on the device
  c10::Device device() const { return device_; }

  // int32 words of a slot / floats of its rings, as tensors over the arena's own memory.
  at::Tensor slot_words(int32_t slot);
  at::Tensor ring_floats(int32_t ring, int64_t history_len);
  bool is_capturing() const { return memory_.capture(device_) != 0; }

  // For a slot that is emptied or loaded: what was known of its history is no longer.
  int32_t new_version();
  // Whether the device has told that all operands of the slot have had a history under this version. Waits for nothing.
  bool is_seeded(int32_t slot, int32_t version) const;
  // Says that the current stream uses or empties slots; false once more than one stream has. The second one waits once
  // for what the first has under way. In a capture: asks only.
  bool note_stream(const Place& place);
  bool note_stream() { return note_stream(place()); }
  // The same of an advance. One in a graph that is captured may be replayed on any stream.
  void note_advance();
  Place place() const { return {memory_.stream(device_), memory_.capture(device_)}; }
  // For tests: as if no stream had been seen yet.
  void forget_streams() { stream_ = kNoStream, one_stream_ = true; }
  // Some tensor of the arena, to dispatch on its device with.
  at::Tensor anchor() { return slot_words(0); }

  int64_t slots_in_use();
  int64_t bytes();

 private:
  static constexpr uint64_t kNoStream = ~uint64_t{0};
  void grow_to_slot(int32_t slot);
  int32_t bump_floats(int64_t count);
  void refuse_capture() const;

  const c10::Device device_;
  const DeviceMemory memory_;
  std::mutex mutex_;
  ArenaView view_ = {};
  int64_t bytes_ = 0;
  int64_t next_float_ = 0;
  int32_t next_generation_ = 1;
  std::vector<std::pair<int32_t, Rings>> free_slots_;
  std::map<int64_t, std::vector<int32_t>> free_rings_;  // by length
  std::atomic<uint64_t> stream_ = kNoStream;
  std::atomic<bool> one_stream_ = true;
};

}  // namespace octavo
