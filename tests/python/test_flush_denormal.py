# SPDX-License-Identifier: Apache-2.0
"""torch.set_flush_denormal(True) changes no bit: the kernels set and restore the mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_same_state, snapshot
from runs import linear
from samples import every_16_bit_value, float32_samples

import octavo

FORMATS = ["e4m3", "e5m2"]


@contextmanager
def flush_to_zero() -> Iterator[None]:
    """The caller's mode; on leaving it, it must still be what the caller made it."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        yield
        still_on = (torch.tensor([1e-38]) * torch.tensor([0.1])).view(torch.int32).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert still_on, "the caller's mode was not restored"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("scale", [2.0**-126, 1e-37, 1.0, 2.0**126, 3e38])
def test_flush_to_zero_changes_no_bit(scale: float, fmt: str, dtype: torch.dtype) -> None:
    """Subnormal inputs, subnormal products and subnormal reciprocals are the same under torch.set_flush_denormal."""
    x = float32_samples(fmt, 1.0) if dtype == torch.float32 else every_16_bit_value(dtype)
    plain, plain_amax = octavo.quantize(x, scale, fmt)
    with flush_to_zero():
        flushed, flushed_amax = octavo.quantize(x, scale, fmt)
    assert_bits(flushed, plain)
    assert_bits(flushed_amax, plain_amax)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("form", ["float", "tensor"])
def test_a_subnormal_scale_under_flush_to_zero(form: str, fmt: str) -> None:
    """A subnormal step is positive and finite, and is not taken for zero."""
    x = float32_samples(fmt, 1.0)
    scale = 1e-40 if form == "float" else torch.tensor(1e-40)
    plain = octavo.quantize(x, scale, fmt)[0]
    with flush_to_zero():
        flushed = octavo.quantize(x, scale, fmt)[0]
    assert_bits(flushed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_flush_to_zero_changes_no_amax(dtype: torch.dtype) -> None:
    """A tensor of subnormals alone keeps its amax under flush-to-zero."""
    tiny = torch.finfo(dtype).smallest_normal
    x = torch.tensor([tiny / 128, -tiny / 2, 0.0, tiny / 64]).to(dtype)
    assert x.abs().max() > 0
    with flush_to_zero():
        _, amax = octavo.quantize(x, 1.0, "e4m3")
    assert_bits(amax, x.abs().max().float())


def test_flush_to_zero_changes_no_layer() -> None:
    """Steps, state, output and gradients of a layer with subnormal operands, under both modes."""
    data = torch.tensor([[1e-45, -1e-40, 0.0, 3e-39]]).repeat(3, 1)
    dy = torch.full((3, 2), 2e-39)
    results = []
    for context in (nullcontext, flush_to_zero):
        x, w = data.clone().requires_grad_(), torch.nn.Parameter(torch.full((2, 4), 1e-39))
        with context():
            for _ in range(2):
                with octavo.fp8_autocast(include_float32=True):
                    y = F.linear(x, w)
                y.backward(dy, inputs=[x, w])
                state = snapshot(w)
                octavo.step()
        results.append((y, state, snapshot(w)))
    assert_bits(results[1][0], results[0][0])
    assert_same_state(results[1][1], results[0][1])
    assert_same_state(results[1][2], results[0][2])


def test_flush_to_zero_changes_no_saved_state() -> None:
    """A subnormal amax survives being read, saved and loaded where subnormals are flushed."""
    layers = [linear(16, 16, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    x = torch.full((4, 16), 1e-39).to(torch.bfloat16)
    with octavo.fp8_autocast():
        layers[0](x).backward(torch.ones(4, 16, dtype=torch.bfloat16))
    want = snapshot(layers[0].weight)
    assert 0 < want["x_pending"] < torch.finfo(torch.float32).tiny
    with flush_to_zero():
        octavo.load_state_dict(layers[1], octavo.state_dict(layers[0]))
    assert_same_state(snapshot(layers[1].weight), want)
