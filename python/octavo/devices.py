# SPDX-License-Identifier: Apache-2.0
"""What a device can do, and the switch that forces the emulated product."""

from __future__ import annotations

import torch


def fp8_support(device: torch.device | str | int | None = None) -> str:
    """ "native" (FP8 tensor cores), "emulated" (the same bytes and scales, products in higher precision) or "refused".

    Args:
        device: default: the current accelerator, else the CPU.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.ops.octavo._fp8_support(device)


def emulate(enabled: bool = True) -> None:
    """Process-wide: products run emulated also where FP8 tensor cores are there. For tests and for studying recipes."""
    if not isinstance(enabled, bool):
        raise TypeError(f"octavo: enabled must be a bool, not {enabled!r}")
    torch.ops.octavo._set_emulated(enabled)


def emulated() -> bool:
    """Whether that switch is on."""
    return torch.ops.octavo._is_emulated()
