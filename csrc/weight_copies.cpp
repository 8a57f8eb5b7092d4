// SPDX-License-Identifier: Apache-2.0
#include "weight_copies.h"

#include <octavo/autocast.h>

#include <map>
#include <mutex>
#include <set>

#include "leaf.h"

namespace octavo {
namespace {

class WeightCopies;

struct Scope {
  std::mutex mutex;  // guards all of it, and every WeightCopies
  int64_t depth = 0;
  uint64_t epoch = 0;  // another one with every outermost scope and every step
  std::set<WeightCopies*> alive;
};
Scope& scope() {
  static auto* instance = new Scope;
  return *instance;
}
std::atomic<bool> active = false;

class WeightCopies final {
 public:
  struct Entry {
    ops::Made made;
    CopyKey key;
    Content content;
    uint64_t epoch;
    bool records;
    bool inference;  // no autograd can save them
  };

  WeightCopies() { scope().alive.insert(this); }
  ~WeightCopies() {
    std::lock_guard lock(scope().mutex);
    scope().alive.erase(this);
  }

  std::map<ViewKey, Entry> entries;
};

// Out of the hooks, so that no tensor is freed under the mutex.
std::vector<WeightCopies::Entry> all_entries(Scope& s) {
  std::vector<WeightCopies::Entry> entries;
  for (auto* copies : s.alive) {
    for (auto& [key, entry] : copies->entries) entries.push_back(std::move(entry));
    copies->entries.clear();
  }
  return entries;
}

}  // namespace

void enter_weight_scope() {
  auto& s = scope();
  std::lock_guard lock(s.mutex);
  if (s.depth++ == 0) ++s.epoch;
  active = true;
}

void leave_weight_scope() {
  auto& s = scope();
  std::vector<WeightCopies::Entry> freed;
  std::lock_guard lock(s.mutex);
  TORCH_CHECK(s.depth > 0, "octavo: a scope of unchanged weights is left that was not entered");
  if (--s.depth > 0) return;
  active = false;
  freed = all_entries(s);
}

bool in_weight_scope() { return active.load(std::memory_order_relaxed); }

void weights_changed() {
  if (!in_weight_scope()) return;
  auto& s = scope();
  std::vector<WeightCopies::Entry> freed;
  std::lock_guard lock(s.mutex);
  ++s.epoch;
  freed = all_entries(s);
}

ops::Made find_weight_copies(const at::Tensor& weight, const CopyKey& key, bool records) {
  if (weight.is_inference()) return {};
  const auto [leaf, part] = leaf_of(weight);
  if (!leaf.defined()) return {};
  auto& s = scope();
  std::lock_guard lock(s.mutex);
  auto* copies = find_kept<WeightCopies>(leaf);
  if (!copies) return {};
  const auto found = copies->entries.find(part);
  if (found == copies->entries.end()) return {};
  const auto& entry = found->second;
  const bool is_same = entry.key == key && entry.content.is_still_of(weight) && entry.epoch == s.epoch;
  const bool serves = (entry.records || !records) && (!entry.inference || c10::InferenceMode::is_enabled());
  return is_same && serves ? entry.made : ops::Made();
}

WeightStamp stamp_of(const at::Tensor& weight) {
  if (weight.is_inference()) return {};
  auto& s = scope();
  std::lock_guard lock(s.mutex);
  return {Content(weight), s.epoch};
}

void keep_weight_copies(const at::Tensor& weight, const CopyKey& key, const WeightStamp& stamp, bool records,
                        const ops::Made& made) {
  if (weight.is_inference()) return;
  const auto [leaf, part] = leaf_of(weight);
  if (!leaf.defined()) return;
  auto& s = scope();
  WeightCopies::Entry entry{made, key, stamp.content, stamp.epoch, records, c10::InferenceMode::is_enabled()};
  std::lock_guard lock(s.mutex);
  if (s.depth == 0 || s.epoch != stamp.epoch) return;
  auto& entries = kept_with<WeightCopies>(leaf).entries;
  int64_t kept = made.row.numel();
  for (const auto& [other, old] : entries)
    if (other != part) kept += old.made.row.numel();
  if (!entries.empty() && kept > 2 * leaf.numel()) return;
  std::swap(entries[part], entry);
}

UnchangedWeights::UnchangedWeights() { enter_weight_scope(); }
UnchangedWeights::~UnchangedWeights() { leave_weight_scope(); }

}  // namespace octavo
