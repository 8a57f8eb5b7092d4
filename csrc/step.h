// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "slot.h"

namespace octavo {

// An optimizer has stepped: the slots of its parameters, and those that no optimizer claimed, advance (all, for owner
// 0). found_inf: a float32 on any device; where it is not 0, GradScaler made the step empty and nothing advances.
void advance(int64_t owner, const std::optional<at::Tensor>& found_inf);

// The steps [slots, 3] that a custom recipe gave. Those it may not give (not finite, not positive) leave the old ones;
// that is said in a warning, as soon as the device's count of them can be read without waiting.
void apply_custom_steps(const at::Tensor& slots, const at::Tensor& due, const at::Tensor& steps,
                        const ScalingPolicy& policy);

}  // namespace octavo
