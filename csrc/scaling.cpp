// SPDX-License-Identifier: Apache-2.0
// What an optimizer's step sets off: the arenas advance, and recipes of the user's own give their steps.
#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <octavo/scaling.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <mutex>

#include "linear_state.h"
#include "ops/primitives.h"
#include "step.h"

namespace octavo {
namespace {

Fp8Format format_of(float fp8_max_value) { return fp8_max_value > 448.0f ? Fp8Format::E5M2 : Fp8Format::E4M3; }

void apply_recipe(const ScalingPolicy& policy, const Recipe& recipe) {
  for (const auto& slots : slots_using(policy)) {
    const auto [amax, due] = ops::gather_rings(slots, policy.id);
    auto steps = at::ones({slots.numel(), kOperands}, amax.options());
    for (int64_t i = 0; i < kOperands; ++i) {
      const auto step = recipe.scale_from_history(amax.select(1, i), format_of(policy.fp8_max[i]));
      TORCH_CHECK(step.numel() == slots.numel(), "octavo: ", recipe.identity(), "::scale_from_history returned ",
                  step.numel(), " steps for ", slots.numel(), " slots");
      steps.select(1, i).copy_(step.reshape({-1}));
    }
    apply_custom_steps(slots, due, steps, policy);
  }
}

// A count of refused steps on its way from the device to the host.
struct Refused {
  at::Tensor count;  // on the CPU
  c10::Event copied;
  std::string policy;
};
struct RefusedSteps {
  std::mutex mutex;
  std::vector<Refused> pending;
};
RefusedSteps& refused_steps() {
  static auto* instance = new RefusedSteps;
  return *instance;
}

void tell_refused(int64_t count, const std::string& policy) {
  if (count > 0)
    TORCH_WARN("octavo: the recipe of policy \"", policy, "\" gave ", count,
               " steps that are not finite and positive; those slots keep the step they had");
}

void tell_arrived() {
  auto& refused = refused_steps();
  std::lock_guard lock(refused.mutex);
  std::erase_if(refused.pending, [](const Refused& r) {
    if (!r.copied.query()) return false;
    tell_refused(r.count.item<int>(), r.policy);
    return true;
  });
}

void note_refused(const at::Tensor& count, const ScalingPolicy& policy) {
  if (count.is_cpu()) return tell_refused(count.item<int>(), policy_key(policy.id));
  if (Arena::of(count.device()).is_capturing()) return;  // a replay has nobody to tell
  constexpr std::size_t kMaxUnderway = 64;
  auto& refused = refused_steps();
  std::lock_guard lock(refused.mutex);
  if (refused.pending.size() >= kMaxUnderway) return;
  auto host = at::empty({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  host.copy_(count, /*non_blocking=*/true);
  c10::Event event(count.device().type());
  event.record(c10::impl::VirtualGuardImpl(count.device().type()).getStream(count.device()));
  refused.pending.push_back({std::move(host), std::move(event), policy_key(policy.id)});
}

}  // namespace

void apply_custom_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps,
                        const ScalingPolicy& policy) {
  note_refused(ops::apply_steps(slots, due, steps.to(slots.device(), at::kFloat).contiguous(), policy.id), policy);
}

void advance(int64_t owner, const std::optional<at::Tensor>& found_inf) {
  tell_arrived();
  advance_states(owner, found_inf);
  const c10::InferenceMode no_inference(false);
  const at::NoGradGuard no_grad;
  for (const auto& [policy, recipe] : custom_policies())
    if (recipe) apply_recipe(*policy, *recipe);
}

void step() {
  if (torch::autograd::get_current_graph_task_id() == -1) return advance(0, std::nullopt);
  // An optimizer that steps inside a backward: the rest of that backward still belongs to the old scales.
  torch::autograd::Engine::get_default_engine().queue_callback([] { advance(0, std::nullopt); });
}

}  // namespace octavo
