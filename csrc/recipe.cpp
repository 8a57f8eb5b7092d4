// SPDX-License-Identifier: Apache-2.0
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "policy.h"

namespace octavo {
namespace {

constexpr double kMaxMargin = 64;
constexpr int64_t kMaxHistory = 65536;

// Interned policies; ids are positions + 1. Never destroyed and never moved.
struct Policies {
  struct Entry {
    ScalingPolicy policy;
    std::string key;
    std::shared_ptr<const Recipe> recipe;  // of custom policies that the library can call
  };
  std::mutex mutex;
  std::deque<Entry> entries;
  std::map<std::string, int32_t> ids;
};
Policies& policies() {
  static auto* instance = new Policies;
  return *instance;
}

// A policy's values, then the name of its code where that is a user's. %a keeps a float exact.
std::string key_of(const ScalingPolicy& p, const std::string& identity) {
  char text[128];
  std::snprintf(text, sizeof text, "%d:%d:%a:%d:%g,%g,%g:", static_cast<int>(p.kind), p.history_len, p.multiplier,
                p.power_of_two, p.fp8_max[kX], p.fp8_max[kW], p.fp8_max[kG]);
  return p.kind == ScalingKind::kCustom ? text + identity : text;
}

// Only what a recipe can have: a key may come out of a file.
std::optional<ScalingPolicy> parse_key(const std::string& key) {
  ScalingPolicy p;
  int kind = -1, end = 0;
  const int fields = std::sscanf(key.c_str(), "%d:%d:%a:%d:%g,%g,%g:%n", &kind, &p.history_len, &p.multiplier,
                                 &p.power_of_two, &p.fp8_max[kX], &p.fp8_max[kW], &p.fp8_max[kG], &end);
  if (fields != 7 || end == 0 || kind < 0 || kind > 3) return std::nullopt;
  p.kind = static_cast<ScalingKind>(kind);
  const bool has_history = p.kind != ScalingKind::kDynamic;
  const bool good_history = has_history ? p.history_len >= 1 && p.history_len <= kMaxHistory : p.history_len == 0;
  const bool good_multiplier = p.multiplier >= std::exp2(-kMaxMargin) && p.multiplier <= std::exp2(kMaxMargin);
  const bool good_flag = p.power_of_two == 0 || p.power_of_two == 1;
  if (!good_history || !good_multiplier || !good_flag) return std::nullopt;
  for (const float max : p.fp8_max)
    if (max != fp8_max(at::kFloat8_e4m3fn) && max != fp8_max(at::kFloat8_e5m2)) return std::nullopt;
  return key_of(p, key.substr(end)) == key ? std::optional(p) : std::nullopt;
}

const ScalingPolicy& intern(ScalingPolicy policy, const std::string& key, const std::shared_ptr<const Recipe>& recipe) {
  auto& table = policies();
  std::lock_guard lock(table.mutex);
  auto [found, added] = table.ids.try_emplace(key, static_cast<int32_t>(table.entries.size()) + 1);
  if (added) {
    policy.id = found->second;
    table.entries.push_back({policy, key, nullptr});
  }
  auto& entry = table.entries[found->second - 1];
  if (policy.kind == ScalingKind::kCustom && recipe) entry.recipe = recipe;
  return entry.policy;
}

class ExternalRecipe final : public Recipe {
 public:
  ExternalRecipe(const RecipeOptions& options, std::string identity)
      : Recipe(options), identity_(std::move(identity)) {}
  at::Tensor scale_from_history(const at::Tensor&, Fp8Format) const override {
    TORCH_CHECK(false, "octavo: the recipe ", identity_, " can only be evaluated by the program that defines it");
  }
  std::string identity() const override { return identity_; }

 private:
  const std::string identity_;
};

ScalingKind kind_of(const Recipe& recipe) {
  if (dynamic_cast<const DynamicScaling*>(&recipe)) return ScalingKind::kDynamic;
  if (!dynamic_cast<const DelayedScaling*>(&recipe)) return ScalingKind::kCustom;
  return recipe.options().algorithm == DelayedAlgorithm::kMax ? ScalingKind::kWindowMax : ScalingKind::kMostRecent;
}

// Round up to a power of two by the bits: a log2 in floats is off next to powers of two.
at::Tensor round_up_to_power_of_two(const at::Tensor& step) {
  return step.view(at::kInt).add(0x7fffff).bitwise_and(0x7f800000).view(at::kFloat);
}

// numerics: step = (amax / FP8_MAX) * 2^margin, clamped, rounded up if asked; 1 for amax 0. Divided by a tensor, since
// a GPU multiplies with the reciprocal of a scalar.
at::Tensor step_from_amax(const at::Tensor& amax, Fp8Format format, const RecipeOptions& options) {
  const float max = fp8_max(format == Fp8Format::E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn);
  auto step = amax.div(at::full_like(amax, max)).mul(static_cast<float>(std::exp2(options.margin)));
  step = step.clamp(std::ldexp(1.0, -126), std::ldexp(1.0, 126));
  if (options.power_of_two) step = round_up_to_power_of_two(step);
  return at::where(amax.eq(0), at::ones_like(step), step);
}

}  // namespace

OperandTypes operand_types(Fp8Format format) {
  const auto forward = format == Fp8Format::E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  const auto gradient = format == Fp8Format::E4M3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
  return {{forward, forward, gradient}};
}

float fp8_max(at::ScalarType type) {
  TORCH_CHECK(type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2,
              "octavo: the format must be float8_e4m3fn or float8_e5m2, not ", type);
  return type == at::kFloat8_e5m2 ? 57344.0f : 448.0f;
}

Recipe::Recipe(const RecipeOptions& options) : options_(options) {
  TORCH_CHECK(options.history_len >= 1 && options.history_len <= kMaxHistory, "octavo: history_len must be 1 to ",
              kMaxHistory, ", not ", options.history_len);
  TORCH_CHECK(std::isfinite(options.margin) && std::abs(options.margin) <= kMaxMargin, "octavo: margin must be -",
              kMaxMargin, " to ", kMaxMargin, ", not ", options.margin);
}
Recipe::~Recipe() = default;

at::Tensor DelayedScaling::scale_from_history(const at::Tensor& amax, Fp8Format format) const {
  const bool latest = options().algorithm == DelayedAlgorithm::kMostRecent;
  return step_from_amax(latest ? amax.select(-1, -1) : amax.amax(-1), format, options());
}
std::string DelayedScaling::identity() const { return "DelayedScaling"; }

at::Tensor DynamicScaling::scale_from_history(const at::Tensor& amax, Fp8Format format) const {
  return step_from_amax(amax.select(-1, -1), format, options());
}
std::string DynamicScaling::identity() const { return "DynamicScaling"; }

std::shared_ptr<const Recipe> external_recipe(const RecipeOptions& options, const std::string& identity) {
  return std::make_shared<ExternalRecipe>(options, identity);
}

const ScalingPolicy& policy_of(const std::shared_ptr<const Recipe>& recipe, Fp8Format format) {
  const auto& options = recipe->options();
  ScalingPolicy policy;
  policy.kind = kind_of(*recipe);
  policy.history_len = policy.kind == ScalingKind::kDynamic ? 0 : static_cast<int32_t>(options.history_len);
  policy.multiplier = static_cast<float>(std::exp2(options.margin));
  policy.power_of_two = options.power_of_two;
  const auto types = operand_types(format);
  for (int i = 0; i < kOperands; ++i) policy.fp8_max[i] = fp8_max(types.type[i]);
  const bool callable = !dynamic_cast<const ExternalRecipe*>(recipe.get());
  return intern(policy, key_of(policy, recipe->identity()), callable ? recipe : nullptr);
}

const ScalingPolicy& policy_by_id(int64_t id) {
  static thread_local const ScalingPolicy* last = nullptr;  // asked for by every op; policies live for ever
  if (last && last->id == id) return *last;
  auto& table = policies();
  std::lock_guard lock(table.mutex);
  TORCH_CHECK(id >= 1 && id <= static_cast<int64_t>(table.entries.size()), "octavo: no scaling policy ", id);
  return *(last = &table.entries[id - 1].policy);
}

const std::string& policy_key(int64_t id) {
  policy_by_id(id);
  auto& table = policies();
  std::lock_guard lock(table.mutex);
  return table.entries[id - 1].key;
}

const ScalingPolicy& policy_by_key(const std::string& key) {
  const auto policy = parse_key(key);
  TORCH_CHECK(policy, "octavo: \"", key, "\" is not a scaling policy of this version");
  return intern(*policy, key, nullptr);
}

bool is_policy_key(const std::string& key) { return parse_key(key).has_value(); }

namespace {

// Another one whenever the meaning of _compiled_forward or _compiled_backward changes (ops/schema.cpp).
constexpr int kGraphContract = 1;

constexpr char kPrecisions[] = {'f', 'a', 'h'};  // of Precision

Precision precision_of(char letter) {
  const auto* end = kPrecisions + sizeof kPrecisions;
  const auto* found = std::find(kPrecisions, end, letter);
  TORCH_CHECK(found != end, "octavo: '", letter, "' is no precision of a product");
  return static_cast<Precision>(found - kPrecisions);
}

LinearRecipe parse_recipe(const std::string& text) {
  std::istringstream in(text);
  int contract = 0, keeps = 0;
  std::string products, key;
  in >> contract >> products >> keeps >> std::ws;
  std::getline(in, key);
  TORCH_CHECK(in && contract == kGraphContract && products.size() == 3,
              "octavo: a compiled graph of another version of ", "Octavo (it says \"", text,
              "\"); compile it anew, with torch.compiler.reset()");
  LinearRecipe recipe;
  recipe.policy = policy_by_key(key);
  recipe.products = {precision_of(products[0]), precision_of(products[1]), precision_of(products[2])};
  recipe.keep_fp8_weights = keeps != 0;
  for (int i = 0; i < kOperands; ++i)
    recipe.types.type[i] =
        recipe.policy.fp8_max[i] == fp8_max(at::kFloat8_e5m2) ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  return recipe;
}

}  // namespace

std::string text_of(const LinearRecipe& recipe) {
  const auto letter = [](Precision precision) { return kPrecisions[static_cast<int>(precision)]; };
  const auto& p = recipe.products;
  return c10::str(kGraphContract, ' ', letter(p.forward), letter(p.dgrad), letter(p.wgrad), ' ',
                  recipe.keep_fp8_weights, ' ', policy_key(recipe.policy.id));
}

const LinearRecipe& recipe_by_text(std::string_view text) {
  struct Known {
    std::mutex mutex;
    std::map<std::string, LinearRecipe, std::less<>> by_text;  // never erased, so that what is handed out stays
  };
  static auto* known = new Known;
  std::lock_guard lock(known->mutex);
  auto found = known->by_text.find(text);
  if (found == known->by_text.end()) {
    const std::string copy(text);
    found = known->by_text.emplace(copy, parse_recipe(copy)).first;
  }
  return found->second;
}

std::vector<CustomPolicy> custom_policies() {
  auto& table = policies();
  std::lock_guard lock(table.mutex);
  std::vector<CustomPolicy> found;
  for (auto& entry : table.entries)
    if (entry.policy.kind == ScalingKind::kCustom) found.push_back({&entry.policy, entry.recipe});
  return found;
}

}  // namespace octavo
