# SPDX-License-Identifier: Apache-2.0
"""torch.compile with what else stands in a training: breaks, checkpoints, hooks, odd weights, late backwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from compiling import (
    BF16,
    REGIONS,
    Block,
    Context,
    K,
    another_region,
    assert_same_notes,
    assert_trains_alike,
    fp8_rows,
    fresh,
    fresh_dynamo,
    graphs,
    inputs,
    note_state,
    reasons,
    three,
    trained,
)
from runs import linear
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import octavo

dynamo = pytest.fixture(autouse=True)(fresh_dynamo)
Call = Callable[[Tensor], Tensor]


def compiled(call: Call) -> Call:
    return torch.compile(call, backend="aot_eager")


# Graph breaks ---------------------------------------------------------------------------------------------------------


@torch.compiler.disable
def not_compiled(layer: torch.nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@torch.compiler.disable(recursive=False)
def not_compiled_itself(layer: torch.nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@octavo.fp8_autocast(recipe=octavo.DelayedScaling(3))
def broken_region(layer: torch.nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    torch._dynamo.graph_break()
    return y + layer(y)


def a_break(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    h = m[0](x)
    torch._dynamo.graph_break()
    return m[1](h)


def a_disabled_piece(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    return m[2](not_compiled(m[1], m[0](x)))


def a_piece_that_is_disabled_itself(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    return m[2](not_compiled_itself(m[1], m[0](x)))


def a_branch(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    h = m[0](x)
    return m[1](h) if h.float().sum() > 0 else m[2](h)


def a_broken_loop(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    for layer in m:
        x = layer(x) + x
        torch._dynamo.graph_break()
    return x


def a_break_in_a_with(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    with octavo.fp8_autocast(recipe="dynamic"):
        h = m[0](x)
        torch._dynamo.graph_break()
        h = m[1](h)
    return m[2](h)


def a_disabled_piece_in_a_with(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        h = not_compiled(m[1], m[0](x))
    return not_compiled(m[0], m[2](h))


def a_branch_in_a_with(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    with octavo.fp8_autocast(fp8_format="e4m3"):
        h = m[0](x)
        y = m[1](h) if h.float().sum() > 0 else m[2](h)
    return m[2](y)


def breaks_in_nested_withs(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    with octavo.fp8_autocast():
        h = m[0](x)
        with octavo.fp8_autocast(enabled=False):
            torch._dynamo.graph_break()
            h = m[1](h)
            with octavo.fp8_autocast(recipe="dynamic"):
                h = m[0](h)
                torch._dynamo.graph_break()
                h = m[2](h)
            torch._dynamo.graph_break()
            h = m[0](h)
        torch._dynamo.graph_break()
        h = m[1](h)
    torch._dynamo.graph_break()
    return m[2](h)


def a_break_in_a_decorated_function(m: torch.nn.ModuleList, x: Tensor) -> Tensor:
    return m[2](broken_region(m[1], m[0](x)))


BREAKS = [a_break, a_disabled_piece, a_piece_that_is_disabled_itself, a_branch, a_broken_loop]
BREAKS_IN_REGIONS = [
    *(a_break_in_a_with, a_disabled_piece_in_a_with, a_branch_in_a_with, breaks_in_nested_withs),
    a_break_in_a_decorated_function,
]


@pytest.mark.parametrize(
    ("function", "inside", "backend"),
    [
        *((f, True, "aot_eager") for f in (*BREAKS, *BREAKS_IN_REGIONS)),
        *((f, False, "aot_eager") for f in BREAKS_IN_REGIONS),
        *((f, True, "eager") for f in (a_break, a_disabled_piece, breaks_in_nested_withs)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_graph_breaks(device: torch.device, function: Callable, inside: bool, backend: str) -> None:
    """All that stands in a region runs in FP8 on both sides of a break, and nothing else does."""
    seen: list[bool] = []

    def program(m: torch.nn.Module) -> Call:
        return lambda x: function(m, x)

    @contextlib.contextmanager
    def region():
        with octavo.fp8_autocast() if inside else contextlib.nullcontext():
            yield
            seen.append(octavo.fp8_state().enabled)

    options = {"fullgraph": False, "backend": backend}
    assert_trains_alike(lambda: three(device), inputs(device), program, region=region, options=options)
    assert set(seen) == {inside} and graphs() > 0
    layer, (x,) = linear(K, K, BF16, device), inputs(device, 1)
    octavo.report(reset=True)
    layer(x)
    assert not octavo.report().rows and not octavo.fp8_state().enabled


def test_a_step_that_calls_backward_itself(device: torch.device) -> None:
    """The whole training step in one compiled function."""
    runs = []
    for wrap in (lambda f: f, compiled):
        model = fresh(lambda: Block(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: torch.nn.Module = model) -> Tensor:
            with octavo.fp8_autocast():
                loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        step, notes = wrap(step), []
        for x in inputs(device):
            notes.append(("loss", step(x)))
            notes += [(name, p.grad.clone()) for name, p in model.named_parameters()]
            optimizer.step()
            optimizer.zero_grad()
            notes += note_state(model)
        runs.append((notes, fp8_rows(octavo.report())))
    assert_same_notes(runs[1][0], runs[0][0])
    assert runs[1][1] == runs[0][1] and sum(runs[0][1].values()) == 12


# Checkpoints and saved tensors ----------------------------------------------------------------------------------------


def checkpoint_inside(model: torch.nn.Module) -> Call:
    return compiled(lambda x: model(checkpoint(model, x, use_reentrant=False)))


def checkpoint_around(model: torch.nn.Module) -> Call:
    block = compiled(model)
    return lambda x: block(checkpoint(block, x, use_reentrant=False))


def reentrant_checkpoint_around(model: torch.nn.Module) -> Call:
    block = compiled(model)
    return lambda x: block(checkpoint(block, x, use_reentrant=True))


def checkpoint_of_a_region(model: torch.nn.Module) -> Call:
    def block(x: Tensor) -> Tensor:
        with octavo.fp8_autocast():
            return model(x)

    return compiled(lambda x: block(checkpoint(block, x, use_reentrant=False)))


def checkpoint_with_a_break(model: torch.nn.Module) -> Call:
    def run(x: Tensor) -> Tensor:
        x = checkpoint(not_compiled, model, x, use_reentrant=False)
        return model(x)

    return compiled(run)


CHECKPOINTS = [
    *(checkpoint_inside, checkpoint_around, reentrant_checkpoint_around, checkpoint_of_a_region),
    checkpoint_with_a_break,
]


@pytest.mark.parametrize("backward_in", [contextlib.nullcontext, another_region])
@pytest.mark.parametrize("program", CHECKPOINTS, ids=lambda f: f.__name__)
def test_checkpoints(device: torch.device, program: Callable, backward_in: Context) -> None:
    """The bits of the uncompiled model without a checkpoint, wherever backward is called."""
    xs = inputs(device)
    model = fresh(lambda: Block(device))
    expected = trained(model, lambda x: model(model(x)), xs)
    twin = fresh(lambda: Block(device))
    assert_same_notes(trained(twin, program(twin), xs, backward_in=backward_in), expected)
    assert octavo.report().fp8_calls >= 8 * len(xs) and reasons(octavo.report()) == {"fp8"}


def test_a_backward_in_a_region_does_not_recompute_in_it(device: torch.device) -> None:
    """A forward outside of any region stays bf16 when it is recomputed."""
    for program in CHECKPOINTS[:3]:
        runs = []
        for wrap in (lambda m: lambda x: m(m(x)), program):
            model = fresh(lambda: Block(device))
            runs.append(trained(model, wrap(model), inputs(device), contextlib.nullcontext, octavo.fp8_autocast))
            assert octavo.report().fp8_calls == 0
        assert_same_notes(runs[1], runs[0])


@pytest.mark.parametrize("region", ["default", "dynamic", "keep"])
@pytest.mark.parametrize("hooks", ["save_on_cpu", "list"])
def test_saved_tensor_hooks(device: torch.device, hooks: str, region: str) -> None:
    """What is saved may be taken away and brought back; the same bits."""
    packed = []

    def pack(t: Tensor) -> list[Tensor]:
        packed.append(t.shape)
        return [t.detach().clone()]

    around = {
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "list": lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0].clone()),
    }[hooks]
    report = assert_trains_alike(
        lambda: Block(device), inputs(device), region=lambda: octavo.fp8_autocast(**REGIONS[region]), around=around
    )
    assert report.fp8_calls == 12 and (packed or hooks != "list")


# Compiled autograd ----------------------------------------------------------------------------------------------------


def run_eager(device: torch.device, region: str) -> Tensor:
    with octavo.fp8_autocast(**REGIONS[region]):
        return Block(device)(inputs(device, 1)[0]).float().square().sum()


@pytest.mark.parametrize("region", ["default", "dynamic", "keep", "high wgrad"])
@pytest.mark.parametrize("forward", ["compiled", "eager"])
def test_compiled_autograd(device: torch.device, forward: str, region: str) -> None:
    """A backward that is compiled as a whole, of a compiled forward or of one that is not: the same bits and state."""
    if forward == "eager" and device.type == "cuda":
        loss = run_eager(device, region)
        context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
        with context, pytest.raises(NotImplementedError, match="forward is compiled"):
            loss.backward()
        return
    runs = []
    for is_compiled in (False, True):
        model, notes = fresh(lambda: Block(device)), []
        call = compiled(model) if is_compiled and forward == "compiled" else model
        for x in inputs(device):
            with octavo.fp8_autocast(**REGIONS[region]):
                loss = call(x).float().square().sum()
            context = contextlib.nullcontext()
            if is_compiled:
                context = torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager"))
            with context:
                loss.backward()
            notes += [("loss", loss.detach()), *((n, p.grad.clone()) for n, p in model.named_parameters())]
            octavo.step()
            notes += note_state(model)
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])


# Transforms -----------------------------------------------------------------------------------------------------------


def vmapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(F.linear, in_dims=(0, None))(x, w)


def differentiated(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.linear(x, w).float().sum())(w)


def one_dimensional(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [vmapped, differentiated, one_dimensional], ids=lambda f: f.__name__)
def test_what_cannot_run_in_fp8(device: torch.device, function: Callable, backend: str) -> None:
    """Is as outside, and counted; a warning or an error where that was asked for."""
    layer, (x,) = linear(K, 16, BF16, device, bias=False), inputs(device, 1)
    call = torch.compile(function, backend=backend, fullgraph=True)
    expected = call(x, layer.weight)
    with octavo.fp8_autocast():
        assert_bits(call(x, layer.weight), expected)
    report = octavo.report(reset=True)
    assert report.fp8_calls == 0 and report.other_calls > 0
    if backend == "aot_eager":  # else the op itself runs, whose warnings go where those of PyTorch's ops go
        with octavo.fp8_autocast(on_fallback="warn"), pytest.warns(UserWarning, match="should run in FP8"):
            assert_bits(call(x, layer.weight), expected)
    with octavo.fp8_autocast(on_fallback="error"), pytest.raises(Exception, match="should run in FP8"):
        call(x, layer.weight)
    assert_bits(call(x, layer.weight), expected)
