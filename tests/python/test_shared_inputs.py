# SPDX-License-Identifier: Apache-2.0
"""Linears that follow each other on one input quantise it once: fewer copies, and never another bit.

Each scenario is run with and without sharing; outputs, gradients, weights and the scaling state have to be equal.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from runs import linear
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import octavo

BF16 = torch.bfloat16
K, ROWS, WIDTHS = 32, 8, (48, 64, 96)  # so that a copy of x is smaller than one of any weight


class Mean(octavo.FP8Recipe):
    """Another policy than the maximum's."""

    batched = True

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return amax.mean(dim=1) * 2 / octavo.FP8_MAX[fmt]


class Ordered(octavo.FP8Recipe):
    """A step that depends on how often was asked: slots with equal histories have unequal steps."""

    asked: ClassVar[int] = 0

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        Ordered.asked += 1
        return amax.max() / octavo.FP8_MAX[fmt] * (1 + 0.0625 * (Ordered.asked % 7))


RECIPES = {
    "delayed": octavo.DelayedScaling(3),
    "dynamic": octavo.DynamicScaling(),
    "custom": Mean(3),
}
OPTIONS = {
    r: ("margin", "power_of_two") if isinstance(r, octavo.DynamicScaling) else ("history_len", "margin", "power_of_two")
    for r in RECIPES.values()
}


class Run:
    """q, k and v in training, with everything kept that two runs have to have in common."""

    def __init__(self, device: torch.device, recipe: str = "delayed", *, scope: bool = False, **flags: bool) -> None:
        torch.manual_seed(0)
        octavo.fp8_state().reset()
        self.device, self.recipe, self.flags, self.scoped = device, RECIPES[recipe], flags, scope
        layers = [linear(K, n, BF16, device) for n in WIDTHS]
        self.model = torch.nn.ModuleDict(dict(zip("qkv", layers, strict=True)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.results: list[tuple[str, torch.Tensor]] = []

    def region(self, recipe: Any = None, **arguments: Any) -> octavo.fp8_autocast:
        return octavo.fp8_autocast(recipe=recipe or self.recipe, **{**self.flags, **arguments})

    def scope(self) -> contextlib.AbstractContextManager:
        return octavo.unchanged_weights() if self.scoped else contextlib.nullcontext()

    def x(self, size: float = 1.0, grad: bool = True, rows: int = ROWS, dtype: torch.dtype = BF16) -> torch.Tensor:
        return (torch.randn(rows, K, device=self.device) * size).to(dtype).requires_grad_(grad)

    def use(self, x: torch.Tensor, names: str = "qkv", copies: int | None = None, **region: Any) -> list[torch.Tensor]:
        """Forward of some layers on x. copies: of x, which are saved where inputs are shared; else one for each."""
        with contextlib.ExitStack() as stack:
            if copies is not None:
                saved = stack.enter_context(saved_copies())
            if region or not octavo.fp8_state().enabled:
                stack.enter_context(self.region(**region))
            ys = [self.model[name](x) for name in names]
        if copies is not None:
            shared = self.flags.get("share_inputs", True)
            assert len(x_copies(saved)) == (copies if shared else len(names))
        for y in ys:
            self.note("y", y)
        return ys

    def back(self, *ys: torch.Tensor, **arguments: Any) -> None:
        torch.autograd.backward([y.float().square().mean() for y in ys], **arguments)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        for name, p in self.model.named_parameters():
            self.note(f"{name}.grad", p.grad)
        (optimizer or self.optimizer).step()
        self.model.zero_grad()
        for name, p in self.model.named_parameters():
            self.note(name, p)
        self.note_state()

    def train(self, steps: int = 1, names: str = "qkv", size: float = 1.0, copies: int | None = None) -> None:
        for number in range(steps):
            x = self.x(size * (1 + number % 3))
            self.back(*self.use(x, names, copies))
            self.note("x.grad", x.grad)
            self.step()

    def equalize(self) -> None:
        """The same history for all: once one has met what another has not, nothing is shared any more."""
        octavo.fp8_state().reset()
        self.train(2)

    def note(self, what: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self.results.append((f"{len(self.results)} {what}", value.detach().clone()))

    def note_state(self) -> None:
        for name, entry in sorted(octavo.state_dict(self.model)["linears"].items()):
            for key, value in sorted(entry.items()):
                self.note(f"{name} {key}", value if isinstance(value, torch.Tensor) else None)


@contextlib.contextmanager
def saved_copies():
    """The FP8 copies that are saved for backward inside."""
    found: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.element_size() == 1:
            found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def x_copies(saved: list[torch.Tensor]) -> set[int]:
    return {t.data_ptr() for t in saved if t.numel() <= K * 2 * ROWS}


def assert_equal_runs(actual: Run, expected: Run) -> None:
    assert [what for what, _ in actual.results] == [what for what, _ in expected.results]
    assert len(expected.results) > 0
    for (what, a), (_, b) in zip(actual.results, expected.results, strict=True):
        assert_bits(a, b, what)


SCENARIOS: dict[str, Callable[[Run], None]] = {}


def scenario(function: Callable[[Run], None]) -> Callable[[Run], None]:
    SCENARIOS[function.__name__] = function
    return function


def replace_until_it_lies_where_it_did(t: torch.Tensor) -> None:
    """Other memory, and other memory again: the last may have the address of the first."""
    where, new = t.data_ptr(), t.data * -0.75
    for _ in range(16):
        t.data = new.clone()
        if t.data_ptr() == where:
            break


# What happens to x ----------------------------------------------------------------------------------------------------


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
