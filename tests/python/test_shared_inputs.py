# SPDX-License-Identifier: Apache-2.0
"""Linears that follow each other on one input quantise it once: fewer copies, and never another bit.

Each scenario is run with and without sharing; outputs, gradients, weights and the scaling state have to be equal.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref

import pytest
import torch
from checks import assert_bits
from programs import RECIPES, WIDTHS, K, Ordered, Run, assert_equal_runs, saved_copies, x_copies
from scenarios import SCENARIOS, VARIANTS
from torch.multiprocessing.reductions import StorageWeakRef

import octavo


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_bits(device: torch.device, name: str, recipe: str, variant: str) -> None:
    """With sharing, with kept weights, and all of it inside one scope of unchanged weights, which steps end early."""
    runs = []
    for flags in ({"share_inputs": False}, VARIANTS[variant]):
        runs.append(Run(device, recipe, **flags))
        with runs[-1].scope(), contextlib.nullcontext() if "checkpoint" in name else runs[-1].region():
            SCENARIOS[name](runs[-1])
    assert_equal_runs(runs[1], runs[0])


def test_steps_that_depend_on_the_order_of_calls(device: torch.device) -> None:
    """Equal histories of x, and steps that the host cannot know: each weight's own is used."""
    run = Run(device)
    run.recipe = Ordered(3)
    for number in range(4):
        x, results = run.x(1.0 + number), []
        for shared in (False, True):
            with run.region(share_inputs=shared):
                ys = [run.model[name](x) for name in "qkv"]
            losses = sum(y.float().square().mean() for y in ys)
            results.append([*ys, *torch.autograd.grad(losses, [x, *(run.model[n].weight for n in "qkv")])])
        for a, b in zip(*results, strict=True):
            assert_bits(a, b)
        octavo.step()
    steps = {octavo.fp8_state().get_weight_meta(run.model[name].weight).x_scale.item() for name in "qkv"}
    assert len(steps) == 3


# At random ------------------------------------------------------------------------------------------------------------


def at_random(run: Run, seed: int, count: int = 60) -> None:
    """A program of everything above. Backwards that a step would forbid are made before it."""
    choose = random.Random(seed)
    optimizers = [torch.optim.SGD(run.model[names].parameters(), lr=0.05) for names in "qk"]
    others = [{"recipe": octavo.DynamicScaling()}, {"recipe": octavo.DelayedScaling(4)}, {"share_inputs": False}]
    others += [{}] * 12
    x, waiting, saved = run.x(), [], octavo.state_dict(run.model)
    scopes = contextlib.ExitStack()
    for _ in range(count):
        what = choose.choices(
            ["use", "x", "mul", "eval", "back", "step", "own", "reset", "load", "save", "enter", "leave"],
            [12, 3, 1, 2, 8, 3, 1, 1, 0.5, 0.5, 1.5, 1],
        )[0]
        if what in ("step", "mul"):
            for ys in waiting:
                run.back(*ys)
            waiting.clear()
        if what == "use":
            names = choose.choice(["qkv", "qkv", "qk", "q", "vq"])
            waiting.append(run.use(x, names, **choose.choice(others if seed % 2 else [{}])))
        elif what == "x":
            x = run.x(choose.choice([0.1, 1.0, 5.0]), grad=choose.random() < 0.5)
        elif what == "mul":
            with torch.no_grad():
                x.mul_(choose.choice([0.5, 2.0]))
        elif what == "eval":
            with choose.choice([torch.no_grad, torch.inference_mode])():
                run.use(x, choose.choice(["q", "qkv"]))
        elif what == "back" and waiting:
            ys = waiting.pop(choose.randrange(len(waiting)))
            run.back(*(ys if choose.random() < 0.8 else ys[:1]))
        elif what == "step":
            run.step(choose.choice(optimizers))
        elif what == "own":
            octavo.step()
        elif what == "reset":
            octavo.fp8_state().reset()
        elif what == "load":
            octavo.load_state_dict(run.model, saved)
        elif what == "save":
            saved = octavo.state_dict(run.model)
        elif what == "enter":
            scopes.enter_context(run.scope())
        elif what == "leave":
            scopes.close()
        run.note_state()
    scopes.close()
    run.step(optimizers[0])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("variant", VARIANTS)
def test_any_program(device: torch.device, variant: str, seed: int) -> None:
    runs = []
    for each in ({"share_inputs": False}, VARIANTS[variant]):
        runs.append(Run(device, ("delayed", "delayed", "custom", "dynamic")[seed % 4], **each))
        with runs[-1].region():
            at_random(runs[-1], seed)
    assert_equal_runs(runs[1], runs[0])


# Beside the bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_saved(device: torch.device, keep: bool) -> None:
    """One copy of x for three weights, and a byte a parameter for weights that are kept."""
    run = Run(device, keep_fp8_weights=keep)
    run.train(2)
    x = run.x()
    with saved_copies() as saved, run.region():
        ys = [run.model[name](x) for name in "qkv"]
    assert len(x_copies(saved)) == 1
    of_weights = [t for t in saved if t.data_ptr() not in x_copies(saved)]
    assert sum(t.numel() for t in of_weights) == keep * K * sum(WIDTHS)
    assert len({t.data_ptr() for t in of_weights}) == 3 * keep
    run.back(*ys)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("scope", [False, True])
def test_a_weight_changed_in_place_raises_in_backward(device: torch.device, keep: bool, scope: bool) -> None:
    """As in bf16, also where backward has a copy of its own."""
    run = Run(device, keep_fp8_weights=keep, scope=scope)
    run.train(2)
    with run.scope():
        ys = run.use(run.x())
        with torch.no_grad():
            run.model["k"].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.back(*ys)


def test_inputs_and_copies_die(device: torch.device) -> None:
    """Nothing keeps x, nor its copy once backward is over and x is gone."""
    run = Run(device)
    run.train(2)
    x = run.x()
    with saved_copies() as saved, run.region():
        ys = [run.model[name](x) for name in "qkv"]
    copies, there = [StorageWeakRef(t.untyped_storage()) for t in saved], weakref.ref(x)
    saved.clear()
    del x
    run.back(*ys)
    del ys
    gc.collect()
    assert there() is None
    assert all(c.expired() for c in copies)


@pytest.mark.parametrize("scope", [False, True])
def test_two_threads(device: torch.device, scope: bool) -> None:
    """Two models trained at once, on the very same inputs: what each would be alone."""
    flags = {"share_inputs": True, "scope": scope}
    xs = [Run(device).x(1.0 + i % 3, grad=False) for i in range(12)]

    def train(run: Run) -> None:
        for x in xs:
            for _ in range(2):
                with run.scope():
                    run.back(*run.use(x))
            run.step()

    def make() -> list[Run]:
        runs = [Run(device, **flags), Run(device, **flags)]
        runs[1].optimizer = torch.optim.SGD(runs[1].model.parameters(), lr=0.5)
        with torch.no_grad():
            runs[1].model["q"].weight.mul_(3)
        return runs

    alone = make()
    for run in alone:
        train(run)
    together = make()
    threads = [threading.Thread(target=train, args=(run,)) for run in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(together, alone, strict=True):
        assert_equal_runs(a, b)
