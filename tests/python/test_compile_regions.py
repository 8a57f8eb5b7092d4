# SPDX-License-Identifier: Apache-2.0
"""torch.compile: each region has the right graph, whether it is entered around the call or by the compiled code."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_bits, assert_untouched, differ
from compiling import (
    BF16,
    REGIONS,
    Block,
    K,
    Percentile,
    assert_same_notes,
    assert_trains_alike,
    fp8_rows,
    fresh,
    fresh_dynamo,
    graphs,
    inputs,
    no_recompiling,
    note_state,
    reasons,
    trained,
)
from runs import linear
from torch import Tensor

import octavo

dynamo = pytest.fixture(autouse=True)(fresh_dynamo)


# The right graph ------------------------------------------------------------------------------------------------------


def test_outside_is_bf16(device: torch.device) -> None:
    """Before, between and after regions: plain bits, nothing counted, nothing recorded."""
    model, (x,) = Block(device), inputs(device, 1)
    outside = model(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        octavo.report(reset=True)
        y = compiled(x)
        y.float().sum().backward()
        assert_bits(y, outside)
        assert not octavo.report().rows
        assert_untouched(model.q.weight)
        with octavo.fp8_autocast(enabled=False):
            assert_bits(compiled(x), outside)
        with octavo.fp8_autocast():
            assert differ(compiled(x), outside)
            with octavo.fp8_autocast(enabled=False):
                assert_bits(compiled(x), outside)
        assert octavo.report().fp8_calls == 4


def test_changing_regions(device: torch.device) -> None:
    """Each region finds its own graph again: the uncompiled bits, and nothing is recompiled after the first round."""
    model, xs = Block(device), inputs(device, 3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with octavo.fp8_autocast():
        model(xs[2]).float().sum().backward()
    octavo.step()
    kinds = [
        *REGIONS.values(),
        {"exclude": model.q},
        {"enabled": False},
        {"exclude": [model.q, model.k]},
        {"recipe": Percentile(4)},
    ]

    def all_regions(order: list[dict]) -> None:
        for x in xs[:2]:
            for arguments in order:
                with octavo.fp8_autocast(**arguments):
                    expected, actual = model(x), compiled(x)
                assert_bits(actual, expected, f"{arguments}")
            assert_bits(compiled(x), model(x))

    with torch._dynamo.config.patch(recompile_limit=32):
        all_regions(kinds)
        made = graphs()
        with no_recompiling():
            all_regions(kinds[::-1])
            all_regions(kinds)
    assert graphs() == made


def test_a_recipe_changed_in_mid_training(device: torch.device) -> None:
    """The state follows the policy as it does uncompiled."""
    runs = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)):
        model = fresh(lambda: Block(device))
        call, notes = wrap(model), []
        for name in ("default", "short", "dynamic", "short", "custom", "default", "e4m3", "high wgrad"):
            torch.manual_seed(3)
            notes += trained(model, call, inputs(device, 2), lambda name=name: octavo.fp8_autocast(**REGIONS[name]))
        runs.append((notes, fp8_rows(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1] and runs[0][1]


def test_equal_recipes_made_anew_are_one_graph(device: torch.device) -> None:
    """A region and a recipe made in each step of the loop do not compile again."""
    model, xs = Block(device), inputs(device, 6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for make in (lambda: octavo.DelayedScaling(3), lambda: Percentile(3), octavo.DynamicScaling):
        trained(model, compiled, xs[:1], lambda make=make: octavo.fp8_autocast(recipe=make()))
        made = graphs()
        with no_recompiling():
            trained(model, compiled, xs, lambda make=make: octavo.fp8_autocast(recipe=make()))
        assert graphs() == made


def test_dynamic_shapes(device: torch.device) -> None:
    """Several batch sizes: the uncompiled bits, one graph, each shape counted as itself."""
    sizes = (7, 12, 33, 8, 130)
    for mark in (True, False):
        torch.compiler.reset()
        runs, made = [], graphs()
        for wrap in (
            lambda m: m,
            lambda m, mark=mark: torch.compile(m, backend="aot_eager", dynamic=None if mark else True),
        ):
            model = fresh(lambda: Block(device))
            call, optimizer, notes = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1), []
            for rows in sizes:
                torch.manual_seed(rows)
                x = torch.randn(rows, K, device=device, dtype=BF16)
                if mark:
                    torch._dynamo.mark_dynamic(x, 0)
                with octavo.fp8_autocast():
                    y = call(x)
                y.float().square().mean().backward()
                notes += [("y", y.detach()), *((n, p.grad.clone()) for n, p in model.named_parameters())]
                optimizer.step()
                optimizer.zero_grad()
                notes += note_state(model)
            runs.append((notes, fp8_rows(octavo.report())))
        assert_same_notes(runs[1][0], runs[0][0])
        assert runs[1][1] == runs[0][1] and {m for m, *_ in runs[0][1]} == set(sizes)
        assert graphs() == made + 1


def test_threads(device: torch.device) -> None:
    """A region holds on its own thread: the same compiled callable is bf16 on another, and the other way round."""
    model, (x,) = Block(device), inputs(device, 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outside = model(x)
    with octavo.fp8_autocast():
        inside = model(x)
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            with octavo.fp8_autocast():
                assert_bits(compiled(x), inside)
                assert_bits(other.submit(compiled, x).result(), outside)
            assert_bits(other.submit(octavo.fp8_autocast()(compiled), x).result(), inside)
            assert_bits(compiled(x), outside)


# One code, several modules --------------------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    def __init__(self, device: torch.device, compile_blocks: bool, **options: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(device) for _ in range(3))
        self.head = linear(K, K, BF16, device)
        for block in self.blocks if compile_blocks else ():
            block.compile(backend="aot_eager", fullgraph=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("exclude", [None, "a linear", "a parameter", "a block", "the head"])
def test_regional_compilation(device: torch.device, exclude: str | None) -> None:
    """Each block by itself: one graph for all of them, two where one of them has something excluded."""
    runs = []
    for compile_blocks in (False, True):
        model = fresh(lambda compile_blocks=compile_blocks: Stack(device, compile_blocks))
        excluded = {
            "a linear": model.blocks[1].k,
            "a parameter": model.blocks[1].out.weight,
            "a block": model.blocks[1],
            "the head": [model.head],
            None: (),
        }[exclude]
        notes = trained(model, model, inputs(device), lambda e=excluded: octavo.fp8_autocast(exclude=e))
        runs.append((notes, fp8_rows(octavo.report()), reasons(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1:] == runs[0][1:] and runs[0][1]
    assert graphs() == (1 if exclude in (None, "the head") else 2)


def test_two_wrappers_of_one_module(device: torch.device) -> None:
    """And the module itself: one state, whichever runs."""
    runs = []
    for compiled in (False, True):
        model = fresh(lambda: Block(device))
        calls = [model] * 3
        if compiled:
            calls = [torch.compile(model, backend=backend) for backend in ("aot_eager", "eager")] + [model]
        notes = []
        for x, call in zip(inputs(device, 6), calls * 2, strict=True):
            notes += trained(model, call, [x])
        runs.append((notes, fp8_rows(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1]


def test_two_models_of_one_class(device: torch.device) -> None:
    """Each has its own state, under one graph."""
    runs = []
    for wrap in (lambda m: m, lambda m: torch.compile(m, backend="aot_eager", fullgraph=True)):
        models = [fresh(lambda: Block(device)), Block(device)]
        calls, notes = [wrap(m) for m in models], []
        for n in (0, 1, 1, 0, 0, 1):
            torch.manual_seed(len(notes))
            notes += trained(models[n], calls[n], [torch.randn(7, K).to(device, BF16) * (1 + 9 * n)])
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])
    assert graphs() == 1


# Regions in the function ----------------------------------------------------------------------------------------------

RECIPE = octavo.DelayedScaling(3, margin=0.5, wgrad="high")  # no other test has an equal one
REGION = octavo.fp8_autocast(recipe=octavo.DelayedScaling(2))


@octavo.fp8_autocast(recipe=octavo.DelayedScaling(3), fp8_format="e4m3")
def in_a_region(layer: torch.nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def with_block(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        h = m.q(x) * m.k(x)
    return m.out(h)


def with_recipe(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast(recipe=RECIPE, fp8_format="e4m3", keep_fp8_weights=True):
        return m.out(m.q(x))


def global_region(m: Block, x: Tensor) -> Tensor:
    with REGION:
        h = m.q(x)
    return m.out(h) + m.out(m.k(x))


def settings_by_name(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast(True, 4, margin=1):
        h = m.q(x)
    with octavo.fp8_autocast(recipe="current", fp8_format="e4m3"):
        return m.out(h)


def decorator(m: Block, x: Tensor) -> Tensor:
    return m.out(in_a_region(m.q, x) + m.v(x)) + in_a_region(m.out, m.k(x))


def nested(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        h = m.q(x)
        with octavo.fp8_autocast(recipe=RECIPE, fp8_format="e4m3"):
            h = h + m.k(x)
        return m.out(h) + in_a_region(m.out, h)


def disabled_inside(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        h = m.q(x)
        with octavo.fp8_autocast(enabled=False):
            h = h + m.k(x)
            with octavo.fp8_autocast(recipe="dynamic"):
                h = h + m.v(x)
        return m.out(h)


def excluding(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast(exclude=[m.k, m.out.weight]):
        return m.out(m.q(x) + m.k(x))


def twice(m: Block, x: Tensor) -> Tensor:
    for _ in range(2):
        with octavo.fp8_autocast():
            x = m.out(m.q(x)) + x
        x = m.out(m.k(x)) + x
    return x


def early_return(m: Block, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        for layer in (m.q, m.k):
            if layer is m.k:
                return m.out(layer(x))
    return x


INSIDE = [with_block, with_recipe, settings_by_name, decorator, nested, disabled_inside, twice, early_return]
NOT_IN_ONE_GRAPH = [global_region, excluding]


class Called(Block):
    """Runs a function of the model instead of its own forward."""

    function: Callable[[Block, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return type(self).function(self, x)


def called(function: Callable[[Block, Tensor], Tensor], device: torch.device) -> torch.nn.Module:
    model = type("Called", (Called,), {"function": staticmethod(function)})(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in function.__code__.co_names)
    return model


@pytest.mark.parametrize(
    ("around", "function"),
    [
        *((around, f) for around in ("nothing", "a region") for f in (*INSIDE, *NOT_IN_ONE_GRAPH)),
        *(("a region that is off", f) for f in (with_block, disabled_inside)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_regions_inside(device: torch.device, around: str, function: Callable) -> None:
    """Entered by the compiled code, alone or in a region around the call: the bits and counts of the same code."""
    region = {
        "nothing": contextlib.nullcontext,
        "a region": lambda: octavo.fp8_autocast(recipe=octavo.DelayedScaling(5)),
        "a region that is off": lambda: octavo.fp8_autocast(enabled=False),
    }[around]
    full = function in INSIDE
    assert_trains_alike(lambda: called(function, device), inputs(device), region=region, options={"fullgraph": full})
    assert (graphs() == 1 or not full) and not octavo.fp8_state().enabled


@pytest.mark.parametrize("function", INSIDE, ids=lambda f: f.__name__)
def test_regions_inside_do_not_recompile(device: torch.device, function: Callable) -> None:
    """Also with another region around, and back."""
    model = called(function, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    around = [contextlib.nullcontext, lambda: octavo.fp8_autocast(recipe="dynamic")]
    for warm in (False, True):
        with no_recompiling() if warm else contextlib.nullcontext():
            for region in around:
                for x in inputs(device, 2):
                    with region():
                        expected, actual = model(x), compiled(x)
                    assert_bits(actual, expected)


def test_a_recipe_made_inside(device: torch.device) -> None:
    """By the compiled code itself, each time anew: that breaks the graph."""

    def function(m: Block, x: Tensor) -> Tensor:
        with octavo.fp8_autocast(recipe=octavo.DelayedScaling(3, dgrad="high")):
            return m.out(m.q(x))

    assert_trains_alike(
        lambda: called(function, device),
        inputs(device),
        region=contextlib.nullcontext,
        options={"fullgraph": False},
    )


def test_a_recipe_whose_equal_is_gone(device: torch.device) -> None:
    """That another recipe of the same value was made and is no more takes nothing from this one."""
    recipe, layer, (x,) = octavo.DynamicScaling(0.25), linear(K, K, BF16, device), inputs(device, 1)

    def run(x: Tensor) -> Tensor:
        with octavo.fp8_autocast(recipe=recipe):
            return layer(x)

    octavo.DynamicScaling(0.25)
    assert_bits(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))
    assert octavo.report().fp8_calls == 2


def test_an_exception_leaves_the_region(device: torch.device) -> None:
    """Raised by the compiled code inside of its region, or outside of the graph in the caller's."""
    layer, (x,) = linear(K, K, BF16, device), inputs(device, 1)

    @torch.compile(backend="aot_eager")
    def run(x: Tensor, fail: bool) -> Tensor:
        with octavo.fp8_autocast():
            y = layer(x)
            if fail:
                raise KeyError("here")
            return y

    outside = layer(x)
    for _ in range(2):
        with pytest.raises(KeyError):
            run(x, True)
        assert not octavo.fp8_state().enabled
        assert_bits(layer(x), outside)
        octavo.report(reset=True)
        run(x, False)
        assert octavo.report().fp8_calls == 1 and not octavo.fp8_state().enabled


def test_the_process_wide_switch(device: torch.device) -> None:
    """Holds for compiled callables, is the default region, and leaves with its bits when it is switched off."""
    model, (x,) = Block(device), inputs(device, 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outside = compiled(x)
    with octavo.fp8_autocast():
        expected = model(x)
    assert differ(expected, outside)
    for _ in range(2):
        octavo.fp8_linear_enable(True)
        try:
            octavo.report(reset=True)
            assert_bits(compiled(x), expected)
            assert octavo.report().fp8_calls == 4
            with octavo.fp8_autocast(enabled=False):
                assert_bits(compiled(x), outside)
        finally:
            octavo.fp8_linear_enable(False)
        assert_bits(compiled(x), outside)


# Cached graphs --------------------------------------------------------------------------------------------------------

CACHED = """
import sys, torch, octavo
octavo.FP8Recipe.small = None
layer = torch.nn.Linear(24, 24, bias=False, dtype=torch.bfloat16)
with torch.no_grad():
    for p in layer.parameters():
        p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
x = torch.linspace(-3, 2, 168).view(7, 24).bfloat16().requires_grad_()
compiled = torch.compile(layer, fullgraph=True)
for region in sys.argv[1:]:
    results = []
    for call in (layer, compiled):
        octavo.report(reset=True)
        with eval(region):
            y = call(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results)), region
    assert octavo.report().fp8_calls == (0 if "False" in region else 1), octavo.report()
    print(region, *[t.float().sum().item() for t in results[0]])
"""


def test_processes_that_share_a_cache(tmp_path: Path) -> None:
    """A process is not served the graph of another one's region, and may be served its own."""
    off, delayed, dynamic = (
        "octavo.fp8_autocast(False)",
        "octavo.fp8_autocast()",
        "octavo.fp8_autocast(recipe=octavo.DynamicScaling(2), fp8_format='e4m3')",
    )
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(*regions: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", CACHED, *regions], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()

    first, second = run(off, delayed), run(dynamic, delayed, off)
    assert second[:0:-1] == first and len(set(second)) == 3
