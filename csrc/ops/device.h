// SPDX-License-Identifier: Apache-2.0
// What a device can do, and the switch that forces the emulated product.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace octavo::ops {

// "native", "emulated" or "refused"; throws for a type of device that this build has no kernels for.
std::string fp8_support(c10::Device device);

// Throws, in one sentence, where it is "refused" or this build has no kernels.
void check_fp8_support(c10::Device device);

void set_emulated(bool on);
bool is_emulated();

// The CUDA half's answer, registered when it is loaded.
void register_fp8_support(std::string (*support)(c10::Device));

}  // namespace octavo::ops
