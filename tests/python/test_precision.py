# SPDX-License-Identifier: Apache-2.0
"""Each of the three products fast, accurate or in high precision."""

from __future__ import annotations

import oracle
import pytest
import torch
from checks import assert_bits, assert_product, assert_state, snapshot, ulp
from runs import linear

import octavo

BF16 = torch.bfloat16


def three_products(device: torch.device, **precision) -> tuple[dict[str, torch.Tensor], dict, dict]:
    """y, dx and dw with some products left out of FP8; the oracle's FP8 ones; and float64 ones, with sizes."""
    torch.manual_seed(5)
    layer = linear(100, 33, BF16, device)
    x = torch.randn(57, 100, device=device, dtype=BF16, requires_grad=True)
    model = oracle.Linear()
    want, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(**precision)):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    gradients = model.backward(saved, dy)
    a, w, b, g = (t.detach().cpu().double() for t in (x, layer.weight, layer.bias, dy))
    exact = {
        "forward": (a @ w.T + b, a.abs() @ w.abs().T + b.abs(), 100),
        "dgrad": (g @ w, g.abs() @ w.abs(), 33),
        "wgrad": (g.T @ a, g.abs().T @ a.abs(), 57),
    }
    got = {"forward": y.detach(), "dgrad": x.grad, "wgrad": layer.weight.grad}
    return got, {"forward": want, "dgrad": gradients.x, "wgrad": gradients.w}, exact


@pytest.mark.parametrize("high", [(), ("wgrad",), ("dgrad",), ("forward",), ("forward", "dgrad", "wgrad")], ids=str)
def test_products_in_high_precision(device: torch.device, high: tuple[str, ...]) -> None:
    """A "high" product is a bf16 product of the unquantised operands, the others stay the FP8 ones, bit for bit.

    A bf16 product sums in float32 in any order: at most K roundings of 2^-24 of the sum of |a||b|, one more for the
    bias, then half an ulp of bf16, and another half where the bias is added after a first rounding.
    """
    got, fp8, exact = three_products(device, **{name: "high" for name in high})
    for name, value in got.items():
        if name not in high:
            assert_product(value, fp8[name], "fast" if name == "forward" else "accurate", name)
            continue
        reference, size, k = exact[name]
        slack = (k + 1) * 2.0**-24 * size
        bound = slack.numpy() + ulp((reference.abs() + slack).numpy(), BF16)
        error = (value.cpu().double() - reference).abs().numpy()
        assert (error <= bound).all(), f"{name} is not the product of the unquantised operands"


def test_forward_in_high_precision_equals_the_one_outside(device: torch.device) -> None:
    """With forward="high" y is the bf16 y, bit for bit, and backward is still FP8."""
    layer, x = linear(100, 33, BF16, device), torch.randn(57, 100, device=device, dtype=BF16)
    outside = layer(x)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(forward="high")):
        assert_bits(layer(x), outside)


@pytest.mark.parametrize("precision", ["fast", "accurate"])
def test_fast_and_accurate(device: torch.device, precision: str) -> None:
    """Both are the same product; a CPU's sum is exact either way, so its bits are equal."""
    got, fp8, _ = three_products(device, forward=precision, dgrad=precision, wgrad=precision)
    for name, value in got.items():
        assert_product(value, fp8[name], precision, name)


def test_a_high_product_keeps_the_state_of_the_rest(device: torch.device) -> None:
    """With wgrad="high" the ring of g and w still advance as the oracle's: dgrad needs both."""
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    x = torch.randn(7, 24, device=device, dtype=BF16, requires_grad=True)
    _, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(wgrad="high")):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    model.backward(saved, dy)
    assert snapshot(layer.weight)["g_pending"].item() == dy.abs().max().item()
    octavo.step()
    model.step()
    assert_state(layer.weight, model)
