# SPDX-License-Identifier: Apache-2.0
"""What a training does beside compiled linears: states, steps, accumulation, several uses of one model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from checks import assert_bits, differ, snapshot
from compiling import (
    BF16,
    REGIONS,
    Block,
    Context,
    K,
    Notes,
    another_region,
    assert_same_notes,
    assert_trains_alike,
    fp8_rows,
    fresh,
    fresh_dynamo,
    graphs,
    inputs,
    note_state,
    three,
    trained,
)
from runs import linear
from torch import Tensor

import octavo

dynamo = pytest.fixture(autouse=True)(fresh_dynamo)
Call = Callable[[Tensor], Tensor]


def compiled(call: Call) -> Call:
    return torch.compile(call, backend="aot_eager")


def test_new_parameters(device: torch.device) -> None:
    """In the place of old ones: they start without a history; loaded values keep the parameter's."""
    runs = []
    for wrap in (lambda m: m, compiled):
        model = fresh(lambda: Block(device))
        call = wrap(model)
        notes = trained(model, call, inputs(device))
        model.q.weight = torch.nn.Parameter(model.q.weight.detach() * 3)
        notes += trained(model, call, inputs(device))
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
        notes += trained(model, call, inputs(device))
        runs.append((notes, fp8_rows(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]


def test_state_that_is_loaded_and_reset(device: torch.device) -> None:
    """Training goes on with the same bits after a load, from nothing after a reset, and a deepcopy starts fresh."""
    runs: list[list[Notes]] = []
    for wrap in (lambda m: m, compiled):
        model, xs = fresh(lambda: Block(device)), inputs(device)
        call = wrap(model)
        trained(model, call, xs)
        weights, state = copy.deepcopy(model.state_dict()), octavo.state_dict(model)
        notes = [trained(model, call, xs)]
        model.load_state_dict(weights)
        octavo.load_state_dict(model, state)
        notes.append(trained(model, call, xs))
        model.load_state_dict(weights)
        octavo.fp8_state().reset()
        notes.append(trained(model, call, xs))
        model.load_state_dict(weights)
        twin = copy.deepcopy(model)
        notes.append(trained(twin, wrap(twin), xs))
        runs.append(notes)
    for actual, expected in zip(*runs[::-1], strict=True):
        assert_same_notes(actual, expected)
    assert_same_notes(runs[1][1], runs[1][0])
    assert_same_notes(runs[1][3], runs[1][2])


# Several calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region", ["default", "keep"])
@pytest.mark.parametrize("scope", [contextlib.nullcontext, octavo.unchanged_weights])
def test_gradient_accumulation(device: torch.device, scope: Context, region: str) -> None:
    """Micro-batches, also in a scope of unchanged weights: the bits of the uncompiled model outside of any."""
    xs = inputs(device, 6)
    model = fresh(lambda: Block(device))
    arguments = {"region": lambda: octavo.fp8_autocast(**REGIONS[region]), "micro_batches": 3}
    expected = trained(model, model, xs, **arguments)
    assert_trains_alike(lambda: Block(device), xs, around=scope, **arguments)
    twin = fresh(lambda: Block(device))
    call = compiled(twin)
    with scope(), torch.no_grad(), octavo.fp8_autocast():
        call(xs[0])
    with scope():
        assert_same_notes(trained(twin, call, xs, **arguments), expected)


@pytest.mark.parametrize("region", ["default", "custom"])
def test_compiled_and_uncompiled_by_turns(device: torch.device, region: str) -> None:
    """One model in one run, with a scope around some of it: one state, the same bits."""
    runs = []
    for mixed in (False, True):
        model = fresh(lambda: Block(device))
        calls = [compiled(model), model] if mixed else [model, model]
        notes = []
        for number, x in enumerate(inputs(device, 6)):
            with octavo.unchanged_weights() if number % 3 else contextlib.nullcontext():
                notes += trained(
                    model,
                    calls[number % 2],
                    [x, x * 2],
                    lambda: octavo.fp8_autocast(**REGIONS[region]),
                    micro_batches=2,
                )
        runs.append((notes, fp8_rows(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1] and graphs() == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("step_between", [False, True])
def test_late_and_repeated_backwards(device: torch.device, step_between: bool, order: tuple[int, ...]) -> None:
    """Backwards use the scales of their forward, in any order, after a step that moved them, and twice."""
    runs = []
    for wrap in (lambda m: m, compiled):
        model = fresh(lambda: linear(K, K, BF16, device))
        call, notes = wrap(model), []
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=device))], lr=0.1)
        for round_ in range(2):
            xs = [x.requires_grad_() for x in inputs(device, 2)]
            ys = []
            for x, region in zip(xs, (octavo.fp8_autocast, another_region), strict=True):
                with region():
                    ys.append(call(x))
                if step_between:
                    octavo.step()
            for number in order:
                ys[number].backward(torch.full_like(ys[number], 1.0 + round_ + number), retain_graph=True)
                notes += [("dw", model.weight.grad.clone()), ("dx", xs[number].grad.clone()), *note_state(model)]
            optimizer.step()
            octavo.step()
            notes += note_state(model)
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])


@pytest.mark.parametrize(
    ("backend", "region"), [("eager", "default"), *(("aot_eager", r) for r in ("default", "dynamic", "high forward"))]
)
def test_second_derivatives_raise(device: torch.device, region: str, backend: str) -> None:
    """With a reason, never a number."""
    layer, (x,) = linear(K, K, BF16, device), inputs(device, 1)
    call = torch.compile(lambda x: layer(x).float().square(), backend=backend, fullgraph=True)
    x.requires_grad_()
    with octavo.fp8_autocast(**REGIONS[region]):
        y = call(x)
    with pytest.raises(RuntimeError, match=r"differentiated only once|double backward|does not require grad"):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.grad(dx.float().square().sum(), (x, layer.weight))
    assert octavo.report().fp8_calls == 1


@pytest.mark.parametrize("keep", [False, True])
def test_a_weight_changed_before_backward(device: torch.device, keep: bool) -> None:
    """Raises as it does uncompiled, or the gradient is that of the forward's weight, of which a copy was kept."""
    layer, (x,) = linear(K, K, BF16, device), inputs(device, 1)
    call, gradients = compiled(layer), []
    for change in (False, True):
        probe = x.clone().requires_grad_()
        with octavo.fp8_autocast(keep_fp8_weights=keep):
            y = call(probe)
        if change:
            layer.weight.detach().mul_(2)
        if change and not keep:
            with pytest.raises(RuntimeError, match="inplace"):
                y.sum().backward()
            return
        (gradient,) = torch.autograd.grad(y.sum(), probe)
        gradients.append(gradient)
    assert_bits(*gradients)


def test_inputs_that_need_no_gradient(device: torch.device) -> None:
    """The first linear of a network has no dx; its weight and state learn all the same."""
    runs = []
    for wrap in (lambda m: m, compiled):
        model = fresh(lambda: Block(device))
        call, notes = wrap(model), []
        for x in inputs(device):
            with octavo.fp8_autocast():
                y = call(x)
            y.float().square().sum().backward()
            notes += [("y", y.detach()), *((n, p.grad.clone()) for n, p in model.named_parameters())]
            octavo.step()
            notes += note_state(model)
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])
    assert snapshot(model.q.weight)["g_init"] and differ(runs[0][0][1], inputs(device, 1)[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_outputs_of_several_linears(device: torch.device, backend: str) -> None:
    """Only some of which a backward meets: for AOTAutograd the others have a gradient of zeros, as written out here."""
    runs = []
    for is_compiled in (False, True):
        model = fresh(lambda: three(device))

        def call(x: Tensor, m: torch.nn.ModuleList = model) -> tuple[Tensor, ...]:
            return tuple(layer(x) for layer in m)

        if is_compiled:
            call = torch.compile(call, backend=backend)
        notes = []
        for number, x in enumerate(inputs(device)):
            with octavo.fp8_autocast():
                ys = call(x.requires_grad_())
            loss = ys[number % 2].float().square().sum()
            if backend == "aot_eager" and not is_compiled:
                loss = loss + sum((y * 0).float().sum() for y in ys)
            loss.backward()
            notes += [("dx", x.grad), *note_state(model)]
            octavo.step()
            notes += note_state(model)
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])


def test_forwards_that_no_backward_follows(device: torch.device) -> None:
    """Leave no state behind."""
    model, xs = Block(device), inputs(device)
    call = compiled(model)
    trained(model, call, xs)
    before = note_state(model)
    for region in (octavo.fp8_autocast, another_region):
        with region():
            expected, actual = model(xs[0] * 9), call(xs[0] * 9)
        assert_bits(actual, expected)
    octavo.step()
    assert_same_notes(note_state(model), before)
