# SPDX-License-Identifier: Apache-2.0
"""fp32 parameters under torch.autocast, in either nesting order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import oracle
import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_column_sum, assert_product, assert_state, differ, meta
from runs import both, linear, run_beside_oracle

import octavo

BF16, FP32 = torch.bfloat16, torch.float32
ORDERS = ["octavo outside", "octavo inside"]


@contextmanager
def regions(device: torch.device, order: str, dtype: torch.dtype = BF16, **arguments) -> Iterator[None]:
    """torch.autocast and fp8_autocast, one in the other."""
    contexts = [octavo.fp8_autocast(**arguments), torch.autocast(device.type, dtype=dtype)]
    with ExitStack() as stack:
        for context in contexts if order == "octavo outside" else reversed(contexts):
            stack.enter_context(context)
        yield


def layer_and_input(device: torch.device) -> tuple[torch.nn.Linear, torch.Tensor]:
    """fp32 data on no 16-bit grid, so a rounding through bf16 would show."""
    return linear(24, 17, FP32, device), torch.randn(9, 24, device=device, requires_grad=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trained(device: torch.device, dtype: torch.dtype, kind: str, order: str) -> None:
    """16-bit out; fp32 quantised from its own value; fp32 gradients straight from the product, not through bf16."""
    layer, x = layer_and_input(device)
    recipe, policy = both(kind)
    model = oracle.Linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        want, saved = model.forward(policy, x, layer.weight, layer.bias, dtype)
        with regions(device, order, dtype, recipe=recipe):
            y = layer(x)
        assert y.dtype == dtype
        assert_product(y, want, "fast")
        dy = torch.randn_like(y)
        x.grad = None
        y.backward(dy)
        gradients = model.backward(saved, dy)
        assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == FP32
        assert_product(x.grad, gradients.x, what="dx")
        assert_product(layer.weight.grad, gradients.w, what="dw")
        assert_column_sum(layer.bias.grad, dy)
        for gradient in (x.grad, layer.weight.grad):
            assert differ(gradient, gradient.to(dtype).float()), "rounded to 16 bits on its way"
        optimizer.step()
        optimizer.zero_grad()
        model.step()
        if kind == "delayed":
            assert_state(layer.weight, model)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [True, False])
def test_every_mode_gives_the_same_bits(device: torch.device, frozen: bool, mode: type, order: str) -> None:
    """Trained, frozen, no_grad, inference_mode: the parameter is found each time, its scales are used, y is equal."""
    layer, x = layer_and_input(device)
    with regions(device, order):
        layer(x).sum().backward()
    octavo.step()
    assert meta(layer.weight).w_init
    probe = torch.randn(9, 24, device=device) * 10
    with regions(device, order):
        expected = layer(probe)
    layer.requires_grad_(not frozen)
    with mode(), regions(device, order):
        y = layer(probe)
    assert_bits(y, expected)
    assert y.dtype == BF16
    scale = meta(layer.weight).x_scale.item()
    assert scale < probe.abs().max().item() / 448, "the old scale must saturate here, or the test shows nothing"
    own, _ = oracle.Linear().forward(oracle.Policy(), probe, layer.weight, layer.bias, BF16)
    assert differ(y, own.value)


@pytest.mark.parametrize("order", ORDERS)
def test_frozen_weights_are_found_and_recorded(device: torch.device, order: str) -> None:
    """A frozen fp32 layer has no autograd path to its leaf, but its state is the parameter's all the same."""
    layer, x = layer_and_input(device)
    layer.requires_grad_(False)
    model = oracle.Linear()
    for _ in range(2):
        want, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias, BF16)
        with regions(device, order):
            y = layer(x)
        assert_product(y, want, "fast")
        dy = torch.randn_like(y)
        x.grad = None
        y.backward(dy)
        assert_product(x.grad, model.backward(saved, dy).x)
        assert x.grad.dtype == FP32
        octavo.step()
        model.step()
        assert_state(layer.weight, model)


@pytest.mark.parametrize("order", ORDERS)
def test_mixed_operands(device: torch.device, order: str) -> None:
    """A bf16 activation against an fp32 parameter: each gradient in its own operand's dtype."""
    layer, x = layer_and_input(device)
    x = x.detach().to(BF16).requires_grad_()
    model = oracle.Linear()
    want, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias, BF16)
    with regions(device, order):
        y = layer(x)
    assert_product(y, want, "fast")
    dy = torch.randn_like(y)
    y.backward(dy)
    gradients = model.backward(saved, dy)
    assert x.grad.dtype == BF16 and layer.weight.grad.dtype == FP32
    assert_product(x.grad, gradients.x)
    assert_product(layer.weight.grad, gradients.w)


@pytest.mark.parametrize("order", ORDERS)
def test_islands_stay_float32(device: torch.device, order: str) -> None:
    """A layer under autocast(enabled=False) asked for precision: bits and gradients as outside, counted as float32."""
    layer, x = layer_and_input(device)
    outside = layer(x)
    expected = torch.autograd.grad(outside, (x, layer.weight), torch.ones_like(outside))
    with regions(device, order), torch.autocast(device.type, enabled=False):
        y = layer(x)
    assert y.dtype == FP32
    assert_bits(y, outside)
    for a, b in zip(torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y)), expected, strict=True):
        assert_bits(a, b)
    report = octavo.report()
    assert report.fp8_calls == 0 and [row.reason for row in report.rows] == ["float32"]


@pytest.mark.parametrize("order", ORDERS)
def test_disabled_region_is_plain_autocast(device: torch.device, order: str) -> None:
    """fp8_autocast(False) under torch.autocast gives autocast's own bits, forward and backward."""
    layer, x = layer_and_input(device)
    with torch.autocast(device.type, dtype=BF16):
        outside = layer(x)
    dy = torch.randn_like(outside)
    expected = torch.autograd.grad(outside, (x, layer.weight, layer.bias), dy)
    with regions(device, order, enabled=False):
        y = layer(x)
    assert_bits(y, outside)
    for a, b in zip(torch.autograd.grad(y, (x, layer.weight, layer.bias), dy), expected, strict=True):
        assert_bits(a, b)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("where", ["inside", "outside", "octavo alone", "autocast alone"])
def test_backward_may_be_called_anywhere(device: torch.device, where: str, order: str) -> None:
    """Where backward runs changes no bit of it."""
    layer, x = layer_and_input(device)
    model = oracle.Linear()
    _, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias, BF16)
    dy = torch.randn(9, 17, device=device).to(BF16)
    gradients = model.backward(saved, dy)
    with ExitStack() as stack:
        stack.enter_context(regions(device, order))
        y = layer(x)
        if where != "inside":
            stack.close()
        if where == "octavo alone":
            stack.enter_context(octavo.fp8_autocast(recipe=octavo.DynamicScaling(), fp8_format="e4m3"))
        if where == "autocast alone":
            stack.enter_context(torch.autocast(device.type, dtype=torch.float16))
        y.backward(dy)
    assert_product(x.grad, gradients.x)
    assert_product(layer.weight.grad, gradients.w)


@pytest.mark.parametrize("order", ORDERS)
def test_excluded_under_autocast(device: torch.device, order: str) -> None:
    """An excluded fp32 layer runs as plain autocast would, bit for bit, trained, frozen and under no_grad."""
    layer, x = layer_and_input(device)
    with torch.autocast(device.type, dtype=BF16):
        outside = layer(x)
    for frozen in (False, True):
        layer.requires_grad_(not frozen)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), regions(device, order, exclude=[layer]):
                assert_bits(layer(x), outside)
    report = octavo.report()
    assert report.fp8_calls == 0 and [(row.reason, row.calls) for row in report.rows] == [("excluded", 4)]


def test_autocast_of_a_whole_run(device: torch.device) -> None:
    """Several steps, 3-D inputs, growing data: beside the oracle, state included."""
    xs = [torch.randn(2, 5, 24, device=device) * size for size in (1.0, 4.0, 0.3)]
    recipe, policy = both(history_len=2)
    run_beside_oracle(linear(24, 17, FP32, device), xs, recipe, policy, autocast=BF16)


@pytest.mark.parametrize("order", ORDERS)
def test_several_linears_on_one_input(device: torch.device, order: str) -> None:
    """q, k and v of one fp32 input (a LayerNorm's output): each layer's own state, dx the fp32 sum of the three."""
    x = torch.randn(9, 24, device=device, requires_grad=True)
    layers, models = [linear(24, 17, FP32, device) for _ in range(3)], [oracle.Linear() for _ in range(3)]
    for _ in range(2):
        normed = F.layer_norm(x, (24,))
        with regions(device, order):
            ys = [layer(normed) for layer in layers]
        for layer, model, y in zip(layers, models, ys, strict=True):
            want, saved = model.forward(oracle.Policy(), normed, layer.weight, layer.bias, BF16)
            assert_product(y, want, "fast")
            dy = torch.randn_like(y)
            layer.zero_grad()
            (dx,) = torch.autograd.grad(y, normed, dy, retain_graph=True)
            assert_product(dx, model.backward(saved, dy).x)
        octavo.step()
        for layer, model in zip(layers, models, strict=True):
            model.step()
            assert_state(layer.weight, model)
