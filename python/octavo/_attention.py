# SPDX-License-Identifier: Apache-2.0
"""PyTorch's fused attention for inference multiplies without going through linear: inside a region it is not taken."""

from __future__ import annotations

import functools

import torch


def install() -> None:
    """Once, when a region is first entered."""
    original = torch.backends.mha.get_fastpath_enabled
    if getattr(original, "_octavo", False):
        return

    @functools.wraps(original)
    def get_fastpath_enabled() -> bool:
        return original() and not torch.ops.octavo._is_active()

    get_fastpath_enabled._octavo = True  # type: ignore[attr-defined]
    torch.backends.mha.get_fastpath_enabled = get_fastpath_enabled
