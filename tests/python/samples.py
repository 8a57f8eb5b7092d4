# SPDX-License-Identifier: Apache-2.0
"""Inputs on which casts go wrong, and the bytes they must become."""

from __future__ import annotations

import numpy as np
import oracle
import torch


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def codes(fmt: str) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(oracle.FORMATS[fmt].dtype)


def float32_samples(fmt: str, scale: float) -> torch.Tensor:
    """Halfway points between neighbouring codes with their float32 neighbours, float32's own ends, and noise."""
    table = oracle.FORMATS[fmt].positive
    halfway = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    with np.errstate(all="ignore"):
        points = np.concatenate([halfway, table.astype(np.float32)]) * np.float32(scale)
        points = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    tiny = np.array([1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001], np.uint32)
    noise = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    both = np.concatenate([points.view(np.uint32), tiny, np.zeros(1, np.uint32), noise])
    both = np.concatenate([both, both ^ np.uint32(0x80000000)])
    return torch.from_numpy(both.view(np.float32).copy())


def expected(x: torch.Tensor, scale: float, fmt: str) -> torch.Tensor:
    """The oracle's bytes as a float8 tensor."""
    code = oracle.quantise(oracle.values(x), scale, oracle.FORMATS[fmt])
    return torch.from_numpy(code).view(oracle.FORMATS[fmt].dtype).reshape(x.shape)
