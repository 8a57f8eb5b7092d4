# SPDX-License-Identifier: Apache-2.0
"""fp8_autocast end to end: one linear against the oracle, and against bf16."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_product, assert_untouched, differ, meta, same_bits, snapshot
from runs import FORMATS, both, linear, run_beside_oracle

import octavo

BF16 = torch.bfloat16
SHAPES = [(24,), (5, 24), (2, 3, 24), (2, 1, 3, 24)]


@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_oracle(
    device: torch.device, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, kind: str
) -> None:
    """Four steps of growing and shrinking inputs: outputs, gradients, rings, scales as numerics.md has them."""
    xs = [torch.randn(shape, device=device).to(dtype) * size for size in (1.0, 3.0, 0.1, 8.0)]
    recipe, policy = both(kind)
    run_beside_oracle(linear(24, 17, dtype, device, bias), xs, recipe, policy)


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3", "e5m2"])
@pytest.mark.parametrize("arguments", [{"history_len": 1}, {"history_len": 3, "margin": 2}, {"power_of_two": True}])
def test_recipes_equal_the_oracle(device: torch.device, arguments: dict, fp8_format: str) -> None:
    """Ring lengths, margins, power-of-two steps, in each format of the region."""
    xs = [torch.randn(9, 24, device=device).to(BF16) * size for size in (1.0, 0.3, 5.0, 0.2, 0.1, 0.4)]
    recipe, policy = both("delayed", fp8_format, **arguments)
    run_beside_oracle(linear(24, 17, BF16, device), xs, recipe, policy, fp8_format)


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3", "e5m2"])
@pytest.mark.parametrize("arguments", [{"margin": 3}, {"power_of_two": True}])
def test_dynamic_recipes_equal_the_oracle(device: torch.device, arguments: dict, fp8_format: str) -> None:
    """The step from the tensor's own amax, and nothing remembered."""
    xs = [torch.randn(9, 24, device=device).to(BF16) * size for size in (1.0, 40.0)]
    recipe, policy = both("dynamic", fp8_format, **arguments)
    layer = linear(24, 17, BF16, device)
    run_beside_oracle(layer, xs, recipe, policy, fp8_format)
    assert_untouched(layer.weight)


# Close to bf16 ------------------------------------------------------------------------------------------------------


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def test_close_to_bf16_and_not_bf16(device: torch.device) -> None:
    """Relative error and cosine of y, dx and dw to float64 products of the unquantised operands.

    Rounding to a format with m mantissa bits changes a number by at most u = 2^-(m+1) of itself: 2^-4 in E4M3, 2^-3 in
    E5M2. Over a product of independent zero-mean operands the errors add up as squares, so the relative Frobenius
    error is at most sqrt(u_a^2 + u_b^2 + (u_a u_b)^2): 0.0885 for E4M3 x E4M3, 0.140 for E5M2 x E4M3 (what falls into
    FP8's subnormals, 2^-15 of the largest and below, is nothing beside it). The cosine is then at least
    sqrt(1 - error^2): 0.996 and 0.990. In the mean over a binade the rounding error is 0.74 * u * 2 / sqrt(12), that
    is 0.43 u: an error below a fifth of the bound would mean that the product did not run in FP8 (bf16's is 0.004).
    """
    x = torch.randn(128, 96, device=device, dtype=BF16, requires_grad=True)
    layer = linear(96, 64, BF16, device)
    dy = torch.randn(128, 64, device=device, dtype=BF16)
    with octavo.fp8_autocast():
        y = layer(x)
    y.backward(dy)
    dx, dw, w = x.grad, layer.weight.grad, layer.weight.detach().double()
    exact = {
        "y": (y, x.detach().double() @ w.T + layer.bias.detach().double(), 2.0**-4, 2.0**-4),
        "dx": (dx, dy.double() @ w, 2.0**-3, 2.0**-4),
        "dw": (dw, dy.double().T @ x.detach().double(), 2.0**-3, 2.0**-4),
    }
    for name, (got, want, ua, ub) in exact.items():
        bound = math.sqrt(ua**2 + ub**2 + (ua * ub) ** 2)
        error = relative_error(got, want)
        assert bound / 5 < error < bound, f"{name}: {error} against {bound}"
        assert cosine(got, want) > math.sqrt(1 - bound**2), name


def one_hot_case(device: torch.device) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    """A dy with a single one in each row and column: every gradient element is one product of two codes, so no
    accumulator has anything to round, and with power-of-two steps a GPU's bits are forced too."""
    x = torch.randn(16, 24, device=device, dtype=BF16, requires_grad=True)
    dy = torch.eye(16, device=device, dtype=BF16)[torch.randperm(16)]
    return x, linear(24, 16, BF16, device), dy


@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
def test_backward_outside_the_region_is_fp8(device: torch.device, kind: str) -> None:
    """The predecessor's regression: what backward does depends on what forward captured, not on where it is called."""
    x, layer, dy = one_hot_case(device)
    recipe, policy = both(kind, power_of_two=True)
    gradients = []
    for inside in (True, False):
        octavo.fp8_state().reset()
        x.grad = layer.weight.grad = None
        with octavo.fp8_autocast(recipe=recipe):
            y = layer(x)
            if inside:
                y.backward(dy)
        if not inside:
            assert not octavo.fp8_state().enabled
            y.backward(dy)
        gradients.append((x.grad, layer.weight.grad))
    for a, b in zip(*gradients, strict=True):
        assert_bits(a, b)
    _, saved = oracle.Linear().forward(policy, x, layer.weight, layer.bias)
    want = oracle.Linear().backward(saved, dy)
    assert_bits(x.grad, want.x.value, "dx")
    assert_bits(layer.weight.grad, want.w.value, "dw")
    assert differ(x.grad, dy @ layer.weight.detach()) and differ(layer.weight.grad, dy.T @ x.detach())


def test_gradients_of_a_small_network_point_the_way_of_bf16(device: torch.device) -> None:
    """Backward outside the region: cosine to bf16 above 0.99, norm within 5%, for every parameter.

    Each layer's error to its exact product is about 0.43 of the bounds of `test_close_to_bf16_and_not_bf16`, so 0.04
    forward and 0.06 backward; three products in a row give at most sqrt(2 * 0.04^2 + 2 * 0.06^2) = 0.10, a cosine of
    0.995 and, the error being nearly orthogonal, a norm within 0.10^2 / 2.
    """
    net = torch.nn.Sequential(linear(64, 96, BF16, device), torch.nn.GELU(), linear(96, 48, BF16, device))
    x, target = torch.randn(256, 64, device=device, dtype=BF16), torch.randn(256, 48, device=device, dtype=BF16)

    def gradients(enabled: bool) -> list[torch.Tensor]:
        net.zero_grad()
        with octavo.fp8_autocast(enabled):
            loss = (net(x) - target).float().square().mean()
        loss.backward()
        return [p.grad.clone() for p in net.parameters()]

    for fp8, bf16 in zip(gradients(True), gradients(False), strict=True):
        assert differ(fp8, bf16)
        assert cosine(fp8, bf16) > 0.99
        assert abs(fp8.double().norm() / bf16.double().norm() - 1) < 0.05


# Formats and margins, seen by bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3", "e5m2"])
def test_formats_of_the_six_operands(device: torch.device, fp8_format: str) -> None:
    """HYBRID: w and x are E4M3 in forward and in backward, dy is E5M2. One-hot partners show each operand's codes, and
    power-of-two steps leave nothing to round after the sum, so the bits are forced on every device."""
    operand, gradient = FORMATS[fp8_format]
    recipe = octavo.DynamicScaling(power_of_two=True)
    eye = torch.eye(24, device=device, dtype=BF16)

    def run(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, w = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
        with octavo.fp8_autocast(recipe=recipe, fp8_format=fp8_format):
            y = F.linear(x, w)
        y.backward(dy)
        return y, x.grad, w.grad

    def through(t: torch.Tensor, fmt: oracle.Format, partner: oracle.Format, flip: bool) -> torch.Tensor:
        """t quantised, times a quantised identity."""
        st = oracle.step_from_amax(oracle.amax(oracle.values(t)), fmt, power_of_two=True)
        so = oracle.step_from_amax(1.0, partner, power_of_two=True)
        qt, qo = oracle.quantise(oracle.values(t), st, fmt), oracle.quantise(oracle.values(eye), so, partner)
        if flip:
            return oracle.product(qo, qt.T.copy(), (partner, fmt), (so, st)).value
        return oracle.product(qt, qo, (fmt, partner), (st, so)).value

    t = torch.randn(24, 24, device=device).to(BF16)
    assert_bits(run(t, eye, eye)[0], through(t, operand, operand, False), "x in forward")
    assert_bits(run(eye, t, eye)[0], through(t.T, operand, operand, True), "w in forward")
    assert_bits(run(eye, t, eye)[1], through(t, operand, gradient, True), "w in backward")
    assert_bits(run(t, eye, eye)[2], through(t, operand, gradient, True), "x in backward")
    assert_bits(run(eye, eye, t)[1], through(t, gradient, operand, False), "dy for dx")
    assert_bits(run(eye, eye, t)[2], through(t.T, gradient, operand, False), "dy for dw")


@pytest.mark.parametrize("margin", [1, 8, -1])
def test_margin_multiplies_the_step(device: torch.device, margin: int) -> None:
    """Headroom of 2^margin: the step of DelayedScaling, and in the bits of DynamicScaling what underflows (8) or
    saturates (-1)."""
    x = torch.randn(16, 24, device=device, dtype=BF16)
    layer = linear(24, 16, BF16, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    amax = {"x": x.abs().max().item(), "w": layer.weight.abs().max().item(), "g": 1.0}
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(margin=margin)):
        layer(x).sum().backward()
    optimizer.step()
    for slot, largest in amax.items():
        fmt = oracle.E5M2 if slot == "g" else oracle.E4M3
        plain = oracle.step_from_amax(largest, fmt)
        got = getattr(meta(layer.weight), f"{slot}_scale").item()
        assert got == float(plain) * 2.0**margin == float(oracle.step_from_amax(largest, fmt, margin))
    eye = torch.eye(24, device=device, dtype=BF16)
    recipe, policy = both("dynamic", margin=margin, power_of_two=True)
    with octavo.fp8_autocast(recipe=recipe):
        y = F.linear(x, eye)
    want, _ = oracle.Linear().forward(policy, x, eye)
    assert_bits(y, want.value)


# Autograd -------------------------------------------------------------------------------------------------------------


PENALTIES = {
    "with respect to x": lambda dx, x, y, w: torch.autograd.grad(dx.square().sum(), x),
    "beside another term": lambda dx, x, y, w: torch.autograd.grad(dx.square().sum() + x.float().square().sum(), x),
    "with respect to w": lambda dx, x, y, w: torch.autograd.grad(dx.square().sum() + y.sum(), w),
    "a gradient penalty": lambda dx, x, y, w: (dx.square().sum() + y.sum()).backward(),
    "unused allowed": lambda dx, x, y, w: torch.autograd.grad(dx.square().sum(), x, allow_unused=True),
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_double_backward_raises(device: torch.device, penalty: str) -> None:
    """T13: an error that says so, in whichever way the second derivative is asked for; never a wrong number."""
    x = torch.randn(16, 24, device=device, dtype=BF16, requires_grad=True)
    layer = linear(24, 16, BF16, device)
    with octavo.fp8_autocast():
        y = layer(x)
    with pytest.raises(RuntimeError, match=r"(?i)octavo|once|double|twice"):
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        PENALTIES[penalty](dx.float(), x, y.float(), layer.weight)


def test_retain_graph(device: torch.device) -> None:
    """T12: the second backward through one graph gives the same gradients and the same state."""
    x = torch.randn(16, 24, device=device, dtype=BF16, requires_grad=True)
    layer = linear(24, 16, BF16, device)
    with octavo.fp8_autocast():
        y = layer(x)
    dy = torch.randn_like(y)
    leaves = (x, layer.weight, layer.bias)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    state = snapshot(layer.weight)
    second = torch.autograd.grad(y, leaves, dy)
    for a, b in zip(first, second, strict=True):
        assert_bits(a, b)
    again = snapshot(layer.weight)
    assert all(same_bits(again[k], v) if isinstance(v, torch.Tensor) else again[k] == v for k, v in state.items())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("needs", ["x", "w", "b", "xb", "wb", "xw", "xwb"])
def test_only_the_gradients_that_are_needed(device: torch.device, needs: str) -> None:
    """Frozen weight, first layer, bias only: what exists equals the full backward's, the rest stays None, and amax_g is
    recorded each time (T1)."""
    dy = torch.randn(16, 16, device=device, dtype=BF16)
    data = torch.randn(16, 24, device=device, dtype=BF16)
    source = linear(24, 16, BF16, device)

    def run(which: str) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        layer = linear(24, 16, BF16, device)
        layer.load_state_dict(source.state_dict())
        layer.weight.requires_grad_("w" in which)
        layer.bias.requires_grad_("b" in which)
        x = data.clone().requires_grad_("x" in which)
        with octavo.fp8_autocast():
            y = layer(x)
        y.backward(dy)
        state = snapshot(layer.weight)
        assert state["g_pending"].item() == dy.abs().max().item()
        octavo.step()
        state = snapshot(layer.weight)
        assert state["g_init"] and state["g_scale"].item() == float(
            oracle.step_from_amax(dy.abs().max().item(), oracle.E5M2)
        )
        return x.grad, layer.weight.grad, layer.bias.grad

    full, part = run("xwb"), run(needs)
    for name, whole, got in zip("xwb", full, part, strict=True):
        assert (got is not None) == (name in needs), name
        if got is not None:
            assert_bits(got, whole, name)


def test_frozen_first_layer_lets_the_others_advance(device: torch.device) -> None:
    """T1: with the first layer frozen there is no backward through it; every other layer's scales move each step."""
    net = torch.nn.Sequential(*(linear(24, 24, BF16, device) for _ in range(3)))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0)
    for factor in (1.0, 10.0, 100.0):
        with octavo.fp8_autocast(recipe=octavo.DelayedScaling(history_len=2)):
            y = net(torch.randn(16, 24, device=device, dtype=BF16))
        dy = torch.randn_like(y) * factor
        y.backward(dy)
        optimizer.step()
        assert meta(net[2].weight).g_hist[-1].item() == dy.abs().max().item()
        for layer in net[1:]:
            assert all(getattr(meta(layer.weight), f"{slot}_init") for slot in "xwg")
    assert_untouched(net[0].weight)


def test_weight_changed_before_backward_raises(device: torch.device) -> None:
    """The weight is saved through autograd, so an in-place change between forward and backward raises, as in bf16."""
    x = torch.randn(16, 24, device=device, dtype=BF16, requires_grad=True)
    layer = linear(24, 16, BF16, device)
    with octavo.fp8_autocast():
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_same_bits_every_time(device: torch.device) -> None:
    """Same inputs, state and shapes, with an unrelated allocation in between: the same bits."""
    layer = linear(100, 33, BF16, device)
    data, dy = torch.randn(57, 100, device=device, dtype=BF16), torch.randn(57, 33, device=device, dtype=BF16)
    results = []
    for number in range(3):
        unrelated = torch.empty(12345 * (number + 1), device=device)  # noqa: F841
        x = data.clone().requires_grad_()
        with octavo.fp8_autocast():
            y = layer(x)
        results.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert_bits(b, a)


def test_functional_linear_and_attention_are_caught(device: torch.device) -> None:
    """What goes through aten::linear runs in FP8: F.linear, attention's projections, inference_mode."""
    x, w = torch.randn(16, 24, device=device, dtype=BF16), torch.randn(16, 24, device=device, dtype=BF16)
    policy = oracle.Policy()
    want, _ = oracle.Linear().forward(policy, x, w)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), octavo.fp8_autocast():
            assert_product(F.linear(x, w), want, "fast", mode.__name__)
    attention = torch.nn.MultiheadAttention(32, 2, batch_first=True, device=device, dtype=BF16)
    tokens = torch.randn(2, 5, 32, device=device, dtype=BF16)
    outside = attention(tokens, tokens, tokens)[0]
    with octavo.fp8_autocast():
        inside = attention(tokens, tokens, tokens)[0]
    assert differ(inside, outside)
