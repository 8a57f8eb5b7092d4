// SPDX-License-Identifier: Apache-2.0
// What a device can do, and the switch that forces the emulated product.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace octavo::ops {

// How FP8 products run on a device.
enum class Fp8Support { kNative, kEmulated, kRefused };
// Throws for a type of device that this build has no kernels for.
Fp8Support fp8_support(c10::Device device);
const char* describe(Fp8Support support);

// A GPU's as the driver names it; "" for others.
std::string device_name(c10::Device device);

// Throws, in one sentence, where they are refused or this build has no kernels.
void check_fp8_support(c10::Device device);

void set_emulated(bool on);
bool is_emulated();

// The CUDA half's answers, registered when it is loaded.
void register_cuda_device(Fp8Support (*support)(c10::Device), std::string (*name)(c10::Device));

}  // namespace octavo::ops
