# SPDX-License-Identifier: Apache-2.0
"""Programs in which linears meet one input, or almost: what sharing it must not change."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from programs import (
    BF16,
    OPTIONS,
    RECIPES,
    ROWS,
    WIDTHS,
    K,
    Run,
    replace_until_it_lies_where_it_did,
    saved_copies,
    x_copies,
)
from runs import linear
from torch.utils.checkpoint import checkpoint

import octavo

SCENARIOS: dict[str, Callable[[Run], None]] = {}


def scenario(function: Callable[[Run], None]) -> Callable[[Run], None]:
    SCENARIOS[function.__name__] = function
    return function


@scenario
def x_changes_between(run: Run) -> None:
    """In place, seen by the version counter: directly, through a view and through detach."""
    changes = (lambda x: x.mul_(3), lambda x: x.view(-1)[5:].mul_(-2), lambda x: x.detach().add_(1), torch.relu_)
    for change in changes:
        run.equalize()
        x = run.x()
        ys = run.use(x, "q")
        with torch.no_grad():
            change(x)
        ys += run.use(x, "kv")
        run.back(*ys)
        run.step()


@scenario
def x_becomes_another_tensor(run: Run) -> None:
    """The same object, of other strides, other memory or another type: t_, .data, set_."""
    changes = (
        lambda x: x.t_(),
        lambda x: x.as_strided_((4, K), (K, 1)),
        lambda x: setattr(x, "data", x.data * 7),
        replace_until_it_lies_where_it_did,
        lambda x: setattr(x, "data", x.data.view(torch.float16)),
        lambda x: x.set_((x * 3).contiguous()),
        lambda x: x.resize_(2, K),
        lambda x: setattr(x, "data", x.data.t()),
        lambda x: setattr(x, "data", x.data[:ROWS]),
    )
    for change in changes:
        run.equalize()
        x = run.x(grad=False, rows=K)
        with torch.autocast(run.device.type, dtype=BF16):
            ys = run.use(x, "q")
            change(x)
            ys += run.use(x, "kv")
        run.back(*ys)
        run.step()


@scenario
def x_is_freed_between(run: Run) -> None:
    """A new tensor where the old one was; another linear, on another input, between."""
    for size in (1.0, 2.0, 5.0, 0.1):
        run.equalize()
        x = run.x(size, grad=False)
        ys = run.use(x, "qk")
        del x
        ys += run.use(run.x(size, grad=False), "v")
        for name, x in zip("qkvq", [run.x(), run.x(4.0)] * 2, strict=True):
            ys += run.use(x, name)
        run.back(*ys)
        run.step()


@scenario
def x_has_no_history(run: Run) -> None:
    """Zeros are no history, for some of the weights or for all; Inf and NaN are no amax."""
    run.train(1, size=0.0)
    run.train(1, "q")
    run.train(2, copies=None)
    for value in (float("inf"), float("nan")):
        x = run.x()
        with torch.no_grad():
            x[1, 2] = value
        run.back(*run.use(x))
        run.step()


@scenario
def float32_under_two_autocasts(run: Run) -> None:
    for _ in range(2):
        run.equalize()
        x = run.x(dtype=torch.float32)
        ys = []
        for dtype, name in ((BF16, "q"), (torch.float16, "k"), (BF16, "v")):
            with torch.autocast(run.device.type, dtype=dtype):
                ys += run.use(x, name)
        run.back(*ys)
        run.note("x.grad", x.grad)
        run.step()


# What happens to the scales -------------------------------------------------------------------------------------------


@scenario
def several_steps(run: Run) -> None:
    run.train(1)
    run.train(4, copies=None if run.recipe == RECIPES["custom"] else 1)


@scenario
def one_was_trained_alone(run: Run) -> None:
    run.train(2, "q", size=20.0)
    run.train(5)


@scenario
def all_were_loaded_from_one(run: Run) -> None:
    """The same state into each, which then is equal, but for what came from other weights."""
    run.train(2)
    saved = octavo.state_dict(run.model["q"])
    for name in "qkv":
        octavo.load_state_dict(run.model[name], saved)
    run.train(3)


@scenario
def scales_move_between(run: Run) -> None:
    """A step, a reset, a load between two linears on the same x."""
    run.train(2)
    saved = octavo.state_dict(run.model)
    run.train(2, size=3.0)
    for event in (octavo.step, octavo.fp8_state().reset, lambda: octavo.load_state_dict(run.model, saved)):
        run.equalize()
        run.back(*run.use(run.x(30.0)))
        x = run.x()
        ys = run.use(x, "q")
        event()
        ys += run.use(x, "kv")
        run.back(*ys)
        run.step()


@scenario
def two_optimizers(run: Run) -> None:
    """Each steps what is its own, not always both; one weight belongs to none."""
    of_q, of_k = (torch.optim.SGD(run.model[name].parameters(), lr=0.1) for name in "qk")
    del run.optimizer
    for number in range(6):
        run.back(*run.use(run.x(1.0 + number)))
        run.step(of_q if number % 2 else of_k)
        if number % 3 == 0:
            run.step(of_q)


@scenario
def equal_states_part(run: Run) -> None:
    """Both loaded with the same that waits for a step, which then only one gets; or left so by a skipped step."""
    both = torch.optim.AdamW([run.model[name].weight for name in "qk"], lr=0.01, fused=True)
    only_k = torch.optim.SGD(run.model["k"].parameters(), lr=0.1)
    run.optimizer = torch.optim.SGD(run.model["v"].parameters(), lr=0.1)
    for skipped in (False, True, True):
        for size in (1.0, 0.5, 40.0):
            run.back(*run.use(run.x(size), "qkv"))
            if size < 40:
                run.step(both)
        if skipped:
            both.found_inf = torch.ones((), device=run.device)
            both.grad_scale = torch.ones((), device=run.device)
            run.step(both)
            del both.found_inf, both.grad_scale
        else:
            saved = octavo.state_dict(run.model["q"])
            for name in "qk":
                octavo.load_state_dict(run.model[name], saved)
        run.step(only_k)
        run.back(*run.use(run.x(), "qkv"))
        run.step(both)


@scenario
def not_shared_before(run: Run) -> None:
    """Other inputs for each, while sharing was off."""
    for number in range(3):
        with run.region(share_inputs=False):
            ys = [run.model[name](run.x(size)) for name, size in zip("qkv", (1.0, 30.0, 0.1), strict=True)]
        run.back(*ys)
        run.step()
        run.back(*run.use(run.x()))
        if number:
            run.step()


def scaled(run: Run, fused: bool) -> None:
    if run.device.type == "cuda":
        pytest.skip("PyTorch's GradScaler unscales no bf16 gradients on a GPU")
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=4.0, growth_interval=2)
    for number in range(6):
        x = run.x(1.0 + number)
        loss = sum(y.float().square().mean() for y in run.use(x, "qkv" if number % 2 else "kq"))
        scaler.scale(loss * (float("inf") if number in (1, 4) else 1)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.model.zero_grad()
        run.note_state()


@scenario
def skipped_steps(run: Run) -> None:
    scaled(run, fused=False)


@scenario
def skipped_fused_steps(run: Run) -> None:
    scaled(run, fused=True)


# Which linears --------------------------------------------------------------------------------------------------------


@scenario
def needs_differ(run: Run) -> None:
    """The first has no use for a transposed copy, or only that; what is made for it is not enough for the next."""
    run.train(2)
    high = type(run.recipe)(**{name: getattr(run.recipe, name) for name in OPTIONS[run.recipe]}, wgrad="high")
    for first, frozen in (({}, "q"), ({}, "k"), ({"recipe": high}, ""), ({"fp8_format": "e5m2"}, "")):
        x = run.x()
        for name in frozen:
            run.model[name].weight.requires_grad_(False)
        run.back(*run.use(x, "q", **first), *run.use(x, "kv"))
        run.note("x.grad", x.grad)
        run.step()
        for name in frozen:
            run.model[name].weight.requires_grad_(True)


@scenario
def two_regions(run: Run) -> None:
    """One input under two recipes and two formats, in turns."""
    run.train(1)
    regions = ({}, {"recipe": octavo.DynamicScaling()}, {"recipe": octavo.DelayedScaling(5, 2)}, {"fp8_format": "e5m2"})
    for number in range(8):
        x = run.x(1.0 + number)
        run.back(*[y for i, name in enumerate("qkv") for y in run.use(x, name, **regions[(number + i) % 4])])
        run.step()


@scenario
def forwards_without_gradients_between(run: Run) -> None:
    run.train(2)
    for mode in (torch.no_grad, torch.inference_mode):
        x = run.x(5.0)
        ys = run.use(x, "q")
        with mode():
            run.use(x, "kq")
        ys += run.use(x, "kv", copies=None)
        run.back(*ys)
        with mode():
            run.use(x)
        run.step()


@scenario
def tied_weights(run: Run) -> None:
    run.model["v"].weight = run.model["q"].weight
    run.model["v"].bias = run.model["q"].bias
    for _ in range(4):
        run.train()


@scenario
def slices_of_a_fused_weight(run: Run) -> None:
    whole = run.model["v"]
    for number in range(5):
        x = run.x(1.0 + number)
        with saved_copies() as saved:
            ys = [F.linear(x, part) for part in whole.weight.split([24, 32, 40] if number != 3 else [40, 32, 24])]
        if number == 2 and run.recipe != RECIPES["custom"]:
            assert len(x_copies(saved)) == (1 if run.flags["share_inputs"] else 3)
        run.back(*ys)
        run.note("x.grad", x.grad)
        run.step()


@scenario
def adapters(run: Run) -> None:
    """A frozen weight and a low-rank pair beside it, on the same input."""
    run.model["q"].requires_grad_(False)
    run.model["b"] = linear(WIDTHS[1], WIDTHS[0], BF16, run.device)
    run.optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
    for number in range(4):
        x = run.x(1.0 + number, grad=number != 2)
        base, down = run.use(x, "qk")
        run.back(base + run.use(down, "b")[0])
        run.note("x.grad", x.grad)
        run.step()


# How backward goes ----------------------------------------------------------------------------------------------------


@scenario
def backward_of_some(run: Run) -> None:
    """What records x for one weight records it for no other."""
    for names in ("qkv", "q", "kv", "qkv", "v", "qkv"):
        ys = dict(zip("qkv", run.use(run.x(2.0)), strict=True))
        run.back(*[ys[name] for name in names])
        run.step()


@scenario
def accumulation_in_any_order(run: Run) -> None:
    run.train(1)
    for order in ((0, 1, 2, 3, 4, 5), (5, 3, 1, 0, 2, 4), (2, 5, 0, 4)):
        xs = [run.x(1.0), run.x(6.0)]
        ys = [y for x in xs for y in run.use(x)]
        for i in order:
            run.back(ys[i])
            run.note_state()
        for x in xs:
            run.note("x.grad", x.grad)
        run.step()


@scenario
def retained_graphs(run: Run) -> None:
    run.train(1)
    for _ in range(3):
        x = run.x(2.0)
        ys = run.use(x)
        run.back(*ys, retain_graph=True)
        run.back(ys[1], retain_graph=True)
        with torch.no_grad():
            x.mul_(2)  # what is saved is not x
        run.back(*ys)
        run.note("x.grad", x.grad)
        run.step()


@scenario
def saved_elsewhere(run: Run) -> None:
    """Hooks that move what is saved away, and back before backward."""
    run.train(1)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            ys = run.use(run.x(2.0))
        run.back(*ys)
        run.step()


@scenario
def copies_of_the_model(run: Run) -> None:
    run.train(2)
    twin = Run.__new__(Run)
    twin.__dict__ |= run.__dict__
    twin.model = copy.deepcopy(run.model)
    twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    for number in range(4):
        x = run.x(1.0 + number)
        ys = [y for name in "qkv" for r in (run, twin) for y in r.use(x, name)]
        run.back(*ys)
        run.step()
        if number != 1:
            twin.step()


def checkpointed(run: Run, reentrant: bool) -> None:
    """The edges of checkpoint and region before, behind and between the linears that share."""
    run.train(2)
    for inside, outside_first in (("qkv", ""), ("kv", "q"), ("qk", ""), ("k", "q"), ("q", "")):
        for region_inside in (False, True):
            x = run.x(2.0)
            after = "".join(n for n in "qkv" if n not in inside + outside_first)

            def block(x: torch.Tensor, names: str = inside, inner: bool = region_inside) -> tuple[torch.Tensor, ...]:
                with run.region() if inner else contextlib.nullcontext():
                    return tuple(run.model[name](x) for name in names)

            ys = run.use(x, outside_first)
            with contextlib.nullcontext() if region_inside else run.region():
                ys += checkpoint(block, x, use_reentrant=reentrant)
            ys += run.use(x, after)
            run.back(*ys)
            run.note("x.grad", x.grad)
            run.step()


@scenario
def checkpoints(run: Run) -> None:
    checkpointed(run, reentrant=False)


@scenario
def reentrant_checkpoints(run: Run) -> None:
    checkpointed(run, reentrant=True)


VARIANTS = {
    "shared": {"share_inputs": True},
    "kept": {"share_inputs": False, "keep_fp8_weights": True},
    "scoped": {"share_inputs": False, "scope": True},
    "everything": {"share_inputs": True, "keep_fp8_weights": True, "scope": True},
}
