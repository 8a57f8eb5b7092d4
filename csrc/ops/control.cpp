// SPDX-License-Identifier: Apache-2.0
// What a program in another language needs beside the kernels: regions, steps, state, the report. Private to the
// package: names and arguments may change with any version.
#include <ATen/Functions.h>
#include <octavo/gemm_table.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "../arena.h"
#include "../linear_state.h"
#include "../region.h"
#include "../report.h"
#include "../step.h"
#include "../weight_copies.h"
#include "device.h"
#include "gemm_tables.h"
#include "primitives.h"

namespace octavo {
namespace {

using at::Tensor;

Fp8Format parse_format(const std::string& name) {
  if (name == "e4m3") return Fp8Format::E4M3;
  if (name == "e5m2") return Fp8Format::E5M2;
  TORCH_CHECK(name == "hybrid", "octavo: fp8_format must be \"hybrid\", \"e4m3\" or \"e5m2\", not \"", name, "\"");
  return Fp8Format::HYBRID;
}

OnFallback parse_on_fallback(const std::string& name) {
  if (name == "allow") return OnFallback::kAllow;
  if (name == "warn") return OnFallback::kWarn;
  TORCH_CHECK(name == "error", "octavo: on_fallback must be \"allow\", \"warn\" or \"error\", not \"", name, "\"");
  return OnFallback::kError;
}

Precision parse_precision(const std::string& name) {
  if (name == "fast") return Precision::kFast;
  if (name == "accurate") return Precision::kAccurate;
  TORCH_CHECK(name == "high", "octavo: a product is \"fast\", \"accurate\" or \"high\", not \"", name, "\"");
  return Precision::kHigh;
}

// kind: "max", "most_recent", "dynamic", or "custom", whose policy is known by `identity`.
std::shared_ptr<const Recipe> parse_recipe(const std::string& kind, int64_t history_len, double margin,
                                           bool power_of_two, const std::string& identity,
                                           const std::vector<std::string>& products, const std::string& small) {
  TORCH_CHECK(products.size() == 3, "octavo: three products are named, not ", products.size());
  RecipeOptions options{.history_len = history_len, .margin = margin, .power_of_two = power_of_two};
  options.products = {parse_precision(products[0]), parse_precision(products[1]), parse_precision(products[2])};
  options.small = small;
  options.algorithm = kind == "most_recent" ? DelayedAlgorithm::kMostRecent : DelayedAlgorithm::kMax;
  if (kind == "dynamic") return std::make_shared<DynamicScaling>(options);
  if (kind == "custom") return external_recipe(options, identity);
  return std::make_shared<DelayedScaling>(options);
}

// A region as an object of the dispatcher's type system.
struct RegionHandle final : torch::CustomClassHolder {
  RegionHandle(bool enabled, const std::string& kind, int64_t history_len, double margin, bool power_of_two,
               const std::string& identity, const std::vector<std::string>& products, const std::string& small,
               const std::string& format, bool include_float32, bool share_inputs, bool keep_fp8_weights,
               const std::string& on_fallback, std::vector<Tensor> exclude)
      : region(std::make_shared<Region>(
            parse_recipe(kind, history_len, margin, power_of_two, identity, products, small),
            AutocastOptions{enabled, parse_format(format), std::move(exclude), include_float32, share_inputs,
                            keep_fp8_weights, parse_on_fallback(on_fallback)})) {}

  void enter() { push_region(region); }
  void exit() { pop_region(region); }
  void make_default() { set_default_region(region); }
  std::string text() { return text_of(*region); }

  const std::shared_ptr<Region> region;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, std::string, Tensor> read_or_nothing(const Tensor& weight) {
  if (auto state = read_state(weight))
    return {state->scale, state->pending, state->seeded, state->history, state->policy, state->clipped};
  return {at::empty({0}), at::empty({0}), at::empty({0}), at::empty({0}), "", at::empty({0})};
}

std::vector<std::string> external_policies() {
  std::vector<std::string> keys;
  for (const auto& [policy, recipe] : custom_policies())
    if (!recipe) keys.push_back(policy_key(policy->id));
  return keys;
}

std::tuple<std::vector<int64_t>, std::vector<std::string>> report() {
  std::vector<int64_t> numbers;
  std::vector<std::string> reasons;
  for (const auto& row : report_rows()) {
    numbers.insert(numbers.end(), {row.m, row.n, row.k, row.calls});
    reasons.emplace_back(describe(row.outcome));
  }
  return {numbers, reasons};
}

// Of each table what it is, and all the refused entries, as many of them of each as `entries_and_refused` says.
std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>, std::vector<std::string>>
gemm_tables() {
  std::vector<std::string> names, hashes, refused;
  std::vector<int64_t> counts;
  for (const auto& table : ops::gemm_tables()) {
    names.push_back(table.name);
    hashes.push_back(table.hash);
    counts.insert(counts.end(), {table.entries, static_cast<int64_t>(table.refused.size())});
    refused.insert(refused.end(), table.refused.begin(), table.refused.end());
  }
  return {names, hashes, counts, refused};
}

std::tuple<int64_t, int64_t> arena_use() {
  int64_t slots = 0, bytes = 0;
  for (auto* arena : Arena::all()) {
    slots += arena->slots_in_use();
    bytes += arena->bytes();
  }
  return {slots, bytes};
}

}  // namespace
}  // namespace octavo

TORCH_LIBRARY_FRAGMENT(octavo, m) {
  using namespace octavo;
  m.class_<RegionHandle>("Region")
      .def(torch::init<bool, const std::string&, int64_t, double, bool, const std::string&,
                       const std::vector<std::string>&, const std::string&, const std::string&, bool, bool, bool,
                       const std::string&, std::vector<Tensor>>())
      .def("enter", &RegionHandle::enter)
      .def("exit", &RegionHandle::exit)
      .def("make_default", &RegionHandle::make_default)
      .def("text", &RegionHandle::text);
  m.def("_load_small_table(str path) -> str", &load_small_table);
  m.def("_small_tables() -> (str[] names, str[] devices, str[] hashes)", [] {
    std::vector<std::string> names, devices, hashes;
    for (const auto& table : small_tables()) {
      names.push_back(table.name);
      devices.push_back(table.device);
      hashes.push_back(table.hash);
    }
    return std::tuple(names, devices, hashes);
  });
  m.def("_enter_weight_scope() -> ()", &enter_weight_scope);
  m.def("_leave_weight_scope() -> ()", &leave_weight_scope);
  m.def("_forget_streams() -> ()", [] {
    for (auto* arena : Arena::all()) arena->forget_streams();
  });
  m.def("_clear_default() -> ()", [] { set_default_region(nullptr); });
  // Marks in a compiler's graph, which are taken out before it runs: where regions begin and end, by number.
  m.def("_begin_region(int settings) -> ()", [](int64_t) {});
  m.def("_end_region() -> ()", [] {});
  m.def("_is_active() -> bool", [] { return active_region() != nullptr; });
  // The region in force, as text for graphs, or "", and what it excludes.
  m.def("_active_region() -> (str text, Tensor[] excluded)", [] {
    const auto region = active_region();
    return region ? std::tuple(text_of(*region), region->excluded()) : std::tuple(std::string(), std::vector<Tensor>());
  });
  m.def("_claim(Tensor[] parameters, int owner, bool take_over) -> int",
        [](const std::vector<Tensor>& parameters, int64_t owner, bool take_over) {
          return claim(parameters, owner, take_over);
        });
  m.def("_release(int owner) -> ()", &release);
  m.def("_states_made() -> int", &states_made);
  m.def("_step(int owner, Tensor? found_inf) -> ()", &advance);
  m.def("_reset() -> ()", &reset_states);
  m.def("_external_policies() -> str[]", &external_policies);
  m.def("_slots_using(str policy) -> Tensor[]", [](const std::string& key) {
    // Aliases: a tensor that Python has seen may not be freed under a mutex, as the library's own may.
    auto slots = slots_using(policy_by_key(key));
    for (auto& tensor : slots) tensor = tensor.alias();
    return slots;
  });
  m.def("_rings(Tensor slots, str policy) -> (Tensor amax, Tensor due)",
        [](const Tensor& slots, const std::string& key) { return ops::gather_rings(slots, policy_by_key(key).id); });
  m.def("_apply_custom_steps(Tensor slots, Tensor due, Tensor steps, str policy) -> ()",
        [](const Tensor& slots, const Tensor& due, const Tensor& steps, const std::string& key) {
          apply_custom_steps(slots, due, steps, policy_by_key(key));
        });
  m.def(
      "_read_state(Tensor weight) -> (Tensor scale, Tensor pending, Tensor seeded, Tensor history, str policy, Tensor "
      "clipped)",
      &read_or_nothing);
  m.def(
      "_write_state(Tensor weight, Tensor scale, Tensor pending, Tensor seeded, Tensor history, str policy) -> ()",
      [](const Tensor& weight, const Tensor& scale, const Tensor& pending, const Tensor& seeded, const Tensor& history,
         const std::string& policy) { write_state(weight, {scale, pending, seeded, history, policy}); });
  m.def("_slot_of(Tensor weight, str policy) -> (int slot, int generation, int ring, bool seeded, int policy)",
        [](const Tensor& weight, const std::string& key) -> std::tuple<int64_t, int64_t, int64_t, bool, int64_t> {
          const auto& policy = policy_by_key(key);
          const auto slot = slot_of(weight, policy, /*trains=*/false).use;
          return {slot.slot, slot.generation, slot.ring, slot.seeded, policy.id};
        });
  m.def("_slices(Tensor parameter) -> int[][]", &slices_of);
  m.def("_is_policy(str policy) -> bool", &is_policy_key);
  m.def("_report() -> (int[] m_n_k_calls, str[] reasons)", &report);
  m.def("_clear_report() -> ()", &clear_report);
  m.def("_fp8_support(Device device) -> str",
        [](c10::Device device) -> std::string { return ops::describe(ops::fp8_support(device)); });
  m.def("_set_emulated(bool on) -> ()", &ops::set_emulated);
  m.def("_is_emulated() -> bool", &ops::is_emulated);
  m.def("_load_gemm_table(str path) -> ()", [](const std::string& path) { load_gemm_table(path); });
  m.def("_gemm_tables() -> (str[] names, str[] hashes, int[] entries_and_refused, str[] refused)", &gemm_tables);
  m.def("_arena_use() -> (int slots, int bytes)", &arena_use);
}
