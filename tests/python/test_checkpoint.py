"""Activation checkpointing: recomputed in the region that the forward ran in, wherever backward is called."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import assert_same_state, snapshot
from runs import linear, network
from torch.utils.checkpoint import checkpoint

import octavo

BF16 = torch.bfloat16


def gradients(device: torch.device, reentrant: bool | None, inside: bool, enabled: bool = True) -> tuple[list, list]:
    """Gradients and states after two steps; reentrant None: no checkpoint. inside: backward is called in the region."""
    torch.manual_seed(0)
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        x = torch.randn(7, model[0].in_features, device=device, dtype=BF16, requires_grad=True)
        with contextlib.ExitStack() as region:
            region.enter_context(octavo.fp8_autocast(enabled=enabled))
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            if not inside:
                region.close()
            optimizer.zero_grad()
            y.float().square().mean().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return found, [snapshot(layer.weight) for layer in model if isinstance(layer, torch.nn.Linear)]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_changes_nothing(device: torch.device, reentrant: bool, inside: bool) -> None:
    """Gradients and state are those of the run without a checkpoint, bit for bit."""
    want, states = gradients(device, None, inside)
    got, other_states = gradients(device, reentrant, inside)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(other_states, states, strict=True):
        assert_same_state(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_in_a_region_does_not_recompute_in_it(device: torch.device, reentrant: bool) -> None:
    """A forward outside of any region stays bf16 when it is recomputed, even if backward is called in a region."""
    want, _ = gradients(device, None, inside=True, enabled=False)
    got, _ = gradients(device, reentrant, inside=True, enabled=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    torch.manual_seed(0)
    model = network(device)
    x = torch.randn(7, model[0].in_features, device=device, dtype=BF16, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=reentrant)
    octavo.report(reset=True)
    with octavo.fp8_autocast():
        y.float().square().mean().backward()
    assert octavo.report().fp8_calls == 0


def test_an_optimizer_in_backward_waits_for_the_whole_of_it(device: torch.device) -> None:
    """Frozen layers with a trained shift behind each, whose optimizer steps as soon as its gradient is there, in the
    backward that a reentrant checkpoint runs inside the outer one. Blocks that are recomputed after that still have the
    scales of their forward."""
    frozen = [linear(16, 16, BF16, device, bias=False).requires_grad_(False) for _ in range(2)]
    shifts = [torch.nn.Parameter(torch.zeros(16, device=device, dtype=BF16)) for _ in range(2)]
    optimizers = [torch.optim.SGD([shift], lr=0.0) for shift in shifts]
    outputs: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def block(i: int, h: torch.Tensor) -> torch.Tensor:
        y = frozen[i](h) + shifts[i]
        outputs[i].append(y.detach().clone())
        return y

    def step(x: torch.Tensor, blocks: int = 2) -> None:
        h = x.clone().requires_grad_()
        with octavo.fp8_autocast():
            for i in range(blocks):
                h = checkpoint(block, i, h, use_reentrant=True)
            h.float().sum().backward()

    x = torch.randn(4, 16, device=device, dtype=BF16)
    step(x)
    octavo.step()
    with octavo.fp8_autocast():
        frozen[0]((x * 100).requires_grad_()).sum().backward()  # what the advance will bring into the history
    for shift, optimizer in zip(shifts, optimizers, strict=True):
        shift.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    outputs[0].clear(), outputs[1].clear()
    step(x)
    for forward, *recomputed in outputs.values():
        assert recomputed and all(torch.equal(forward, again) for again in recomputed)
    assert snapshot(frozen[0].weight)["x_hist"].max() == (x * 100).abs().max().float().cpu()
