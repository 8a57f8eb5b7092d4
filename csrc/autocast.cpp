// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <mutex>

#include "aten_linear.h"
#include "ops/device.h"
#include "region.h"
#include "shared_input.h"

namespace octavo {
namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

// A kind that PyTorch does not use. The enum has a fixed underlying type, so every value of it is valid.
constexpr auto kRegionKind = static_cast<DebugInfoKind>(0xF8);

std::atomic<std::shared_ptr<Region>>& default_region() {
  static auto* instance = new std::atomic<std::shared_ptr<Region>>;
  return *instance;
}

// The kind on top of this thread's stack, one of PyTorch's own.
DebugInfoKind top_kind() {
  for (int kind = 0; kind < 256; ++kind) {
    const auto candidate = static_cast<DebugInfoKind>(kind);
    if (!ThreadLocalDebugInfo::get(candidate)) continue;
    try {
      ThreadLocalDebugInfo::_peek(candidate);
      return candidate;
    } catch (const c10::Error&) {  // present, but further down
    }
  }
  TORCH_CHECK(false, "octavo: the FP8 region is left on another thread, or in another order, than it was entered");
}

// Regions that compiled graphs refer to.
struct KnownRegions {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Region>, std::less<>> by_text;
};
KnownRegions& known_regions() {
  static auto* instance = new KnownRegions;
  return *instance;
}

}  // namespace

Region::Region(std::shared_ptr<const Recipe> with, const AutocastOptions& options)
    : LinearRecipe{policy_of(with, options.format), operand_types(options.format), with->options().products,
                   options.keep_fp8_weights, options.share_inputs},
      enabled(options.enabled),
      recipe(std::move(with)),
      format(options.format),
      include_float32(options.include_float32),
      on_fallback(options.on_fallback),
      small_auto_(recipe->options().small == "auto"),
      excluded_(options.exclude) {
  const auto& small = recipe->options().small;
  if (!small.empty() && !small_auto_) small_ = small_products(small);
  for (const auto& weight : excluded_) identities_.insert(weight.unsafeGetTensorImpl());
}

bool Region::excludes(const at::Tensor& weight) const {
  if (identities_.empty()) return false;
  return identities_.contains(weight.unsafeGetTensorImpl()) ||
         (weight.is_view() && identities_.contains(weight._base().unsafeGetTensorImpl()));
}

const SmallProducts* Region::small_on(c10::Device device) const {
  if (!small_auto_) return small_.get();
  // The answer for the last device of this thread, until another table is loaded.
  struct Answer {
    c10::Device device{c10::kMeta};
    std::size_t tables = 0;
    std::shared_ptr<const SmallProducts> products;
  };
  static thread_local Answer last;
  const auto count = small_tables_loaded();
  if (last.device != device || last.tables != count) {
    last = {device, count, small_products_of(ops::device_name(device))};
  }
  return last.products.get();
}

std::string text_of(const Region& region) {
  auto& known = known_regions();
  std::lock_guard lock(known.mutex);
  const auto tables = small_tables_loaded();
  if (!region.text.empty() && region.text_tables == tables) return region.text;
  region.text_tables = tables;
  region.text =
      c10::str(text_of(static_cast<const LinearRecipe&>(region)), "; share_inputs=", region.share_inputs,
               ", include_float32=", region.include_float32, ", on_fallback=", static_cast<int>(region.on_fallback),
               ", small=", region.recipe->options().small, ", tables loaded: ", tables);
  auto& entry = known.by_text[region.text];
  if (!entry) {
    const AutocastOptions options{.format = region.format,
                                  .include_float32 = region.include_float32,
                                  .share_inputs = region.share_inputs,
                                  .keep_fp8_weights = region.keep_fp8_weights,
                                  .on_fallback = region.on_fallback};
    entry = std::make_shared<Region>(region.recipe, options);
  }
  return region.text;
}

std::shared_ptr<const Region> region_by_text(std::string_view text) {
  auto& known = known_regions();
  std::lock_guard lock(known.mutex);
  const auto found = known.by_text.find(text);
  TORCH_CHECK(found != known.by_text.end(), "octavo: no region of this process is \"", text, "\"");
  return found->second;
}

void push_region(const std::shared_ptr<Region>& region) {
  intercept_aten_linear();
  ThreadLocalDebugInfo::_push(kRegionKind, region);
  SharedInput::of_this_thread().forget();
}

void pop_region(const std::shared_ptr<Region>& region) {
  SharedInput::of_this_thread().forget();
  // PyTorch's stack is strict, and a profiler begun inside the region may still lie on top: lift it, and put it back.
  std::vector<std::pair<DebugInfoKind, std::shared_ptr<c10::DebugInfoBase>>> lifted;
  while (ThreadLocalDebugInfo::current()) {
    const auto kind = top_kind();
    auto info = ThreadLocalDebugInfo::_pop(kind);
    if (info == region) break;
    lifted.emplace_back(kind, std::move(info));
  }
  for (auto it = lifted.rbegin(); it != lifted.rend(); ++it) ThreadLocalDebugInfo::_push(it->first, it->second);
}

std::shared_ptr<Region> active_region() {
  if (auto* top = static_cast<Region*>(ThreadLocalDebugInfo::get(kRegionKind)))
    return top->enabled ? top->shared_from_this() : nullptr;
  return default_region().load();
}

void set_default_region(std::shared_ptr<Region> region) {
  if (region) intercept_aten_linear();
  default_region().store(std::move(region));
}

Autocast::Autocast(std::shared_ptr<const Recipe> recipe, const AutocastOptions& options) {
  TORCH_CHECK(recipe != nullptr, "octavo: the recipe of an Autocast must not be null");
  region_ = std::make_shared<Region>(std::move(recipe), options);
  push_region(region_);
}

Autocast::~Autocast() { pop_region(region_); }

bool is_autocast_enabled() { return active_region() != nullptr; }

}  // namespace octavo
