# SPDX-License-Identifier: Apache-2.0
"""A slot belongs to a policy: recipes changed in mid-run, and slots that stay empty for a while."""

from __future__ import annotations

import oracle
import torch
from checks import (
    assert_bits,
    assert_product,
    assert_same_state,
    assert_state,
    meta,
    snapshot,
)
from runs import batches, both, linear, train

import octavo

BF16 = torch.bfloat16
KINDS = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}


def test_t9_a_changed_recipe_is_honoured_at_once(device: torch.device) -> None:
    """A forward under another policy treats the ring as empty, the first backward that records under it clears it."""
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    first, second = both(history_len=4), both(history_len=2, margin=1)
    for number, (recipe, policy) in enumerate([first, first, second, second, first]):
        x = torch.randn(7, 24, device=device, dtype=BF16) * (1 + number)
        want, saved = model.forward(policy, x, layer.weight, layer.bias)
        with octavo.fp8_autocast(recipe=recipe):
            y = layer(x)
        assert_product(y, want, "fast", f"step {number}")
        dy = torch.randn_like(y)
        layer.zero_grad()
        y.backward(dy)
        assert_product(layer.weight.grad, model.backward(saved, dy).w, what=f"step {number}")
        octavo.step()
        model.step()
        assert_state(layer.weight, model)


def test_t9_an_evaluation_under_another_recipe_changes_nothing(device: torch.device) -> None:
    """Neither does one under another format; and what it computes is the other recipe's."""
    layer = linear(24, 16, BF16, device)
    train(layer, torch.optim.SGD(layer.parameters(), lr=0.1), batches(2, device), octavo.DelayedScaling(4))
    before, x = snapshot(layer.weight), batches(1, device)[0] * 9
    for recipe, fp8_format in (
        (octavo.DelayedScaling(2), "hybrid"),
        (octavo.DelayedScaling(4), "e5m2"),
        (octavo.DynamicScaling(), "hybrid"),
    ):
        with octavo.fp8_autocast(recipe=recipe, fp8_format=fp8_format):
            with torch.no_grad():
                quiet = layer(x)
            y = layer(x)  # a training forward that no backward follows
        fmt = oracle.FORMATS["e5m2" if fp8_format == "e5m2" else "e4m3"]
        want, _ = oracle.Linear().forward(oracle.Policy(operand=fmt), x, layer.weight, layer.bias)
        assert_product(y, want, "fast")
        assert_bits(quiet, y)
        assert_same_state(snapshot(layer.weight), before)


def test_t9_dynamic_training_in_between_keeps_the_history(device: torch.device) -> None:
    """Dynamic scaling records nothing, so a delayed history survives it."""
    layer = linear(24, 16, BF16, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    train(layer, optimizer, batches(2, device), octavo.DelayedScaling(4))
    before = snapshot(layer.weight)
    train(layer, optimizer, batches(2, device), octavo.DynamicScaling())
    assert_same_state(snapshot(layer.weight), before)


def test_t15_zero_initialised_weights(device: torch.device) -> None:
    """LoRA's B and its like: zero weights, and zero gradients below them, leave their slots empty; the first non-zero
    use is quantised with its own amax; all of it as the oracle has it, step by step."""
    below, zero = linear(24, 24, BF16, device), linear(24, 16, BF16, device)
    torch.nn.init.zeros_(zero.weight)
    recipe, policy = both(history_len=3)
    optimizer = torch.optim.SGD([*below.parameters(), *zero.parameters()], lr=0.5)
    models = [oracle.Linear(), oracle.Linear()]
    for number, x in enumerate(batches(4, device)):
        with octavo.fp8_autocast(recipe=recipe):
            hidden = below(x)
            hidden.retain_grad()
            y = zero(hidden)
        want_hidden, saved_below = models[0].forward(policy, x, below.weight, below.bias)
        want, saved_zero = models[1].forward(policy, hidden, zero.weight, zero.bias)
        assert_product(hidden, want_hidden, "fast", f"step {number}")
        assert_product(y, want, "fast", f"step {number}")
        dy = torch.randn_like(y)
        y.backward(dy)
        gradients = models[1].backward(saved_zero, dy)
        assert_product(hidden.grad, gradients.x, what=f"step {number} dx")
        assert_product(zero.weight.grad, gradients.w, what=f"step {number} dw")
        below_gradients = models[0].backward(saved_below, hidden.grad)
        assert_product(below.weight.grad, below_gradients.w, what=f"step {number} dw below")
        optimizer.step()
        optimizer.zero_grad()
        for layer, model in zip((below, zero), models, strict=True):
            model.step()
            assert_state(layer.weight, model)
        if number == 0:
            assert not meta(zero.weight).w_init and not meta(below.weight).g_init
            assert zero.weight.abs().max() > 0
    assert meta(zero.weight).w_init and meta(below.weight).g_init
