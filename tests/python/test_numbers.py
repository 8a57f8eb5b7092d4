# SPDX-License-Identifier: Apache-2.0
"""Zeros, infinities, tiny values, stale scales: N1 to N8 of the cases from public trackers."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_product, assert_same_state, assert_state, assert_untouched, meta, snapshot
from runs import both, linear, reshaped, run_beside_oracle

import octavo

BF16 = torch.bfloat16
FORMATS = ["e4m3", "e5m2"]


def step_of(recipe: octavo.FP8Recipe, amaxes: list[float], fmt: str) -> torch.Tensor:
    """The recipe's own answer for a window, as a 0-d float32 tensor."""
    window = torch.tensor(amaxes, dtype=torch.float32)
    return torch.as_tensor(recipe.scale_from_history(window, octavo.FP8Format(fmt)), dtype=torch.float32).reshape(())


# The formula ----------------------------------------------------------------------------------------------------------


def interesting_amaxes() -> list[float]:
    """Both sides of powers of two times FP8's maxima, float32's ends, subnormals, and noise over all exponents."""
    numbers = [0.0, 1e-45, 1e-40, 2.0**-126, 6e-8, 1.0, 448.0, 57344.0, 3.4028235e38]
    for maximum in (448.0, 57344.0):
        for exponent in (-100, -30, -10, -1, 0, 1, 7, 30, 100):
            centre = np.float32(maximum * 2.0**exponent)
            numbers += [float(centre), float(np.nextafter(centre, np.float32(0))), float(np.nextafter(centre, np.inf))]
    generator = np.random.default_rng(0)
    noise = generator.integers(1, 0x7F800000, 3000, dtype=np.uint32).view(np.float32)
    return [float(np.float32(n)) for n in numbers] + noise.astype(np.float64).tolist()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("margin", [0, 1, -2, 30])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "dynamic"])
def test_step_formula(recipe: str, power_of_two: bool, margin: int, fmt: str) -> None:
    """Two float32 roundings, the clamp to [2^-126, 2^126], up to a power of two by bits; amax 0 gives 1."""
    made, _ = both(recipe, margin=margin, power_of_two=power_of_two)
    for amax in interesting_amaxes():
        want = oracle.step_from_amax(amax, oracle.FORMATS[fmt], margin, power_of_two)
        assert_bits(step_of(made, [amax], fmt), torch.tensor(float(want), dtype=torch.float32), f"amax {amax!r}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_delayed_takes_the_largest_of_the_window(fmt: str) -> None:
    """`max` looks at the whole window, `most_recent` at its last entry."""
    window = [3.0, 7.0, 0.5, 2.0]
    form = oracle.FORMATS[fmt]
    largest, last = step_of(octavo.DelayedScaling(4), window, fmt), octavo.DelayedScaling(4, algorithm="most_recent")
    assert largest.item() == float(oracle.step_from_amax(7.0, form))
    assert step_of(last, window, fmt).item() == float(oracle.step_from_amax(2.0, form))


@pytest.mark.parametrize("fmt", FORMATS)
def test_n4_powers_of_two_round_up(fmt: str) -> None:
    """N4: the step is a power of two, never below the plain one (so it never saturates for want of rounding), and
    below twice the plain one."""
    plain, rounded = octavo.DelayedScaling(1), octavo.DelayedScaling(1, power_of_two=True)
    for amax in interesting_amaxes():
        a, b = step_of(plain, [amax], fmt).item(), step_of(rounded, [amax], fmt).item()
        assert math.frexp(b)[0] == 0.5, f"{b!r} is no power of two"
        assert a <= b < 2 * a, f"amax {amax!r}: {a!r}, {b!r}"


def test_n4_in_a_layer(device: torch.device) -> None:
    """The layer's steps are those of the formula next to powers of two, on the device too."""
    form = oracle.E4M3
    for amax in (448.0, 448.0 + 2.0**-3, 3.5, 3.515625, 0.87109375):
        x = torch.tensor([[amax, -amax / 2, 0.1, 0.0]], device=device, dtype=torch.float32).to(BF16)
        layer = linear(4, 3, BF16, device)
        with octavo.fp8_autocast(recipe=octavo.DelayedScaling(power_of_two=True)):
            layer(x).sum().backward()
        octavo.step()
        want = oracle.step_from_amax(x[0, 0].item(), form, power_of_two=True)
        assert meta(layer.weight).x_scale.item() == float(want)


# N1: zeros ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
@pytest.mark.parametrize("zero", ["x", "w", "dy", "all"])
def test_n1_all_zero_tensors(device: torch.device, zero: str, kind: str) -> None:
    """Exact zeros out, finite scales, the history unpolluted: no slot records a zero."""
    layer = linear(24, 16, BF16, device)
    x = torch.randn(7, 24, device=device, dtype=BF16)
    dy = torch.randn(7, 16, device=device, dtype=BF16)
    if zero in ("w", "all"):
        torch.nn.init.zeros_(layer.weight)
    x = (torch.zeros_like(x) if zero in ("x", "all") else x).requires_grad_()
    dy = torch.zeros_like(dy) if zero in ("dy", "all") else dy
    recipe, policy = both(kind)
    model = oracle.Linear()
    want, saved = model.forward(policy, x, layer.weight, layer.bias)
    with octavo.fp8_autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    gradients = model.backward(saved, dy)
    assert_product(y, want, "fast")
    assert_product(x.grad, gradients.x)
    assert_product(layer.weight.grad, gradients.w)
    if zero in ("x", "w", "all"):
        assert_bits(y, layer.bias.detach().expand(7, 16))
    octavo.step()
    model.step()
    if kind == "dynamic":
        assert_untouched(layer.weight)
        return
    if zero == "all":
        assert_untouched(layer.weight)
    else:
        assert_state(layer.weight, model)
        state = snapshot(layer.weight)
        assert all(math.isfinite(state[f"{slot}_scale"].item()) and state[f"{slot}_scale"] > 0 for slot in "xwg")


def test_n1_zeros_between_two_steps(device: torch.device) -> None:
    """A step of zeros neither records nor moves a scale: the ring before and after is the same."""
    layer = linear(24, 16, BF16, device)
    recipe, policy = both(history_len=3)
    xs = [torch.randn(7, 24, device=device, dtype=BF16) for _ in range(3)]
    xs[1].zero_()
    model = run_beside_oracle(layer, xs, recipe, policy)
    assert len({float(a) for a in model.slots["x"].ring}) == 2


# N2: infinities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
def test_n2_one_bad_activation(device: torch.device, kind: str, bad: float) -> None:
    """One Inf or NaN in x: it shows in its own row and nowhere else, the amax is that of the finite elements."""
    layer = linear(24, 16, BF16, device)
    x = torch.randn(7, 24, device=device, dtype=BF16)
    x[3, 5] = bad
    recipe, policy = both(kind)
    model = oracle.Linear()
    want, _ = model.forward(policy, x, layer.weight, layer.bias)
    with octavo.fp8_autocast(recipe=recipe):
        y = layer(x)
    assert y[3].isnan().all()
    rest = [0, 1, 2, 4, 5, 6]
    assert y[rest].isfinite().all()
    part = oracle.Product(want.value[rest], want.exact[rest], want.magnitude[rest], want.k)
    assert_product(y[rest], part, "fast")
    y.sum().backward()
    octavo.step()
    if kind == "delayed":
        finite = x[x.isfinite()].abs().max().item()
        assert meta(layer.weight).x_hist.tolist() == [finite] * 16


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
def test_n2_one_bad_gradient(device: torch.device, fp8_format: str, bad: float) -> None:
    """It stays visible (a loss scaler looks for it), records nothing for g, and the next finite step is back to normal,
    bit for bit as if it had not happened."""
    recipe, policy = both("delayed", fp8_format, history_len=4)
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    for number in range(4):
        x = torch.randn(7, 24, device=device, dtype=BF16, requires_grad=True)
        dy = torch.randn(7, 16, device=device, dtype=BF16)
        if number == 2:
            dy[3, 5] = bad
        want, saved = model.forward(policy, x, layer.weight, layer.bias)
        with octavo.fp8_autocast(recipe=recipe, fp8_format=fp8_format):
            y = layer(x)
        assert_product(y, want, "fast")
        before = meta(layer.weight).g_hist.clone() if number else None
        layer.zero_grad()
        y.backward(dy)
        gradients = model.backward(saved, dy)
        if number == 2:
            assert not x.grad[3].isfinite().any(), "dx hides the overflow"
            assert x.grad[[0, 1, 2, 4, 5, 6]].isfinite().all()
            assert not layer.weight.grad[5].isfinite().any(), "dw hides the overflow"
            assert not layer.bias.grad[5].isfinite(), "db hides the overflow"
        else:
            assert_product(x.grad, gradients.x)
            assert_product(layer.weight.grad, gradients.w)
        octavo.step()
        model.step()
        assert_state(layer.weight, model)
        if number == 2:
            assert_bits(meta(layer.weight).g_hist, before)


def test_n2_first_gradient_is_bad(device: torch.device) -> None:
    """An overflow in the very first backward (a loss scale set too high) leaves g's history empty."""
    layer = linear(24, 16, BF16, device)
    dy = torch.full((7, 16), math.inf, device=device, dtype=BF16)
    with octavo.fp8_autocast():
        y = layer(torch.randn(7, 24, device=device, dtype=BF16))
    y.backward(dy)
    octavo.step()
    state = snapshot(layer.weight)
    assert state["x_init"] and state["w_init"] and not state["g_init"]
    assert state["g_pending"].item() == 0


def test_n2_inf_of_a_sum_stays_inf(device: torch.device) -> None:
    """An Inf in dy meets a weight column of one sign in E5M2: dx is Inf of the right sign, not NaN, not a number."""
    w = torch.nn.Parameter(torch.tensor([[1.0, -1.0]], device=device, dtype=BF16))
    x = torch.ones(1, 2, device=device, dtype=BF16, requires_grad=True)
    with octavo.fp8_autocast():
        y = F.linear(x, w)
    y.backward(torch.full((1, 1), math.inf, device=device, dtype=BF16))
    assert x.grad.tolist() == [[math.inf, -math.inf]]
    assert w.grad.tolist() == [[math.inf, math.inf]]


# N3, N5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
@pytest.mark.parametrize("size", [6e-8, 1.2e-7, 1e-5])
def test_n3_tiny_fp16_values(device: torch.device, size: float, kind: str) -> None:
    """fp16 subnormals give finite steps and finite results, equal to the oracle's."""
    layer = linear(24, 16, torch.float16, device)
    xs = [torch.full((7, 24), size, device=device, dtype=torch.float16) for _ in range(2)]
    assert (xs[0] != 0).all()
    recipe, policy = both(kind)
    run_beside_oracle(layer, xs, recipe, policy)


def test_n3_tiny_fp32_values(device: torch.device) -> None:
    """Smaller than any 16-bit float: fp32 subnormals through the clamp of the step."""
    x = torch.tensor([[1e-45, -1e-40, 0.0, 2e-38]], device=device)
    w = torch.ones(3, 4, device=device)
    for kind in ("delayed", "dynamic"):
        recipe, policy = both(kind)
        want, _ = oracle.Linear().forward(policy, x, w)
        with octavo.fp8_autocast(recipe=recipe, include_float32=True):
            y = F.linear(x, w)
        assert y.isfinite().all()
        assert_product(y, want, "fast")


def test_n5_a_stale_small_amax_saturates(device: torch.device) -> None:
    """Values 1000 times those the scale was made for clamp to the largest finite code; nothing becomes NaN or Inf."""
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    recipe, policy = both("delayed", history_len=2)
    for size in (1e-3, 1.0, 1e30):
        x = (torch.randn(7, 24, device=device) * size).to(BF16).requires_grad_()
        want, saved = model.forward(policy, x, layer.weight, layer.bias)
        with octavo.fp8_autocast(recipe=recipe):
            y = layer(x)
        assert y.isfinite().all()
        assert_product(y, want, "fast")
        dy = (torch.randn(7, 16, device=device) * size).to(BF16)
        layer.zero_grad()
        y.backward(dy)
        gradients = model.backward(saved, dy)
        assert x.grad.isfinite().all() and layer.weight.grad.isfinite().all()
        assert_product(x.grad, gradients.x)
        assert_product(layer.weight.grad, gradients.w)
        octavo.step()
        model.step()
        assert_state(layer.weight, model)
    assert meta(layer.weight).x_hist[-1].item() == x.abs().max().item(), (
        "the true amax is recorded, not the clamped one"
    )
    clipped = meta(layer.weight)
    assert (clipped.x_clipped, clipped.w_clipped, clipped.g_clipped) == (2, 0, 2)


# N7: outputs and biases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_n7_bias_in_every_dtype(device: torch.device, dtype: torch.dtype, bias: bool) -> None:
    """fp32, fp16 and bf16 layers, with and without bias; the bias gradient is the sum of the unquantised dy."""
    layer = linear(24, 16, dtype, device, bias)
    x = torch.randn(33, 24, device=device, dtype=dtype, requires_grad=True)
    model = oracle.Linear()
    want, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias)
    with octavo.fp8_autocast(include_float32=True):
        y = layer(x)
    assert_product(y, want, "fast")
    dy = torch.randn(33, 16, device=device, dtype=dtype)
    y.backward(dy)
    gradients = model.backward(saved, dy)
    assert_product(x.grad, reshaped(gradients.x))
    assert_product(layer.weight.grad, gradients.w)
    if bias:
        exact = dy.double().sum(0)
        bound = 2.0**-20 * dy.double().abs().sum(0) + exact.abs() * torch.finfo(dtype).eps
        assert ((layer.bias.grad.double() - exact).abs() <= bound).all()
    assert octavo.report().fp8_calls == 1


# N8: CPU and GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_n8_bytes_and_amax(cuda: torch.device, dtype: torch.dtype, fmt: str) -> None:
    """The same tensor and step on a CPU and a GPU: bit-equal bytes and amax."""
    for shape in ((1,), (33, 17), (1000, 333), (4096, 513)):
        x = torch.randn(shape).to(dtype)
        for step in (1.0, 0.0371, 1e-40, 3e38):
            here, there = octavo.quantize(x, step, fmt), octavo.quantize(x.to(cuda), step, fmt)
            assert_bits(there[0], here[0])
            assert_bits(there[1], here[1])


@pytest.mark.parametrize("arguments", [{}, {"margin": 3}, {"power_of_two": True}, {"algorithm": "most_recent"}])
def test_n8_scales(cuda: torch.device, arguments: dict) -> None:
    """The same layer trained on the same tensors on a CPU and a GPU: rings, pending amaxes and scales bit-equal."""
    recipe = octavo.DelayedScaling(4, **arguments)
    states = []
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(33, 100, generator=generator).to(BF16)
    batches = [
        (torch.randn(57, 100, generator=generator) * size, torch.randn(57, 33, generator=generator) / size)
        for size in (1.0, 30.0, 1e-3, 2.0, 0.7, 1e6)
    ]
    for where in (torch.device("cpu"), cuda):
        w = torch.nn.Parameter(weight.to(where))
        states.append([])
        for x, dy in batches:
            with octavo.fp8_autocast(recipe=recipe):
                y = F.linear(x.to(where, BF16), w)
            y.backward(dy.to(where, BF16))
            states[-1].append(snapshot(w))
            octavo.step()
            states[-1].append(snapshot(w))
    for here, there in zip(*states, strict=True):
        assert_same_state(there, here)
