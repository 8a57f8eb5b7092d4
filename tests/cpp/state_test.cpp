// SPDX-License-Identifier: Apache-2.0
// The arena: where scaling state lives, and what becomes of it when parameters die. Through the private ops, which are
// all that the library shows of it.
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <octavo/autocast.h>
#include <octavo/scaling.h>

#include <memory>
#include <tuple>

namespace {

using at::Tensor;

// Slots in use, bytes reserved.
std::tuple<int64_t, int64_t> arena_use() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("octavo::_arena_use", "");
  torch::jit::Stack stack;
  op.callBoxed(stack);
  return {stack.at(0).toInt(), stack.at(1).toInt()};
}

Tensor parameter(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16).set_requires_grad(true); }

void train(const Tensor& w) {
  const octavo::Autocast guard;
  at::linear(at::randn({4, w.size(1)}).to(at::kBFloat16), w).sum().backward();
}

TEST(Arena, IsFlatOverManyParameters) {
  train(parameter({16, 16}));
  const auto [slots, bytes] = arena_use();
  for (int i = 0; i < 3000; ++i) train(parameter({16, 16}));
  octavo::step();
  EXPECT_EQ(std::get<0>(arena_use()), slots);
  EXPECT_EQ(std::get<1>(arena_use()), bytes);
}

TEST(Arena, GrowsByChunksThatNeverMove) {
  std::vector<Tensor> alive;
  const auto slots = std::get<0>(arena_use());
  for (int i = 0; i < 2500; ++i) train(alive.emplace_back(parameter({16, 16})));  // more than the first chunk holds
  EXPECT_EQ(std::get<0>(arena_use()), slots + 2500);
  octavo::step();
  for (const auto& w : alive) train(w);
  alive.clear();
  EXPECT_EQ(std::get<0>(arena_use()), slots);
}

TEST(Arena, KeepsSlicesOfAParameterBounded) {
  const auto slots = std::get<0>(arena_use());
  {
    const auto w = parameter({2048, 16});
    for (int i = 0; i < 600; ++i) train(w.narrow(0, i, 16 + i));
    EXPECT_LE(std::get<0>(arena_use()) - slots, 256);
  }
  EXPECT_EQ(std::get<0>(arena_use()), slots);
}

TEST(Arena, TakesHistoriesOfAnyLength) {
  const auto w = parameter({16, 16});
  for (const int64_t length : {1, 2, 1000, 65536, 3, 65536}) {
    const octavo::Autocast guard(
        std::make_shared<octavo::DelayedScaling>(octavo::RecipeOptions{.history_len = length}));
    at::linear(at::randn({4, 16}).to(at::kBFloat16), w).sum().backward();
    octavo::step();
  }
}

}  // namespace
