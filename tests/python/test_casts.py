# SPDX-License-Identifier: Apache-2.0
"""Every cast, bit for bit: all 16-bit inputs, the hard float32 inputs, and all codes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
from checks import assert_bits
from samples import codes, every_16_bit_value, expected, float32_samples

import octavo

FORMATS = ["e4m3", "e5m2"]
# Powers of two and not, steps that take float32's ends to the middle of FP8, and those whose reciprocal is subnormal
# or infinite.
SCALES = [1.0, 0.5, 0.0371, 3.0, 448.0, 1.7e-5, 2.0**-126, 2.0**126, 3.0e38, 1e-40, 6.1e-5, 1e30]


@pytest.mark.parametrize("fmt", FORMATS)
def test_oracle_agrees_with_ml_dtypes(fmt: str) -> None:
    """The oracle's own tables and rounding, against an implementation that is nobody's here."""
    theirs = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[fmt]
    ours = oracle.FORMATS[fmt]
    table = np.arange(256, dtype=np.uint8).view(theirs).astype(np.float64)
    np.testing.assert_array_equal(ours.values, table)
    x = float32_samples(fmt, 1.0).numpy()
    x = x[np.isfinite(x)]
    clipped = np.clip(x, -np.float32(ours.max), np.float32(ours.max)).astype(theirs).view(np.uint8)
    np.testing.assert_array_equal(oracle.quantise(x, 1.0, ours), clipped)
    assert ours.max == octavo.FP8_MAX[fmt] == octavo.FP8_MAX[octavo.FP8Format(fmt)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_input(device: torch.device, dtype: torch.dtype, scale: float, fmt: str) -> None:
    """All 65,536 inputs, NaNs, infinities, subnormals and both zeros among them, and the amax of the finite ones."""
    x = every_16_bit_value(dtype)
    q, amax = octavo.quantize(x.to(device), scale, fmt)
    assert_bits(q, expected(x, scale, fmt))
    assert amax.dtype == torch.float32 and amax.shape == ()
    assert amax.item() == torch.finfo(dtype).max


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
def test_float32_inputs(device: torch.device, scale: float, fmt: str) -> None:
    """fp32 is converted from its own value: halfway points, overflow of x * inv, subnormals, NaN, Inf, -0."""
    x = float32_samples(fmt, scale)
    q, amax = octavo.quantize(x.to(device), scale, fmt)
    assert_bits(q, expected(x, scale, fmt))
    assert amax.item() == float(oracle.amax(x.numpy()))


@pytest.mark.parametrize("fmt", FORMATS)
def test_special_values_by_name(device: torch.device, fmt: str) -> None:
    """NaN of either sign is 0x7f; Inf is Inf in E5M2 and NaN in E4M3; -0 stays; what overflows saturates."""
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45])
    infinities = [0x7F, 0x7F] if fmt == "e4m3" else [0x7C, 0xFC]
    top = 0x7E if fmt == "e4m3" else 0x7B
    want = [0x7F, 0x7F, *infinities, 0, 0x80, top, top | 0x80, 0, 0x80]
    for scale in (1.0, 1e-3):
        q, _ = octavo.quantize(x.to(device), scale, fmt)
        assert q.view(torch.uint8).tolist() == want


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_stays_zero_where_the_reciprocal_overflows(device: torch.device, fmt: str) -> None:
    """1 / 1e-40 is infinite and 0 * inf is NaN, but a finite x never becomes NaN."""
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1.0], device=device)
    top = 0x7E if fmt == "e4m3" else 0x7B
    assert octavo.quantize(x, 1e-40, fmt)[0].view(torch.uint8).tolist() == [0, 0x80, top, top | 0x80, top]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-100, 2.0**100])
def test_every_code_round_trips(device: torch.device, scale: float, fmt: str) -> None:
    """decode, then encode: each of the 256 codes comes back, all NaNs as 0x7f."""
    value = torch.from_numpy((oracle.FORMATS[fmt].values * scale).astype(np.float32))
    q, _ = octavo.quantize(value.to(device), scale, fmt)
    want = torch.arange(256, dtype=torch.uint8)
    want[torch.isnan(value)] = 0x7F
    if fmt == "e5m2":  # every infinity keeps its sign and its code
        assert want[0x7C] == 0x7C and want[0xFC] == 0xFC
    assert torch.equal(q.cpu().view(torch.uint8), want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_survive_the_16_bit_dtypes(device: torch.device, fmt: str) -> None:
    """Every FP8 value is exact in bf16 and in fp16, so a code read as 16-bit comes back."""
    for dtype in [torch.bfloat16, torch.float16]:
        value = codes(fmt).float().to(dtype)
        q, _ = octavo.quantize(value.to(device), 1.0, fmt)
        want = torch.arange(256, dtype=torch.uint8)
        want[torch.isnan(value)] = 0x7F
        assert torch.equal(q.cpu().view(torch.uint8), want)
