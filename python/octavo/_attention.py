# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fused attention for inference multiplies without going through linear: inside a region it is not taken."""

from __future__ import annotations

import functools

import torch

from octavo._compiled_regions import is_traced_for_fp8


def install() -> None:
    """Once, when a region is first entered."""
    original = torch.backends.mha.get_fastpath_enabled
    if getattr(original, "_octavo", False):
        return

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        if torch.compiler.is_dynamo_compiling():
            return original() and not is_traced_for_fp8()
        return original() and not torch.ops.octavo._is_active()

    get_fastpath_enabled._octavo = True  # type: ignore[attr-defined]
    torch.backends.mha.get_fastpath_enabled = get_fastpath_enabled
