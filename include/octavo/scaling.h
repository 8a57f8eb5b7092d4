// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <octavo/export.h>

namespace octavo {

// Tells Octavo that the weights have been updated: every slot that recorded an amax since the last call puts it into
// its history and takes a new step. Call it after optimizer.step(). (Python programs need not: torch.optim's hook does
// it.) Inside a backward it takes effect when that backward is over. No host synchronisation.
OCTAVO_API void step();

}  // namespace octavo
