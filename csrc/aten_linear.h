// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace octavo {

// Puts our implementation of aten::linear in front of PyTorch's, once per process, when a region is first entered:
// until then importing Octavo changes nothing.
void intercept_aten_linear();

}  // namespace octavo
