// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cstdlib>
#include <memory>

namespace octavo {
namespace {

void* allocate_host(std::size_t bytes, c10::Device) {
  void* memory = std::calloc(bytes, 1);
  TORCH_CHECK(memory != nullptr, "octavo: out of memory for ", bytes, " bytes of scaling state");
  return memory;
}

struct Registry {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceMemory> memory = {
      {c10::kCPU,
       {&allocate_host, &allocate_host, [](c10::Device) -> uint64_t { return 0; },
        [](c10::Device) -> uint64_t { return 0; }, [](uint64_t, c10::Device) {}}}};
  std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::unique_ptr<Arena>> arenas;
};

// Never destroyed: parameters may outlive every static of this library.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

// Chunk c begins at entry first * (2^c - 1).
int chunk_of(int64_t index, int64_t first) { return std::bit_width(static_cast<uint64_t>(index / first + 1)) - 1; }
int64_t chunk_begin(int chunk, int64_t first) { return first * ((int64_t{1} << chunk) - 1); }

DeviceMemory memory_for(c10::Device device) {
  const auto& known = registry().memory;
  const auto found = known.find(device.type());
  TORCH_CHECK(found != known.end(), "octavo: this build has no kernels for ", device.type(),
              " tensors; rebuild it with CUDA (`make build CUDA=1`), or keep them outside the FP8 region");
  return found->second;
}

}  // namespace

void register_device_memory(c10::DeviceType type, DeviceMemory memory) { registry().memory[type] = memory; }

Arena& Arena::of(c10::Device device) {
  const auto index = device.is_cpu() ? c10::DeviceIndex{-1} : device.index();
  static thread_local std::pair<c10::Device, Arena*> last = {c10::Device(c10::kMeta), nullptr};
  if (last.second && last.first == c10::Device(device.type(), index)) return *last.second;
  auto& r = registry();
  std::lock_guard lock(r.mutex);
  auto& arena = r.arenas[{device.type(), index}];
  if (!arena) arena = std::make_unique<Arena>(c10::Device(device.type(), index));
  last = {arena->device(), arena.get()};  // arenas live for ever
  return *arena;
}

std::vector<Arena*> Arena::all() {
  auto& r = registry();
  std::lock_guard lock(r.mutex);
  std::vector<Arena*> arenas;
  for (auto& [device, arena] : r.arenas)
    if (arena) arenas.push_back(arena.get());
  return arenas;
}

Arena::Arena(c10::Device device) : device_(device), memory_(memory_for(device)) {}

Arena::Handle Arena::take_slot() {
  std::lock_guard lock(mutex_);
  refuse_capture();
  int32_t slot = view_.slot_count;
  if (free_slots_.empty()) {
    grow_to_slot(slot);
    ++view_.slot_count;
  } else {
    slot = free_slots_.back().first;
    for (auto [length, ring] : free_slots_.back().second) free_rings_[length].push_back(ring);
    free_slots_.pop_back();
  }
  const Handle handle{slot, next_generation_++};
  const c10::OptionalDeviceGuard guard(device_);
  note_stream();
  auto words = slot_words(slot);
  words.zero_();
  words[offsetof(Slot, generation) / sizeof(int32_t)].fill_(handle.generation);
  words[offsetof(Slot, version) / sizeof(int32_t)].fill_(handle.generation);
  return handle;
}

void Arena::free_slot(Handle handle, Rings rings) noexcept {
  // Cleaned when it is taken again: this may run at exit, with the device already gone.
  std::lock_guard lock(mutex_);
  free_slots_.emplace_back(handle.slot, std::move(rings));
}

int32_t Arena::take_rings(int64_t history_len) {
  std::lock_guard lock(mutex_);
  auto& free = free_rings_[history_len];
  if (free.empty()) return bump_floats(kOperands * history_len);
  const int32_t ring = free.back();
  free.pop_back();
  return ring;
}

ArenaView Arena::view() {
  std::lock_guard lock(mutex_);
  return view_;
}

const Slot* Arena::slot_at(int32_t slot) const {
  const int chunk = chunk_of(slot, ArenaView::kFirstSlots);
  return view_.slots[chunk] + (slot - chunk_begin(chunk, ArenaView::kFirstSlots));
}

at::Tensor Arena::slot_words(int32_t slot) {
  return at::from_blob(const_cast<Slot*>(slot_at(slot)), {static_cast<int64_t>(sizeof(Slot) / sizeof(int32_t))},
                       at::TensorOptions().dtype(at::kInt).device(device_));
}

at::Tensor Arena::ring_floats(int32_t ring, int64_t history_len) {
  const int chunk = chunk_of(ring, ArenaView::kFirstFloats);
  float* address = view_.floats[chunk] + (ring - chunk_begin(chunk, ArenaView::kFirstFloats));
  return at::from_blob(address, {kOperands, history_len}, at::TensorOptions().dtype(at::kFloat).device(device_));
}

int64_t Arena::slots_in_use() {
  std::lock_guard lock(mutex_);
  return view_.slot_count - static_cast<int64_t>(free_slots_.size());
}

int64_t Arena::bytes() {
  std::lock_guard lock(mutex_);
  return bytes_;
}

int32_t Arena::new_version() {
  std::lock_guard lock(mutex_);
  return next_generation_++;
}

bool Arena::is_seeded(int32_t slot, int32_t version) const {
  const int chunk = chunk_of(slot, ArenaView::kFirstSlots);
  int32_t* words = view_.seeded[chunk] + kOperands * (slot - chunk_begin(chunk, ArenaView::kFirstSlots));
  for (int o = 0; o < kOperands; ++o)
    if (std::atomic_ref(words[o]).load(std::memory_order_relaxed) != version) return false;
  return true;
}

bool Arena::note_stream(const Place& place) {
  if (!one_stream_.load(std::memory_order_relaxed)) return false;
  if (place.capture) return true;
  uint64_t first = kNoStream;
  if (stream_.compare_exchange_strong(first, place.stream) || first == place.stream) return true;
  one_stream_ = false;
  memory_.join(first, device_);  // kernels on it may rely on being alone
  return false;
}

void Arena::note_advance() {
  if (is_capturing()) {
    one_stream_ = false;
  } else {
    note_stream();
  }
}

void Arena::grow_to_slot(int32_t slot) {
  const int chunk = chunk_of(slot, ArenaView::kFirstSlots);
  TORCH_CHECK(chunk < ArenaView::kChunks, "octavo: more than ", chunk_begin(ArenaView::kChunks, ArenaView::kFirstSlots),
              " linears alive on ", device_);
  if (!view_.slots[chunk]) {
    const auto count = static_cast<std::size_t>(ArenaView::kFirstSlots) << chunk;
    const auto grow = [&]<class T>(T*& place, std::size_t bytes, auto allocate) {
      if (place) return;  // the second of the two may have failed
      place = static_cast<T*>(allocate(bytes, device_));
      bytes_ += static_cast<int64_t>(bytes);
    };
    grow(view_.seeded[chunk], sizeof(int32_t) * kOperands * count, memory_.allocate_shared);
    grow(view_.slots[chunk], sizeof(Slot) * count, memory_.allocate);
  }
}

int32_t Arena::bump_floats(int64_t count) {
  // The rings of one linear lie in one chunk: skip what is left of a chunk that is too small for them.
  for (int chunk = chunk_of(next_float_, ArenaView::kFirstFloats); chunk < ArenaView::kChunks; ++chunk) {
    const int64_t begin = std::max(next_float_, chunk_begin(chunk, ArenaView::kFirstFloats));
    const int64_t end = chunk_begin(chunk + 1, ArenaView::kFirstFloats);
    if (begin + count > end) continue;
    if (!view_.floats[chunk]) {
      refuse_capture();
      const auto bytes = sizeof(float) * (static_cast<std::size_t>(ArenaView::kFirstFloats) << chunk);
      view_.floats[chunk] = static_cast<float*>(memory_.allocate(bytes, device_));
      bytes_ += static_cast<int64_t>(bytes);
    }
    next_float_ = begin + count;
    return static_cast<int32_t>(begin);
  }
  TORCH_CHECK(false, "octavo: no room for an amax history of ", count, " floats on ", device_,
              "; use a shorter history_len");
}

void Arena::refuse_capture() const {
  TORCH_CHECK(!is_capturing(),
              "octavo: a linear met its first FP8 forward while a CUDA graph is being captured; run one training step "
              "before the capture, so that its scaling state exists");
}

}  // namespace octavo
