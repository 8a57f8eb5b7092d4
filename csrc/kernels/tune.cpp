// SPDX-License-Identifier: Apache-2.0
#include "tune.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "algorithm_table.h"
#include "candidates.h"
#include "stopwatch.h"
#include "tables.h"

namespace octavo::kernels {
namespace {

constexpr double kGain = 0.01;       // by which another has to beat the heuristic's first choice
constexpr double kTolerance = 2e-2;  // of results, relative; orders of summation differ by less, mistakes by far more
constexpr size_t kSecondRound = 24, kFinalists = 8;
constexpr int kSecondWindows = 3, kLeastWindows = 7, kMostWindows = 31;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Runner {
  Candidate candidate;
  bool stays = false;  // whatever its time
  std::vector<double> samples = {};
  double microseconds = 0;
};

// `windows` more for each, in turns.
void run_round(std::vector<Runner>& runners, int windows, Stopwatch& stopwatch) {
  for (Runner& runner : runners) runner.samples.clear();
  for (int i = 0; i < windows; ++i) {
    for (Runner& runner : runners) runner.samples.push_back(stopwatch.window(runner.candidate));
  }
  for (Runner& runner : runners) runner.microseconds = median(runner.samples);
}

// The fastest `count`, in the order they were in, and those that stay.
void keep_fastest(std::vector<Runner>& runners, size_t count) {
  if (runners.size() <= count) return;
  std::vector<double> times;
  for (const Runner& runner : runners) times.push_back(runner.microseconds);
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(count) - 1, times.end());
  const double slowest = times[count - 1];
  std::erase_if(runners, [&](const Runner& r) { return r.microseconds > slowest && !r.stays; });
}

// Of two results, by their norms; NaN where either has one.
double difference(const std::vector<float>& result, const std::vector<float>& reference) {
  double of_difference = 0.0, of_reference = 0.0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double x = result[i], y = reference[i];
    of_difference += (x - y) * (x - y);
    of_reference += y * y;
  }
  return of_difference == 0.0 ? 0.0 : std::sqrt(of_difference / of_reference);
}

// Those that run at all, the heuristic's first choice first.
std::vector<Runner> start(const LtDevice& device, const Product& product, const ProductOperands& operands,
                          const TuneOptions& options, Stopwatch& stopwatch) {
  const Problem problem = problem_of(product, operands);
  std::vector<Runner> runners;
  for (const Candidate& candidate : candidates_for(device.handle, product, problem, options.exhaustive)) {
    runners.push_back({.candidate = candidate});
  }
  if (runners.empty()) throw std::runtime_error("octavo: cuBLASLt has no algorithm for " + in_words(product));
  runners.front().stays = true;
  if (const auto entry = find_entry(device.name, cublasLtGetVersion(), product)) {
    const Algorithm& wanted = entry->algorithm;
    const auto known = std::find_if(runners.begin(), runners.end(), [&](const Runner& r) {
      return r.candidate.is_reproducible && r.candidate.configuration == wanted;
    });
    if (known != runners.end()) {
      known->stays = true;
    } else if (const Rebuilt rebuilt = rebuild(device.handle, product, problem, wanted); rebuilt.refused.empty()) {
      runners.push_back(
          {.candidate = {.algorithm = rebuilt.algorithm, .configuration = wanted, .is_reproducible = true},
           .stays = true});
    }
  }
  std::vector<Runner> able;
  for (const Runner& runner : runners) {
    if (stopwatch.try_out(runner.candidate)) {
      able.push_back(runner);
    } else if (&runner == &runners.front()) {
      throw std::runtime_error("octavo: the heuristic's choice does not run for " + in_words(product));
    }
  }
  return able;
}

// Index of the fastest that a table can hold, that beats the first and agrees with it; `wrong` counts those that do
// not.
size_t winner_of(const std::vector<Runner>& runners, Stopwatch& stopwatch, int64_t& wrong) {
  std::vector<size_t> order;
  for (size_t i = 1; i < runners.size(); ++i) {
    const bool beats = runners[i].microseconds < (1.0 - kGain) * runners[0].microseconds;
    if (beats && runners[i].candidate.is_reproducible) order.push_back(i);
  }
  if (order.empty()) return 0;
  std::sort(order.begin(), order.end(),
            [&](size_t i, size_t j) { return runners[i].microseconds < runners[j].microseconds; });
  const std::vector<float> reference = stopwatch.sampled_result(runners[0].candidate);
  for (const size_t i : order) {
    if (difference(stopwatch.sampled_result(runners[i].candidate), reference) < kTolerance) return i;
    ++wrong;
  }
  return 0;
}

}  // namespace

Tuning tune(const Product& given, const ProductOperands& operands, const TuneOptions& options, cudaStream_t stream) {
  const auto elapsed = [begin = std::chrono::steady_clock::now()] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  Product product = given;
  product.alignment = kTunedAlignment;  // the stopwatch's copies have it
  const LtDevice device = lt_device(stream);
  Stopwatch stopwatch(device, product, operands, stream);
  std::vector<Runner> runners = start(device, product, operands, options, stopwatch);
  Tuning tuning;
  tuning.tried = static_cast<int64_t>(runners.size());

  stopwatch.calibrate(runners.front().candidate);
  run_round(runners, 1, stopwatch);
  keep_fastest(runners, kSecondRound);
  run_round(runners, kSecondWindows, stopwatch);
  keep_fastest(runners, kFinalists);
  const double before = elapsed();
  run_round(runners, kLeastWindows, stopwatch);
  const double rounds = kLeastWindows * (options.seconds - elapsed()) / (elapsed() - before);
  if (rounds > kLeastWindows) run_round(runners, std::min(kMostWindows, static_cast<int>(rounds)), stopwatch);

  tuning.winner = static_cast<int64_t>(winner_of(runners, stopwatch, tuning.wrong));
  const auto entry = find_entry(device.name, cublasLtGetVersion(), product);
  for (const Runner& runner : runners) {
    const Candidate& candidate = runner.candidate;
    Finalist finalist{.microseconds = runner.microseconds, .line = {}};
    if (candidate.is_reproducible) {
      finalist.line = to_line({device.name, cublasLtGetVersion(), product, candidate.configuration});
      if (entry && entry->algorithm == candidate.configuration) {
        tuning.in_force = static_cast<int64_t>(tuning.finalists.size());
      }
    }
    tuning.finalists.push_back(finalist);
  }
  return tuning;
}

}  // namespace octavo::kernels
