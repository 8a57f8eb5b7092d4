# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantised once in a scope: the same bits, for as long as the promise holds, and no longer.

That a copy is used at all shows by a broken promise: a change through .data, which nobody can see, is not seen. The
bits of whole trainings in one scope are compared in test_shared_inputs.py.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from programs import (
    BF16,
    RECIPES,
    K,
    Run,
    assert_equal_runs,
    replace_until_it_lies_where_it_did,
    saved_copies,
)
from runs import linear
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import octavo

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def trained(device: torch.device, recipe: str = "delayed") -> tuple[Run, torch.nn.Linear, torch.Tensor]:
    run = Run(device, recipe)
    run.train(2)
    return run, run.model["q"], run.x(grad=False)


@torch.no_grad()
def break_the_promise(layer: torch.nn.Module) -> None:
    layer.weight.data.mul_(-2)


def output(run: Run, layer: torch.nn.Module, x: torch.Tensor, mode: Callable = torch.no_grad) -> torch.Tensor:
    with mode(), run.region():
        return layer(x).detach().clone()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_copy_is_used_until_the_outermost_scope_ends(device: torch.device, recipe: str, mode: Callable) -> None:
    """Also after an inner scope has ended, and one that an exception left."""
    run, layer, x = trained(device, recipe)
    with octavo.unchanged_weights():
        first = output(run, layer, x, mode)
        break_the_promise(layer)
        with octavo.unchanged_weights():
            assert_bits(output(run, layer, x, mode), first)
        with contextlib.suppress(KeyError), octavo.unchanged_weights():
            raise KeyError
        assert_bits(output(run, layer, x, mode), first)
    fresh = output(run, layer, x, mode)
    assert not torch.equal(fresh, first)
    with contextlib.suppress(KeyError), octavo.unchanged_weights():
        assert_bits(output(run, layer, x, mode), fresh)
        break_the_promise(layer)
        raise KeyError
    assert not torch.equal(output(run, layer, x, mode), fresh)


def swap_with_another(run: Run, layer: torch.nn.Module) -> None:
    other = linear(layer.in_features, layer.out_features, BF16, run.device)
    layer.weight.data, other.weight.data = other.weight.data, layer.weight.data


def add_in_place(run: Run, layer: torch.nn.Module) -> None:
    with torch.no_grad():
        layer.weight.add_(0.5)


ENDS: dict[str, Callable[[Run, torch.nn.Module], object]] = {
    "optimizer.step": lambda run, layer: run.optimizer.step(),
    "octavo.step": lambda run, layer: octavo.step(),
    "in place": add_in_place,
    "load_state_dict": lambda run, layer: layer.load_state_dict({k: v * 3 for k, v in layer.state_dict().items()}),
    "octavo.load_state_dict": lambda run, layer: octavo.load_state_dict(layer, octavo.state_dict(run.model["k"])),
    "reset": lambda run, layer: octavo.fp8_state().reset(),
    "new memory": lambda run, layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "the same address again": lambda run, layer: replace_until_it_lies_where_it_did(layer.weight),
    "another's memory": swap_with_another,
    "the same memory, transposed": lambda run, layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "another type and back": lambda run, layer: layer.float().to(BF16),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_the_use_of_a_copy(device: torch.device, end: str) -> None:
    """After it, inside the scope, the weight is what it is outside."""
    run, _, x = trained(device)
    layer = linear(K, K, BF16, device)
    run.optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with torch.no_grad():
        run.model["k"].weight.mul_(5)
    run.train(2)
    with run.region():
        layer(x).sum().backward()
    octavo.step()
    with octavo.unchanged_weights():
        first = output(run, layer, x)
        break_the_promise(layer)
        if end != "octavo.load_state_dict":
            assert_bits(output(run, layer, x), first)
        ENDS[end](run, layer)
        after = output(run, layer, x)
        assert not torch.equal(after, first)
    assert_bits(after, output(run, layer, x))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("flags", [{}, {"share_inputs": False}, {"keep_fp8_weights": True}], ids=str)
@pytest.mark.parametrize("first", [None, *MODES])
def test_micro_batches(device: torch.device, recipe: str, flags: dict, first: Callable | None) -> None:
    """Evaluation, then training in one scope: the same bits, and w's amax is recorded all the same."""
    runs = []
    for scope in (False, True):
        run = Run(device, recipe, scope=scope, **flags)
        for update in range(3):
            with run.scope():
                if first:
                    with first():
                        run.use(run.x(50.0))
                for size in (1.0, 7.0, 0.2):
                    run.back(*run.use(run.x(size * (1 + update))))
                    run.note_state()
            run.step()
        runs.append(run)
    assert_equal_runs(runs[1], runs[0])


def test_two_recipes_whose_backward_comes_late(device: torch.device) -> None:
    """A record under another policy empties the history: the next forward measures, in a scope too."""
    runs = []
    for scope in (False, True):
        run = Run(device, scope=scope)
        run.train(3, "q", size=3.0)
        with torch.no_grad():
            run.model["q"].weight.mul_(0.3)
        with run.scope():
            late = run.use(run.x(), "q", recipe=octavo.DelayedScaling(5))
            run.use(run.x(), "q")
            run.back(*late)
            run.back(*run.use(run.x(), "q"))
            run.use(run.x(), "q", recipe=octavo.DynamicScaling())
            run.note_state()
        runs.append(run)
    assert_equal_runs(runs[1], runs[0])


def test_other_weights(device: torch.device) -> None:
    """Slices that overlap, copies of the parameter, weights that are computed, new ones where old ones were."""
    runs = []
    for scope in (False, True):
        run = Run(device, scope=scope)
        run.train(2)
        with run.scope(), run.region():
            x, w = run.x(grad=False), run.model["v"].weight
            for _ in range(2):
                for part in (w[:32], w[16:48], w[::2], w[:, :K], w[:32].t(), w):
                    run.note("slice", F.linear(x, part))
            twin = copy.deepcopy(run.model["v"])
            with torch.no_grad():
                run.note("twin", twin(x))
                twin.weight.mul_(3)
            run.note("twin", twin(x))
            for factor in range(4):
                with torch.set_grad_enabled(factor % 2 == 0):
                    run.note("computed", F.linear(x, w * factor))
                new = torch.nn.Parameter(w.detach() * (1 + factor))
                run.note("new", F.linear(x, new))
                del new
        runs.append(run)
    assert_equal_runs(runs[1], runs[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["both", "forward", "backward"])
@pytest.mark.parametrize("keep", [False, True])
def test_checkpoints(device: torch.device, reentrant: bool, where: str, keep: bool) -> None:
    """Recomputed in the scope, in none where the forward had one, and the other way round."""
    runs = []
    for scope in (False, True):
        run = Run(device, scope=scope, keep_fp8_weights=keep)
        for _ in range(3):
            x = run.x()
            with run.scope() if where != "backward" else contextlib.nullcontext(), run.region():
                ys = checkpoint(lambda x, run=run: tuple(run.model[n](x) for n in "qkv"), x, use_reentrant=reentrant)
                if where == "both":
                    run.back(*ys)
            with run.scope():
                if where == "backward":
                    run.back(*ys)
            if where == "forward":
                run.back(*ys)
            run.note("x.grad", x.grad)
            run.step()
        runs.append(run)
    assert_equal_runs(runs[1], runs[0])


def test_copies_are_one_for_the_scope_and_die_with_it(device: torch.device) -> None:
    run, _, x = trained(device)
    x.requires_grad_()
    with octavo.unchanged_weights():
        with saved_copies() as saved:
            # Kept copies are saved through autograd, where a test can see them.
            ys = [run.use(x, keep_fp8_weights=True) for _ in range(2)]
        sizes = {run.model[name].weight.numel() for name in "qkv"} - {x.numel()}
        weights = [t for t in saved if t.numel() in sizes]
        assert len(weights) == 6 and len({t.data_ptr() for t in weights}) == 3
        copies = [StorageWeakRef(t.untyped_storage()) for t in weights]
        for y in ys:
            run.back(*y)
        del weights, y, ys
        saved.clear()
        assert not any(c.expired() for c in copies)
    gc.collect()
    assert all(c.expired() for c in copies)


def test_a_scope_holds_for_every_thread(device: torch.device) -> None:
    """And ends with the last one that is in it."""
    run, layer, x = trained(device)
    seen = []

    def in_a_thread(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    scope = octavo.unchanged_weights()
    with octavo.unchanged_weights():
        first = output(run, layer, x)
        in_a_thread(scope.__enter__)
        break_the_promise(layer)
        in_a_thread(lambda: seen.append(output(run, layer, x)))
    seen.append(output(run, layer, x))
    scope.__exit__(None, None, None)
    for y in seen:
        assert_bits(y, first)
    assert len(seen) == 2 and not torch.equal(output(run, layer, x), first)


@pytest.mark.parametrize("scope", [False, True])
@pytest.mark.parametrize("when", ["before", "after", "in the scope"])
def test_hooks_of_the_users(device: torch.device, when: str, scope: bool) -> None:
    """A gradient hook on the weight is called, and what is kept with the weight stays."""
    runs, calls = [], []
    for hooked in (False, True):
        run = Run(device, scope=scope)
        for step in range(4):
            with run.scope():
                if hooked and (step, when) == (0, "before"):
                    run.model["q"].weight.register_hook(calls.append)
                run.back(*run.use(run.x(1.0 + step)))
                if hooked and step == 2 and when == "in the scope":
                    run.model["q"].weight.register_hook(calls.append)
                run.back(*run.use(run.x()))
            if hooked and step == 1 and when == "after":
                run.model["q"].weight.register_hook(calls.append)
            run.step()
        runs.append(run)
    assert calls
    assert_equal_runs(runs[1], runs[0])
