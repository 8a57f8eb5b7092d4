// SPDX-License-Identifier: Apache-2.0
// The library as a C++ program meets it: regions, linears, steps, recipes of its own.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <octavo/autocast.h>
#include <octavo/linear.h>
#include <octavo/ops.h>
#include <octavo/recipe.h>
#include <octavo/scaling.h>
#include <octavo/small.h>
#include <torch/autograd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

namespace {

using at::Tensor;

Tensor random(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); }
Tensor parameter(at::IntArrayRef sizes) { return random(sizes).set_requires_grad(true); }

// y = x w^T by the kernel interface, with the step that dynamic scaling takes.
Tensor by_hand(const Tensor& x, const Tensor& w, double headroom = 1) {
  const auto step = [&](const Tensor& t) { return t.abs().amax().to(at::kFloat).div(448.0f).mul(headroom).detach(); };
  return std::get<0>(octavo::linear_forward_fp8(x.detach(), w.detach(), {}, step(x), step(w), at::kFloat8_e4m3fn));
}

TEST(Autocast, LinearsRunInFp8InsideAndAsBeforeOutside) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const auto outside = at::linear(x, w);
  {
    const octavo::Autocast guard;
    EXPECT_TRUE(octavo::is_autocast_enabled());
    const auto inside = at::linear(x, w);
    EXPECT_TRUE(at::equal(inside, by_hand(x, w)));
    EXPECT_FALSE(at::equal(inside, outside));
  }
  EXPECT_FALSE(octavo::is_autocast_enabled());
  EXPECT_TRUE(at::equal(at::linear(x, w), outside));
}

TEST(Autocast, NestsAndRestores) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const auto plain = at::linear(x, w);
  const octavo::Autocast outer;
  {
    const octavo::Autocast inner(std::make_shared<octavo::DelayedScaling>(), {.enabled = false});
    EXPECT_FALSE(octavo::is_autocast_enabled());
    EXPECT_TRUE(at::equal(at::linear(x, w), plain));
  }
  EXPECT_TRUE(octavo::is_autocast_enabled());
}

TEST(Autocast, WhatCannotRunIsAnErrorWhereThatIsAskedFor) {
  const auto x = random({8, 32}), w = parameter({24, 32}), bias = random({8, 24});
  const auto outside = at::linear(x, w, bias);
  {
    const octavo::Autocast allow;
    EXPECT_TRUE(at::equal(at::linear(x, w, bias), outside));
  }
  const octavo::Autocast error(std::make_shared<octavo::DelayedScaling>(), {.on_fallback = octavo::OnFallback::kError});
  EXPECT_THROW(at::linear(x, w, bias), c10::Error);
  EXPECT_TRUE(octavo::is_autocast_enabled());
  EXPECT_TRUE(at::equal(at::linear(x, w), by_hand(x, w)));
}

TEST(Autocast, BelongsToItsThread) {
  const octavo::Autocast guard;
  bool elsewhere = true;
  std::thread([&] { elsewhere = octavo::is_autocast_enabled(); }).join();
  EXPECT_FALSE(elsewhere);
}

TEST(Autocast, LeavesExcludedWeightsAlone) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const auto plain = at::linear(x, w);
  const octavo::Autocast guard(std::make_shared<octavo::DelayedScaling>(), {.exclude = {w}});
  EXPECT_TRUE(at::equal(at::linear(x, w), plain));
}

TEST(Autocast, RefusesNoRecipe) { EXPECT_THROW(octavo::Autocast(nullptr), c10::Error); }

TEST(Linear, RunsWithoutARegionAndSaysWhyItCannot) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  EXPECT_TRUE(at::equal(octavo::linear(x, w), by_hand(x, w)));
  EXPECT_THROW(octavo::linear(x.to(at::kFloat), w.to(at::kFloat)), c10::Error);
  EXPECT_THROW(octavo::linear(x, random({24, 31})), c10::Error);
}

TEST(Step, GivesDelayedScalingItsHistory) {
  const auto w = parameter({24, 32});
  const auto large = random({8, 32}) * 4, small = random({8, 32});
  octavo::linear(large, w).sum().backward();
  EXPECT_TRUE(at::equal(octavo::linear(small, w), by_hand(small, w)));  // no step yet: its own amax
  octavo::step();
  const auto step_x = large.abs().amax().to(at::kFloat).div(448.0f),
             step_w = w.detach().abs().amax().to(at::kFloat).div(448.0f);
  const auto delayed =
      std::get<0>(octavo::linear_forward_fp8(small, w.detach(), {}, step_x, step_w, at::kFloat8_e4m3fn));
  EXPECT_TRUE(at::equal(octavo::linear(small, w), delayed));
}

// A policy that the built-in ones do not have: a percentile of the window.
class Percentile final : public octavo::Recipe {
 public:
  Percentile(double quantile, const octavo::RecipeOptions& options) : Recipe(options), quantile_(quantile) {}
  Tensor scale_from_history(const Tensor& amax, octavo::Fp8Format format) const override {
    const double max = format == octavo::Fp8Format::E5M2 ? 57344.0 : 448.0;
    return std::get<0>(amax.sort(-1)).select(-1, static_cast<int64_t>(quantile_ * (amax.size(-1) - 1))) / max;
  }
  std::string identity() const override { return "Percentile(" + std::to_string(quantile_) + ")"; }

 private:
  const double quantile_;
};

TEST(Recipe, OfTheProgramsOwnGivesTheStep) {
  const auto recipe = std::make_shared<Percentile>(0.5, octavo::RecipeOptions{.history_len = 3});
  const auto w = parameter({24, 32});
  const auto base = random({8, 32});
  for (const double size : {1.0, 8.0, 2.0}) {  // the window's median is 2
    const octavo::Autocast guard(recipe);
    at::linear(base * size, w).sum().backward();
    octavo::step();
  }
  const auto step_x = (base * 2).abs().amax().to(at::kFloat) / 448.0,
             step_w = w.detach().abs().amax().to(at::kFloat) / 448.0;
  const octavo::Autocast guard(std::make_shared<Percentile>(0.5, octavo::RecipeOptions{.history_len = 3}));
  EXPECT_TRUE(at::equal(at::linear(base, w), std::get<0>(octavo::linear_forward_fp8(base, w.detach(), {}, step_x,
                                                                                    step_w, at::kFloat8_e4m3fn))));
}

// Gives no usable step.
class Broken final : public octavo::Recipe {
 public:
  Tensor scale_from_history(const Tensor& amax, octavo::Fp8Format) const override { return amax.select(-1, 0) * -1; }
  std::string identity() const override { return "Broken"; }
};

TEST(Recipe, ThatGivesNoUsableStepLeavesTheOldOne) {
  const auto w = parameter({24, 32});
  const auto x = random({8, 32});
  const octavo::Autocast guard(std::make_shared<Broken>());
  const auto before = at::linear(x, w);
  before.sum().backward();
  octavo::step();
  EXPECT_TRUE(at::equal(at::linear(x, w), before));
}

TEST(Recipe, ChecksItsOptions) {
  EXPECT_THROW(octavo::DelayedScaling({.history_len = 0}), c10::Error);
  EXPECT_THROW(octavo::DelayedScaling({.margin = std::numeric_limits<double>::quiet_NaN()}), c10::Error);
}

TEST(Recipe, MarginIsHeadroom) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const octavo::Autocast guard(std::make_shared<octavo::DynamicScaling>(octavo::RecipeOptions{.margin = 2}));
  EXPECT_TRUE(at::equal(at::linear(x, w), by_hand(x, w, 4)));
}

TEST(Backward, GradientsAgreeWithBf16) {
  const auto x = parameter({64, 96}), w = parameter({48, 96}), b = parameter({48});
  const auto dy = random({64, 48});
  const auto gradients = [&](bool fp8) {
    std::optional<octavo::Autocast> guard;
    if (fp8) guard.emplace();
    const auto y = at::linear(x, w, b);
    guard.reset();
    return torch::autograd::grad({y}, {x, w, b}, {dy});
  };
  const auto fp8 = gradients(true), bf16 = gradients(false);
  for (int i = 0; i < 3; ++i) {
    const auto a = fp8[i].flatten().to(at::kFloat), e = bf16[i].flatten().to(at::kFloat);
    EXPECT_GT(at::cosine_similarity(a, e, 0).item<float>(), 0.99) << i;
    EXPECT_NEAR((a.norm() / e.norm()).item<float>(), 1, 0.05) << i;
  }
  EXPECT_FALSE(at::equal(fp8[0], bf16[0]));
  EXPECT_FALSE(at::equal(fp8[1], bf16[1]));
}

TEST(Autocast, SmallLinearsStayAsTheyAre) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const auto plain = at::linear(x, w);
  const auto with_table = [](const std::string& name) {
    octavo::RecipeOptions options;
    options.small = name;
    return std::make_shared<octavo::DelayedScaling>(options);
  };
  const auto tables = octavo::small_tables();
  EXPECT_TRUE(std::any_of(tables.begin(), tables.end(), [](const auto& table) { return table.name == "h200"; }));
  {
    const octavo::Autocast guard(with_table("h200"));
    EXPECT_TRUE(at::equal(at::linear(x, w), plain));
  }
  {
    const octavo::Autocast guard(with_table(""));
    EXPECT_FALSE(at::equal(at::linear(x, w), plain));
  }
  EXPECT_THROW(octavo::Autocast(with_table("nowhere")), c10::Error);
  EXPECT_FALSE(octavo::is_autocast_enabled());
  EXPECT_THROW(octavo::load_small_table("/"), c10::Error);
}

// A change that autograd does not see is not seen: the copies are used. Their end is the scope's.
TEST(UnchangedWeights, AreQuantisedOnce) {
  const auto x = random({8, 32}), w = parameter({24, 32});
  const octavo::Autocast guard(std::make_shared<octavo::DynamicScaling>());
  const auto y = at::linear(x, w);
  {
    const octavo::UnchangedWeights promise;
    EXPECT_TRUE(at::equal(at::linear(x, w), y));
    w.data().zero_();
    EXPECT_TRUE(at::equal(at::linear(x, w), y));
    octavo::step();
    EXPECT_FALSE(at::linear(x, w).any().item<bool>());
  }
  EXPECT_FALSE(at::linear(x, w).any().item<bool>());
}

}  // namespace
