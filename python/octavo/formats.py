# SPDX-License-Identifier: Apache-2.0
"""The FP8 formats, by direction and by name."""

from __future__ import annotations

import enum


class FP8Format(enum.Enum):
    """HYBRID: E4M3 for inputs and weights, E5M2 (more range, less precision) for gradients."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"

    def fwd(self) -> FP8Format:
        """The format of inputs and weights, in forward and in backward."""
        return FP8Format.E5M2 if self is FP8Format.E5M2 else FP8Format.E4M3

    def bwd(self) -> FP8Format:
        """The format of the gradients of outputs."""
        return FP8Format.E4M3 if self is FP8Format.E4M3 else FP8Format.E5M2


#: The largest finite value of a format, by FP8Format or by its name.
FP8_MAX: dict[FP8Format | str, float] = {
    FP8Format.E4M3: 448.0,
    FP8Format.E5M2: 57344.0,
    "e4m3": 448.0,
    "e5m2": 57344.0,
}


def parse_format(fp8_format: FP8Format | str, argument: str = "fp8_format") -> FP8Format:
    """The FP8Format of a name or of itself; ValueError otherwise."""
    try:
        return FP8Format(fp8_format)
    except ValueError:
        names = ", ".join(repr(f.value) for f in FP8Format)
        raise ValueError(f"octavo: {argument} must be one of {names}, not {fp8_format!r}") from None
