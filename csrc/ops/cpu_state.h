// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../slot.h"

namespace octavo::ops {

// The step of the slot that a tape speaks of; 0 unless the slot is still that one's, holds this policy and has a
// history.
float step_of_slot(const Tape& tape, Operand operand, const ScalingPolicy& policy);

}  // namespace octavo::ops
