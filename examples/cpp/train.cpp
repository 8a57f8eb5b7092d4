// SPDX-License-Identifier: Apache-2.0
// Trains a small network in FP8 with libtorch alone, no Python: it learns y = |x| rotated plus noise, once in
// bf16 and once in FP8, and prints both losses. Exits with 1 if FP8 falls behind, or did not run.
//
//   train [steps]
#include <octavo/autocast.h>
#include <octavo/recipe.h>
#include <octavo/scaling.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>

namespace {

constexpr int64_t kFeatures = 64;
constexpr double kNoise = 0.3;  // the best possible loss is its square

// torch::nn::Linear's parameters, through at::linear: its own forward goes around that operator (to addmm), and would
// stay in bf16.
struct LinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  torch::Tensor forward(const torch::Tensor& x) { return at::linear(x, weight, bias); }
};
TORCH_MODULE(Linear);

torch::nn::Sequential make_model(torch::Device device) {
  torch::manual_seed(0);
  torch::nn::Sequential model(Linear(kFeatures, 256), torch::nn::ReLU(), Linear(256, kFeatures));
  model->to(device, torch::kBFloat16);
  return model;
}

// The mean loss of the last tenth of the steps; in bf16 where there is no recipe.
double train(int64_t steps, torch::Device device, const std::shared_ptr<const octavo::Recipe>& recipe) {
  auto model = make_model(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto rotation = std::get<0>(torch::linalg_qr(torch::randn({kFeatures, kFeatures}))).to(device);
  double total = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const auto x = torch::randn({256, kFeatures}).to(device);
    const auto target = x.abs().mm(rotation) + kNoise * torch::randn({256, kFeatures}).to(device);
    torch::Tensor y;
    {
      std::optional<octavo::Autocast> region;
      if (recipe) region.emplace(recipe);
      y = model->forward(x.to(torch::kBFloat16));
    }
    const auto loss = torch::mse_loss(y.to(torch::kFloat), target);
    optimizer.zero_grad();
    loss.backward();  // FP8 too, outside of the region
    optimizer.step();
    octavo::step();
    if (step >= steps - steps / 10) total += loss.item<double>();
  }
  return total / (steps / 10);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200;
  if (steps < 10) {
    std::cerr << "train: steps must be 10 or more, not " << argv[1] << "\n";
    return 2;
  }
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const double bf16 = train(steps, device, nullptr);
  const double fp8 = train(steps, device, std::make_shared<octavo::DelayedScaling>());
  std::cout << "device " << device << ", " << steps << " steps: loss bf16 " << bf16 << ", FP8 " << fp8 << "\n";
  return fp8 != bf16 && fp8 < 1.1 * bf16 ? 0 : 1;
}
