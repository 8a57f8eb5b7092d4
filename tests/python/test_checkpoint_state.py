# SPDX-License-Identifier: Apache-2.0
"""A checkpoint whose recomputation finds another scaling state than its forward did: still right gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from runs import linear
from torch.utils.checkpoint import checkpoint

import octavo

BF16 = torch.bfloat16
RECIPE, ANOTHER = octavo.DelayedScaling(3), octavo.DelayedScaling(5)


def train(layer: torch.nn.Module, size: float, recipe: octavo.FP8Recipe = RECIPE) -> None:
    """One step, which leaves histories of x, and of g, of this size; and no gradients."""
    x = (torch.randn(16, 32, device=layer.weight.device) * size).to(BF16)
    with octavo.fp8_autocast(recipe=recipe):
        y = layer(x.requires_grad_())
    y.backward(torch.randn_like(y) * size)
    octavo.step()
    layer.zero_grad()


def load_larger(layer: torch.nn.Module) -> None:
    other = linear(32, 48, BF16, layer.weight.device)
    train(other, 100.0)
    octavo.load_state_dict(layer, octavo.state_dict(other))


def retrain(layer: torch.nn.Module) -> None:
    for _ in range(3):
        train(layer, 50.0)


EVENTS: dict[str, Callable[[torch.nn.Module], object]] = {
    "nothing": lambda layer: None,
    "reset": lambda layer: octavo.fp8_state().reset(),
    "load": load_larger,
    "train": retrain,
    "another policy": lambda layer: train(layer, 100.0, ANOTHER),
    "another policy, pending": lambda layer: [train(layer, 1.0, ANOTHER), train(layer, 1.0)],
    "reset and train": lambda layer: [octavo.fp8_state().reset(), train(layer, 20.0)],
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("flags", [{}, {"keep_fp8_weights": True}, {"scope": True}], ids=str)
def test_the_state_changes_before_the_recomputation(
    device: torch.device, event: str, history: bool, reentrant: bool, flags: dict
) -> None:
    """Scales that are a hundred times too large cost E4M3 nothing but its smallest numbers; a step taken for another
    one would be wrong by that factor. An element of an operand is off by 2^-4 of itself in E4M3 and 2^-3 in E5M2, so a
    gradient is off by (1 + 2^-4)(1 + 2^-3) - 1 < 0.2 of the sum of absolute products, and by far less in the norm."""
    layer = linear(32, 48, BF16, device)
    if history:
        train(layer, 1.0)
    in_scope = octavo.unchanged_weights if flags.get("scope") else contextlib.nullcontext
    arguments = {k: v for k, v in flags.items() if k != "scope"}
    x = torch.randn(16, 32, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(16, 48, device=device, dtype=BF16)
    with in_scope():
        with octavo.fp8_autocast(recipe=RECIPE, **arguments):
            y = checkpoint(layer, x, use_reentrant=reentrant)
        EVENTS[event](layer)
        y.backward(dy)
    g, a, w = dy.double(), x.detach().double(), layer.weight.detach().double()
    for got, want in ((x.grad, g @ w), (layer.weight.grad, g.T @ a), (layer.bias.grad, g.sum(0))):
        assert got.isfinite().all()
        assert (got.double() - want).norm() < 0.1 * want.norm()
    octavo.step()
    with octavo.fp8_autocast(recipe=RECIPE):
        again = layer(x)
    assert (again.double() - (a @ w.T + layer.bias.double())).norm() < 0.1 * again.double().norm()
