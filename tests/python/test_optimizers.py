# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step advances the state: which optimizer, which step, and which steps do not count."""

from __future__ import annotations

import oracle
import pytest
import torch
from checks import (
    assert_bits,
    assert_product,
    assert_same_state,
    assert_state,
    differ,
    meta,
    snapshot,
)
from runs import assert_same_states, batches, linear, network, states

import octavo

BF16 = torch.bfloat16
KINDS = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}


def test_two_optimizers_advance_their_own(device: torch.device) -> None:
    """A step advances the slots of its own parameters and of those in no optimizer; the others' stay pending."""
    mine, other, frozen = (linear(24, 24, BF16, device) for _ in range(3))
    frozen.requires_grad_(False)
    first = torch.optim.SGD(mine.parameters(), lr=0.0)
    second = torch.optim.SGD(other.parameters(), lr=0.0)
    with octavo.fp8_autocast():
        y = other(frozen(mine(torch.randn(7, 24, device=device, dtype=BF16))))
    y.backward(torch.randn_like(y))
    pending = snapshot(other.weight)
    first.step()
    assert meta(mine.weight).x_init and meta(frozen.weight).x_init
    assert_same_state(snapshot(other.weight), pending)
    advanced = snapshot(mine.weight)
    second.step()
    assert meta(other.weight).x_init and meta(other.weight).x_hist[-1].item() == pending["x_pending"].item()
    assert_same_state(snapshot(mine.weight), advanced)


def test_an_optimizer_that_never_stepped_still_owns_its_parameters(device: torch.device) -> None:
    """Two optimizers, one of which only comes later: its slots wait for it. And parameters added to a group count."""
    mine, other = linear(24, 24, BF16, device), linear(24, 24, BF16, device)
    first = torch.optim.SGD(mine.parameters(), lr=0.0)
    with octavo.fp8_autocast():
        y = other(mine(torch.randn(7, 24, device=device, dtype=BF16)))
    y.sum().backward()
    first.add_param_group({"params": list(other.parameters())})
    first.step()
    assert meta(mine.weight).x_init and meta(other.weight).x_init


@pytest.mark.parametrize("old", ["dropped", "kept"])
def test_a_new_optimizer_takes_over(device: torch.device, old: str) -> None:
    """The optimizer is replaced in mid-training (a second stage, a resume): its steps advance the same slots."""
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    optimizers = []
    for x in batches(6, device):
        if len(optimizers) < 2 and (not optimizers or model.slots["x"].ring[1:]):
            if old == "dropped":
                optimizers = [None] * len(optimizers)
            optimizers.append(torch.optim.SGD(layer.parameters(), lr=0.1))
        _, saved = model.forward(oracle.Policy(), x, layer.weight, layer.bias)
        with octavo.fp8_autocast():
            y = layer(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        model.backward(saved, dy)
        optimizers[-1].step()
        optimizers[-1].zero_grad()
        model.step()
        assert_state(layer.weight, model)


def test_a_parameter_of_two_optimizers(device: torch.device) -> None:
    """In the groups of both: the step of either advances."""
    layer = linear(24, 16, BF16, device)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for _ in range(2)]
    for optimizer in (*optimizers, *optimizers):
        x = torch.randn(7, 24, device=device, dtype=BF16)
        with octavo.fp8_autocast():
            layer(x).sum().backward()
        optimizer.step()
        assert meta(layer.weight).x_hist[-1].item() == x.abs().max().item()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.1),
    ],
    ids=["sgd", "foreach adamw", "fused adamw", "adamw"],
)
def test_every_optimizer_advances_and_no_weight_is_stale(device: torch.device, make) -> None:
    """T10: fused or not, the forward after a step sees the new weight and the advanced scales."""
    layer, model = linear(24, 16, BF16, device), oracle.Linear()
    optimizer = make(layer.parameters())
    policy = oracle.Policy()
    for x in batches(3, device):
        want, saved = model.forward(policy, x, layer.weight, layer.bias)
        with octavo.fp8_autocast():
            y = layer(x)
        assert_product(y, want, "fast")
        dy = torch.randn_like(y)
        y.backward(dy)
        model.backward(saved, dy)
        before = layer.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert differ(layer.weight, before)
        model.step()
        assert_state(layer.weight, model)


def test_a_weight_written_behind_autograd_is_never_stale(device: torch.device) -> None:
    """T10: .data.copy_, .data =, load_state_dict, add_ on a flat buffer: the next forward uses the new weight."""
    layer, x = linear(24, 16, BF16, device, bias=False), batches(1, device)[0]
    policy = oracle.Policy()
    writes = {
        "copy_": lambda w: layer.weight.data.copy_(w),
        "data =": lambda w: setattr(layer.weight, "data", w.clone()),
        "load_state_dict": lambda w: layer.load_state_dict({"weight": w}),
        "no_grad": torch.no_grad()(lambda w: layer.weight.copy_(w)),
    }
    for name, write in writes.items():
        with octavo.fp8_autocast():
            layer(x)
        w = torch.randn(16, 24, device=device, dtype=BF16)
        write(w)
        with octavo.fp8_autocast():
            y = layer(x)
        assert_product(y, oracle.Linear().forward(policy, x, w)[0], "fast", name)


def test_optimizer_in_backward(device: torch.device) -> None:
    """A step called from inside a backward takes effect when that backward is over: the run equals the ordinary one."""
    results = []
    for inside in (False, True):
        torch.manual_seed(5)
        model, data = network(device, (24, 33, 33, 17)), batches(3, device)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        if inside:

            def update(p: torch.Tensor, optimizers: dict = optimizers) -> None:
                optimizers[p].step()
                p.grad = None

            for p in model.parameters():
                p.register_post_accumulate_grad_hook(update)
        for x in data:
            with octavo.fp8_autocast(recipe=octavo.DelayedScaling(2)):
                loss = model(x).float().square().mean()
            loss.backward()
            if not inside:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
        results.append((list(model.parameters()), states(model)))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        assert_bits(b, a)
    assert_same_states(results[1][1], results[0][1])
    assert all(state["g_init"] for state in results[0][1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_made_empty_by_grad_scaler_advances_nothing(device: torch.device, fused: bool) -> None:
    """An overflow: the optimizer is not called (or called with found_inf); what is pending stays, and the next good
    step puts the maximum of both into the ring."""
    layer = torch.nn.Linear(24, 16, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
    recipe = octavo.DelayedScaling(3)
    amaxes, weight = [], layer.weight.detach().clone()
    for number, size in enumerate((1.0, 50.0, 2.0)):
        x = torch.randn(7, 24, device=device) * size
        amaxes.append(x.abs().max().item())
        with torch.autocast(device.type, dtype=BF16), octavo.fp8_autocast(recipe=recipe):
            loss = layer(x).float().square().mean()
        scaler.scale(loss).backward()
        if number == 1:
            layer.bias.grad[0] = torch.inf
        before = snapshot(layer.weight)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number == 1:
            assert_same_state(snapshot(layer.weight), before)
            assert_bits(layer.weight, weight)
            assert before["x_pending"].item() == amaxes[1]
        weight = layer.weight.detach().clone()
    assert meta(layer.weight).x_hist.tolist() == [amaxes[0], amaxes[0], max(amaxes[1:])]


def test_parameters_that_join_an_optimizer_later(device: torch.device) -> None:
    """They are that optimizer's from then on, though it has not stepped since: another one's step leaves them alone."""
    mine, other = (linear(24, 24, BF16, device) for _ in range(2))
    first = torch.optim.SGD(mine.parameters(), lr=0.0)
    second = torch.optim.SGD(linear(2, 2, BF16, device).parameters(), lr=0.0)

    def use() -> None:
        with octavo.fp8_autocast():
            y = other(mine(torch.randn(7, 24, device=device, dtype=BF16)))
        y.backward(torch.randn_like(y))

    use()
    first.step()
    use()
    second.add_param_group({"params": list(other.parameters())})
    pending = snapshot(other.weight)
    first.step()
    assert_same_state(snapshot(other.weight), pending)
    second.step()
    assert meta(other.weight).x_pending == 0
