# SPDX-License-Identifier: Apache-2.0
"""What a scale and a format may be, and what happens to what they may not."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_bits
from samples import expected

import octavo

FORMATS = ["e4m3", "e5m2"]


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, -1e-30])
def test_an_invalid_scale_raises(device: torch.device, scale: float) -> None:
    """A scale the host can read is checked, as a number and as a CPU tensor, on every entry point."""
    x = torch.randn(4, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        octavo.quantize(x, scale, "e4m3")
    q, _ = octavo.quantize(x, 1.0, "e4m3")
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        octavo.mm_fp8(q, q, scale, 1.0)
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        octavo.mm_fp8(q, q, 1.0, scale)
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        octavo.mm_fp8(q, q, 1.0, 1.0, out_dtype=torch.float8_e4m3fn, out_scale=scale)
    if device.type == "cpu":
        with pytest.raises((RuntimeError, ValueError), match="scale"):
            octavo.quantize(x, torch.tensor(scale), "e4m3")


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_a_scale_that_is_no_float32_raises(scale: float) -> None:
    """Positive and finite as a Python float, but zero or infinite as the float32 a scale is."""
    with pytest.raises((RuntimeError, ValueError), match="scale"):
        octavo.quantize(torch.ones(3), scale, "e4m3")


@pytest.mark.parametrize(
    "scale", [torch.ones(2), torch.ones(0), torch.ones(1, dtype=torch.float64), torch.ones(1).int()]
)
def test_a_scale_of_the_wrong_kind_raises(scale: torch.Tensor) -> None:
    """A scale tensor is one float32 element."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        octavo.quantize(torch.ones(3), scale, "e4m3")


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("fmt", FORMATS)
def test_an_invalid_device_scale_makes_every_byte_nan(cuda: torch.device, scale: float, fmt: str) -> None:
    """A device scale is not read by the host; an invalid one cannot pass for data."""
    x = torch.randn(33, 17, device=cuda)
    x[0, 0], x[1, 1] = 0.0, math.inf
    q, _ = octavo.quantize(x, torch.tensor(scale, device=cuda), fmt)
    assert (q.view(torch.uint8) == 0x7F).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_forms_of_a_scale_agree(device: torch.device, fmt: str) -> None:
    """A float, a 0-d tensor, a one-element tensor and a format given by name or enum: the same bits."""
    x = torch.randn(5, 7, device=device)
    forms = [0.0371, torch.tensor(0.0371, device=device), torch.tensor([0.0371], device=device)]
    for form in forms:
        for name in (fmt, octavo.FP8Format(fmt)):
            assert_bits(octavo.quantize(x, form, name)[0], expected(x, 0.0371, fmt))


@pytest.mark.parametrize("bad", ["e3m4", "hybrid", 3, None])
def test_an_unknown_format_raises(bad: object) -> None:
    """One tensor has one format; HYBRID is not one."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        octavo.quantize(torch.ones(3), 1.0, bad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool, torch.complex64])
def test_other_dtypes_raise(device: torch.device, dtype: torch.dtype) -> None:
    """bf16, fp16 and fp32 are quantised; nothing else is converted behind one's back."""
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        octavo.quantize(torch.ones(3, device=device).to(dtype), 1.0, "e4m3")
