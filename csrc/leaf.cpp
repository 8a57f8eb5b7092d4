// SPDX-License-Identifier: Apache-2.0
#include "leaf.h"

#include <atomic>
#include <iterator>
#include <list>
#include <mutex>

namespace octavo {
namespace {

struct LeftBehind {
  WeakLeaf leaf;
  const std::type_info* type;
  std::shared_ptr<void> kept;
};
struct Orphans {
  std::mutex mutex;
  std::list<LeftBehind> all;
  std::atomic<std::size_t> count = 0;
};
Orphans& orphans() {
  static auto* instance = new Orphans;
  return *instance;
}

}  // namespace

WeightPart leaf_of(const at::Tensor& weight) {
  if (!weight.is_view()) return {weight.is_leaf() ? weight : at::Tensor(), {}};
  auto base = weight._base();
  if (!base.is_leaf()) return {};
  // A part of a buffer that learns by itself is a parameter; a slice of a parameter is not, also under no_grad.
  if (weight.is_leaf() && weight.requires_grad() && !base.requires_grad()) return {weight, {}};
  ViewKey key = {weight.storage_offset()};
  key.insert(key.end(), weight.sizes().begin(), weight.sizes().end());
  key.insert(key.end(), weight.strides().begin(), weight.strides().end());
  return {std::move(base), std::move(key)};
}

std::mutex& hooks_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

void leave_behind(WeakLeaf leaf, const std::type_info& type, std::shared_ptr<void> kept) {
  auto& o = orphans();
  std::list<LeftBehind> dead;  // ended after the lock: what they held may take locks of its own
  std::lock_guard lock(o.mutex);
  for (auto it = o.all.begin(); it != o.all.end();) {
    const auto next = std::next(it);
    if (it->leaf.expired()) dead.splice(dead.end(), o.all, it);
    it = next;
  }
  o.all.push_back({std::move(leaf), &type, std::move(kept)});
  o.count = o.all.size();
}

std::shared_ptr<void> take_back(const at::Tensor& leaf, const std::type_info& type) {
  auto& o = orphans();
  if (o.count == 0) return nullptr;
  std::lock_guard lock(o.mutex);
  for (auto it = o.all.begin(); it != o.all.end(); ++it) {
    if (it->leaf._unsafe_get_target() != leaf.unsafeGetTensorImpl() || *it->type != type) continue;
    auto kept = std::move(it->kept);
    o.all.erase(it);
    o.count = o.all.size();
    return kept;
  }
  return nullptr;
}

}  // namespace octavo
