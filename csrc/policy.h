// SPDX-License-Identifier: Apache-2.0
// Recipes by value: what the ops are told of a recipe, and the names under which equal recipes meet.
#pragma once

#include <octavo/recipe.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "slot.h"

namespace octavo {

// The FP8 types of a linear's operands, x, w and g.
struct OperandTypes {
  at::ScalarType type[kOperands];
};
OperandTypes operand_types(Fp8Format format);
float fp8_max(at::ScalarType type);

// The policy of a recipe under a format: equal values give the same policy (and id) for the life of the process.
const ScalingPolicy& policy_of(const std::shared_ptr<const Recipe>& recipe, Fp8Format format);
// A recipe whose policy lives outside the library (a Python class): its identity stands in for it.
std::shared_ptr<const Recipe> external_recipe(const RecipeOptions& options, const std::string& identity);

const ScalingPolicy& policy_by_id(int64_t id);
// A policy as text and back; `policy_by_key` throws for a text that no policy can have.
const std::string& policy_key(int64_t id);
const ScalingPolicy& policy_by_key(const std::string& key);
bool is_policy_key(const std::string& key);

inline bool in_fp8(Precision precision) { return precision != Precision::kHigh; }
inline bool is_fast(Precision precision) { return precision == Precision::kFast; }

// What a linear's forward and backward have to know of a region: plain values, which a compiled graph can carry.
struct LinearRecipe {
  ScalingPolicy policy;
  OperandTypes types;
  Products products;
  bool keep_fp8_weights = false;
  bool share_inputs = false;
};
// As text and back, without share_inputs: nothing outlives an op of a compiled graph. The text begins with the version
// of what the ops of such graphs mean, since graphs are kept on disk. Throws for a text of another version.
std::string text_of(const LinearRecipe& recipe);
const LinearRecipe& recipe_by_text(std::string_view text);

// Custom policies known so far, each with its recipe (null if external).
struct CustomPolicy {
  const ScalingPolicy* policy;
  std::shared_ptr<const Recipe> recipe;
};
std::vector<CustomPolicy> custom_policies();

}  // namespace octavo
