# SPDX-License-Identifier: Apache-2.0
"""A small model whose every result is noted, so that two ways to run one program can be compared bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from checks import assert_bits
from runs import linear

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


def replace_until_it_lies_where_it_did(t: torch.Tensor) -> None:
    """Other memory, and other memory again: the last may have the address of the first."""
    where, new = t.data_ptr(), t.data * -0.75
    for _ in range(16):
        t.data = new.clone()
        if t.data_ptr() == where:
            break


# What happens to x ----------------------------------------------------------------------------------------------------
