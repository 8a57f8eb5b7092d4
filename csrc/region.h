// SPDX-License-Identifier: Apache-2.0
// The region in force. It lives in c10::ThreadLocalDebugInfo, which PyTorch carries to the threads that run a backward,
// so that what is recomputed there (activation checkpointing) is recomputed in FP8.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <octavo/autocast.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "policy.h"
#include "small_products.h"

namespace octavo {

struct Region final : c10::DebugInfoBase, LinearRecipe, std::enable_shared_from_this<Region> {
  Region(std::shared_ptr<const Recipe> recipe, const AutocastOptions& options);
  bool excludes(const at::Tensor& weight) const;
  // The table that says which linears are too small for FP8 on this device; null: none.
  const SmallProducts* small_on(c10::Device device) const;

  bool enabled;
  std::shared_ptr<const Recipe> recipe;
  Fp8Format format;
  bool include_float32;
  OnFallback on_fallback;

  const std::vector<at::Tensor>& excluded() const { return excluded_; }

  // What text_of has made last, of so many tables; guarded by its mutex.
  mutable std::string text;
  mutable std::size_t text_tables = 0;

 private:
  std::shared_ptr<const SmallProducts> small_;  // by name
  bool small_auto_;
  std::vector<at::Tensor> excluded_;  // keeps them alive, so that their identity stays theirs
  std::unordered_set<const c10::TensorImpl*> identities_;
};

void push_region(const std::shared_ptr<Region>& region);
// Takes `region` off this thread's stack, also from below what others have put on top of it since.
void pop_region(const std::shared_ptr<Region>& region);

// A region without its exclusions as text, by which graphs that a compiler makes in it refer to it: equal for equal
// regions, another one when a table of small linears has been loaded. Good in this process alone.
std::string text_of(const Region& region);
std::shared_ptr<const Region> region_by_text(std::string_view text);

// The region of this thread, else the process-wide one; null where nothing runs in FP8.
std::shared_ptr<Region> active_region();
// The process-wide region that holds where a thread has none of its own; null for off.
void set_default_region(std::shared_ptr<Region> region);

}  // namespace octavo
