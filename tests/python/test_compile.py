# SPDX-License-Identifier: Apache-2.0
"""torch.compile: the bits and the state of the uncompiled model, in every region, and the right graph for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, differ
from compiling import (
    BF16,
    FP32,
    REGIONS,
    Block,
    K,
    assert_same_notes,
    assert_trains_alike,
    fresh,
    fresh_dynamo,
    graphs,
    inputs,
    note_state,
    reasons,
    trained,
)
from runs import linear
from torch import Tensor
from torch._inductor.utils import fresh_cache

import octavo

dynamo = pytest.fixture(autouse=True)(fresh_dynamo)


EAGER_TOO = ["default", "dynamic", "custom", "keep"]


# The same bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "region"), [*(("aot_eager", r) for r in REGIONS), *(("eager", r) for r in EAGER_TOO)]
)
def test_training(device: torch.device, backend: str, region: str) -> None:
    """Outputs, gradients, parameters, state and report over several steps are the uncompiled model's, one graph."""
    assert_trains_alike(
        lambda: Block(device),
        inputs(device),
        region=lambda: octavo.fp8_autocast(**REGIONS[region]),
        options={"backend": backend},
    )
    assert graphs() == 1


def test_inductor(device: torch.device) -> None:
    """Linears and relu keep their bits there too."""

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(linear(K, 40, BF16, device), torch.nn.ReLU(), linear(40, K, BF16, device))

    with fresh_cache():
        assert_trains_alike(
            make,
            inputs(device),
            options={"backend": "inductor"},
        )


def test_inputs_of_three_dimensions_and_other_layouts(device: torch.device) -> None:
    """Also where x is transposed or expanded, and fp16."""

    def program(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: (
            model(x.view(1, 7, K).expand(3, 7, K)).sum(0) + model(x.t().contiguous().t()) + model(x.view(7, 1, K))[:, 0]
        )

    for dtype in (BF16, torch.float16):
        assert_trains_alike(lambda dtype=dtype: linear(K, K, dtype, device), inputs(device, dtype=dtype), program)


@pytest.mark.parametrize("include", [True, False])
def test_float32(device: torch.device, include: bool) -> None:
    """FP8 with include_float32; without it the graph leaves the linears alone and says so, once."""
    xs = inputs(device, dtype=FP32)
    region = lambda: octavo.fp8_autocast(include_float32=include)  # noqa: E731
    if include:
        assert_trains_alike(lambda: Block(device, FP32), xs, region=region)
        return
    model = fresh(lambda: linear(K, K, FP32, device))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in xs:
        with region():
            assert_bits(compiled(x), model(x) if not octavo.fp8_state().enabled else F.linear(x, *model.parameters()))
    assert octavo.report().fp8_calls == 0 and reasons(octavo.report()) == {"float32"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_a_graph_leaves_alone_is_counted_once(device: torch.device, backend: str) -> None:
    """When it is made; what it runs in FP8, at each call."""
    model, (x,) = Block(device), inputs(device, 1)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for call in range(4):
        with octavo.fp8_autocast(exclude=[model.q, model.out.weight]):
            compiled(x)
        rows = octavo.report().rows
        assert {(row.m, row.n, row.k): row.calls for row in rows if row.is_fp8} == {(7, 40, K): 2 * (call + 1)}
        assert [row.calls for row in rows if row.reason == "excluded"] in ([2], [1, 1])


@pytest.mark.parametrize("what", ["module", "parameter", "all"])
def test_excluded(device: torch.device, what: str) -> None:
    """By module or parameter: the rest runs in FP8; with all of it excluded the bits are bf16's."""
    xs = inputs(device)
    found: list[torch.nn.Module] = []

    def make() -> torch.nn.Module:
        found.append(Block(device))
        return found[-1]

    def region() -> octavo.fp8_autocast:
        model = found[-1]
        return octavo.fp8_autocast(exclude={"module": [model.k], "parameter": model.out.weight, "all": model}[what])

    if what != "all":
        report = assert_trains_alike(make, xs, region=region)
        assert reasons(report) == {"fp8", "excluded"}
        return
    model = fresh(make)
    expected = trained(model, model, xs, contextlib.nullcontext)
    model = fresh(make)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_notes(trained(model, compiled, xs, region), expected)
    assert reasons(octavo.report()) == {"excluded"}


def test_small_linears(device: torch.device) -> None:
    """Left in 16 bits by the recipe's table, with its bits, and named so; a large one beside them is not."""
    layer, xs = linear(K, K, BF16, device), inputs(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    outside = [layer(x) for x in xs]
    for x, y in zip(xs, outside, strict=True):
        with octavo.fp8_autocast(recipe=octavo.DelayedScaling(small="h200")):
            assert_bits(compiled(x), y)
    assert octavo.report().fp8_calls == 0
    assert all(reason.startswith("small: ") for reason in reasons(octavo.report())) and octavo.report().rows
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(small=None)):
        assert differ(compiled(xs[0]), outside[0])
    assert octavo.report().fp8_calls == 1


# torch.autocast and modes ---------------------------------------------------------------------------------------------

ORDERS = ["octavo outside", "octavo inside"]


@contextlib.contextmanager
def autocast(device: torch.device, order: str, **arguments: Any):
    contexts = [octavo.fp8_autocast(**arguments), torch.autocast(device.type, dtype=BF16)]
    with contextlib.ExitStack() as stack:
        for context in contexts if order == "octavo outside" else reversed(contexts):
            stack.enter_context(context)
        yield


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("backend", "region"),
    [("eager", "default"), *(("aot_eager", r) for r in ("default", "keep", "high dgrad", "high forward"))],
)
def test_autocast(device: torch.device, backend: str, region: str, order: str) -> None:
    """float32 parameters: bf16 out, float32 gradients, the bits of the uncompiled model."""
    report = assert_trains_alike(
        lambda: torch.nn.Sequential(linear(K, 40, FP32, device), torch.nn.GELU(), linear(40, K, FP32, device)),
        inputs(device, dtype=FP32),
        region=lambda: autocast(device, order, **REGIONS[region]),
        options={"backend": backend},
    )
    assert reasons(report) == {"fp8"}


@pytest.mark.parametrize("order", ORDERS)
def test_autocast_in_the_function(device: torch.device, order: str) -> None:
    """Both regions entered by the compiled code."""

    def program(model: torch.nn.Module) -> Callable[[Tensor], Tensor]:
        def outside(x: Tensor) -> Tensor:
            with octavo.fp8_autocast(), torch.autocast(x.device.type, BF16):
                return model(x)

        def inside(x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, BF16), octavo.fp8_autocast():
                return model(x)

        return outside if order == "octavo outside" else inside

    report = assert_trains_alike(
        lambda: linear(K, K, FP32, device), inputs(device, dtype=FP32), program, region=contextlib.nullcontext
    )
    assert reasons(report) == {"fp8"}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_mode_gives_the_same_bits(
    device: torch.device, dtype: torch.dtype, frozen: bool, mode: type, order: str
) -> None:
    """The parameter's scales are found and used, y is the uncompiled model's, and a forward records nothing."""
    layer = linear(K, 17, dtype, device)
    x, probe = torch.randn(9, K, device=device, dtype=dtype), torch.randn(9, K, device=device, dtype=dtype) * 10
    with autocast(device, order):
        layer(x).sum().backward()
    octavo.step()
    with autocast(device, order):
        expected = layer(probe)
    with autocast(device, order, recipe=octavo.DynamicScaling()):
        assert differ(layer(probe), expected), "the old scale must saturate here, or the test shows nothing"
    layer.requires_grad_(not frozen)
    before = note_state(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with mode(), autocast(device, order):
            y = compiled(probe)
        assert_bits(y, expected)
    assert_same_notes(note_state(layer), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_steps_changes_nothing(device: torch.device, mode: type) -> None:
    """Under the same recipe or another, in training and in evaluation mode."""
    runs = []
    for evaluate in (False, True):
        model = fresh(lambda: Block(device))
        call, notes = torch.compile(model, backend="aot_eager", fullgraph=True), []
        for x in inputs(torch.device("cpu"), 0) or [
            torch.full((7, K), float(n + 1)).to(device, BF16) for n in range(3)
        ]:
            notes += trained(model, call, [x])
            if evaluate:
                model.eval()
                for recipe in ("delayed", "dynamic"):
                    with mode(), octavo.fp8_autocast(recipe=recipe):
                        call(x * 100)
                model.train()
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])
