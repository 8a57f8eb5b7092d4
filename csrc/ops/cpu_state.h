// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "../slot.h"

namespace octavo::ops {

// The step that a slot holds for an operand; 0 unless the slot is still of that generation, holds this policy and has a
// history.
float step_of_slot(int64_t slot, int64_t generation, Operand operand, const ScalingPolicy& policy);

// A backward's record: pending = max(pending, amax), for x and w from the tape, and for g.
void record(const at::Tensor& tape, Peak g, const ScalingPolicy& policy);

}  // namespace octavo::ops
