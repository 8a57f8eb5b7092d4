# SPDX-License-Identifier: Apache-2.0
"""How long a state lives: copies, dropped models, reused memory, reset."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from checks import (
    assert_bits,
    assert_same_state,
    assert_untouched,
    snapshot,
)
from runs import batches, both, linear, run_beside_oracle, train

import octavo

BF16 = torch.bfloat16
KINDS = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}


def test_deepcopy_starts_fresh(device: torch.device) -> None:
    """A copy has no history; it trains like a new layer, and the original does not notice."""
    layer = linear(24, 16, BF16, device)
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.1), batches(2, device))
    before = snapshot(layer.weight)
    twin = copy.deepcopy(layer)
    assert_untouched(twin.weight)
    recipe, policy = both()
    run_beside_oracle(twin, batches(2, device), recipe, policy)
    assert_same_state(snapshot(layer.weight), before)


def test_state_survives_data_and_dies_with_the_parameter(device: torch.device) -> None:
    """`.data =` keeps the state (the parameter owns it); a dropped parameter takes it along."""
    layer = linear(24, 16, BF16, device)
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.1), batches(2, device))
    before = snapshot(layer.weight)
    layer.weight.data = layer.weight.data.clone()
    assert_same_state(snapshot(layer.weight), before)
    gone = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert gone() is None, "something keeps the parameter alive"


def test_addresses_are_not_identities(device: torch.device) -> None:
    """Models made and dropped by the hundred, whose memory is reused: none ever sees another's history, and each trains
    like the first."""
    expected = None
    data = batches(2, device, 32)
    for number in range(200):
        torch.manual_seed(7)
        layer = linear(32, 32, BF16, device)
        assert_untouched(layer.weight)
        losses = train(layer, torch.optim.SGD(layer.parameters(), lr=0.1), data)
        result = torch.stack(losses)
        expected = result if expected is None else expected
        assert_bits(result, expected, f"model {number}")


def test_reset_forgets_everything(device: torch.device) -> None:
    """fp8_state().reset(): every layer starts as new."""
    layer = linear(24, 16, BF16, device)
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.1), batches(2, device))
    octavo.fp8_state().reset()
    assert_untouched(layer.weight)
    recipe, policy = both()
    run_beside_oracle(layer, batches(2, device), recipe, policy)


@pytest.mark.parametrize("between", ["step", "reset"])
def test_what_happens_between_forward_and_backward(device: torch.device, between: str) -> None:
    """A step, or a reset, moves the slots of x and w, not what forward saved: x and w are quantised for backward with
    the scales that they had in forward.

    The histories of x and w hold amaxes three times those of now, so a scale read too late would be another one; dy has
    the same amax throughout, so g's scale is one and the same, wherever it is read.
    """
    layer, recipe = linear(24, 16, BF16, device), octavo.DelayedScaling(1)
    x = torch.randn(7, 24, device=device, dtype=BF16)
    dy = torch.randn(7, 16, device=device, dtype=BF16).clamp(-1, 1)
    dy[0, 0] = 1.0
    small = layer.weight.detach().clone()
    layer.weight.data.mul_(3)
    with octavo.fp8_autocast(recipe=recipe):
        layer(x * 3).backward(dy)
    octavo.step()
    layer.weight.data.copy_(small)
    old = snapshot(layer.weight)

    def gradients() -> tuple[torch.Tensor, ...]:
        data = x.clone().requires_grad_()
        with octavo.fp8_autocast(recipe=recipe):
            first, second = layer(data), layer(data)
        want = torch.autograd.grad(first, (data, layer.weight), dy)
        octavo.step() if between == "step" else octavo.fp8_state().reset()
        return want, torch.autograd.grad(second, (data, layer.weight), dy)

    for want, got in zip(*gradients(), strict=True):
        assert_bits(got, want)
    if between == "step":
        new = snapshot(layer.weight)
        assert new["x_scale"] < old["x_scale"] and new["w_scale"] < old["w_scale"]
        assert new["g_scale"] == old["g_scale"]


def test_backward_uses_the_scale_of_dy_that_forward_captured(device: torch.device) -> None:
    """Backward depends only on what forward captured: a step in between moves g's scale, not this backward's."""
    layer, x = linear(24, 16, BF16, device), torch.randn(7, 24, device=device, dtype=BF16)
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.0), batches(2, device))
    dy = torch.randn(7, 16, device=device, dtype=BF16)  # far above the gradients of that history: it saturates
    with octavo.fp8_autocast():
        first, second = layer(x), layer(x)
    (want,) = torch.autograd.grad(first, layer.weight, dy)
    before = snapshot(layer.weight)
    octavo.step()
    assert snapshot(layer.weight)["g_scale"] > 2 * before["g_scale"]
    assert_bits(torch.autograd.grad(second, layer.weight, dy)[0], want)


@pytest.mark.parametrize("first", ["hook", "state"])
def test_hooks_of_the_users(device: torch.device, first: str) -> None:
    """PyTorch clears a parameter's hooks when the first Python hook is registered, and C++ ones are to be first."""
    w, x = torch.nn.Parameter(torch.randn(16, 32, device=device)), torch.randn(8, 32, device=device)
    seen: list[torch.Tensor] = []

    def step() -> None:
        with octavo.fp8_autocast(include_float32=True):
            F.linear(x, w).sum().backward()
        octavo.step()

    if first == "state":
        step()
    before = octavo.fp8_state().get_weight_meta(w)
    handle = w.register_hook(seen.append)
    after = octavo.fp8_state().get_weight_meta(w)
    assert (before is None) == (after is None) == (first == "hook")
    if before is not None:
        assert torch.equal(before.w_hist, after.w_hist) and before.w_init
    step()
    handle.remove()
    second = w.register_hook(lambda grad: seen.append(grad))
    step()
    second.remove()
    w._backward_hooks = None
    step()
    assert len(seen) == 2
    assert octavo.fp8_state().get_weight_meta(w).w_init


def test_a_cleared_hook_leaves_no_slot_behind() -> None:
    slots, _ = torch.ops.octavo._arena_use()
    for _ in range(300):
        w = torch.nn.Parameter(torch.randn(16, 16))
        with octavo.fp8_autocast(include_float32=True):
            F.linear(torch.randn(2, 16), w).sum().backward()
        w.register_hook(lambda grad: None)
    del w
    gc.collect()
    last = torch.nn.Parameter(torch.randn(16, 16))
    with octavo.fp8_autocast(include_float32=True):
        F.linear(torch.randn(2, 16), last).sum().backward()
    last.register_hook(lambda grad: None)  # what is left behind is cleared with the next one
    assert torch.ops.octavo._arena_use()[0] <= slots + 1
