// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace octavo::ops {
namespace {

std::atomic<bool> emulated = false;
std::atomic<Fp8Support (*)(c10::Device)> cuda_support = nullptr;
std::atomic<std::string (*)(c10::Device)> cuda_name = nullptr;

}  // namespace

const char* describe(Fp8Support support) {
  return support == Fp8Support::kNative ? "native" : support == Fp8Support::kEmulated ? "emulated" : "refused";
}

Fp8Support fp8_support(c10::Device device) {
  if (device.is_cpu()) return Fp8Support::kEmulated;
  const auto support = cuda_support.load();
  TORCH_CHECK(device.is_cuda(), "octavo: FP8 runs on CPU and CUDA devices, not on ", device);
  TORCH_CHECK(support, "octavo: this build has no kernels for ", device.type(),
              " devices; rebuild it with CUDA (`make build CUDA=1`), or run this part of the model outside the region");
  return support(device);
}

void check_fp8_support(c10::Device device) {
  TORCH_CHECK(
      fp8_support(device) != Fp8Support::kRefused, "octavo: FP8 is not supported on ", device,
      ": tensor cores for it need compute capability 8.9, 9.0, 10.x or 12.x, the emulation 8.x; run this part of "
      "the model outside the region, or on the CPU");
}

void set_emulated(bool on) { emulated = on; }
bool is_emulated() { return emulated; }

std::string device_name(c10::Device device) {
  const auto name = cuda_name.load();
  return device.is_cuda() && name ? name(device) : "";
}

void register_cuda_device(Fp8Support (*support)(c10::Device), std::string (*name)(c10::Device)) {
  cuda_support = support;
  cuda_name = name;
}

}  // namespace octavo::ops
