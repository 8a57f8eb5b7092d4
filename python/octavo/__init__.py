# SPDX-License-Identifier: Apache-2.0
"""FP8 training for PyTorch.

    import octavo

    with octavo.fp8_autocast():
        loss = model(batch).loss
    loss.backward()
    optimizer.step()

Every eligible linear inside the region runs its three matrix products in FP8, forward and backward.
"""

from octavo._library import __version__
from octavo.autocast import fp8_autocast, fp8_linear_enable, fp8_linear_enabled
from octavo.devices import emulate, emulated, fp8_support
from octavo.formats import FP8_MAX, FP8Format
from octavo.gemm_table import GemmTable, gemm_tables, load_gemm_table
from octavo.kernels import linear_backward_fp8, linear_forward_fp8, mm_fp8, quantize
from octavo.recipe import DelayedScaling, DynamicScaling, FP8Recipe
from octavo.report import Report, report
from octavo.small import SmallTable, load_small_table, small_tables
from octavo.state import FP8State, FP8TensorMeta, fp8_state, load_state_dict, state_dict
from octavo.stepping import step
from octavo.tune import tune
from octavo.weights import unchanged_weights

__all__ = [
    "FP8_MAX",
    "DelayedScaling",
    "DynamicScaling",
    "FP8Format",
    "FP8Recipe",
    "FP8State",
    "FP8TensorMeta",
    "GemmTable",
    "Report",
    "SmallTable",
    "__version__",
    "emulate",
    "emulated",
    "fp8_autocast",
    "fp8_linear_enable",
    "fp8_linear_enabled",
    "fp8_state",
    "fp8_support",
    "gemm_tables",
    "linear_backward_fp8",
    "linear_forward_fp8",
    "load_gemm_table",
    "load_small_table",
    "load_state_dict",
    "mm_fp8",
    "quantize",
    "report",
    "small_tables",
    "state_dict",
    "step",
    "tune",
    "unchanged_weights",
]
