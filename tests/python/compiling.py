# SPDX-License-Identifier: Apache-2.0
"""One program run uncompiled and compiled, with everything that both have to have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from checks import assert_bits
from runs import linear
from torch import Tensor
from torch._dynamo.utils import counters

import octavo

BF16, FP32 = torch.bfloat16, torch.float32
K = 24
Notes = list[tuple[str, Tensor]]
Program = Callable[[torch.nn.Module], Callable[[Tensor], Tensor]]
Context = Callable[[], contextlib.AbstractContextManager]


class Percentile(octavo.FP8Recipe):
    def scale_from_history(self, amax: Tensor, fmt: octavo.FP8Format) -> Tensor:
        return torch.quantile(amax, 0.9) / octavo.FP8_MAX[fmt]


class BatchedMean(octavo.FP8Recipe):
    batched = True

    def scale_from_history(self, amax: Tensor, fmt: octavo.FP8Format) -> Tensor:
        return amax.mean(dim=1) * 2 / octavo.FP8_MAX[fmt]


REGIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "short": {"recipe": octavo.DelayedScaling(2, margin=1, power_of_two=True)},
    "dynamic": {"recipe": octavo.DynamicScaling()},
    "custom": {"recipe": Percentile(3)},
    "batched": {"recipe": BatchedMean(3)},
    "high forward": {"recipe": octavo.DelayedScaling(forward="high")},
    "high dgrad": {"recipe": octavo.DelayedScaling(dgrad="high")},
    "high wgrad": {"recipe": octavo.DynamicScaling(wgrad="high")},
    "high gradients": {"recipe": octavo.DelayedScaling(dgrad="high", wgrad="high")},
    "keep": {"keep_fp8_weights": True},
    "not shared": {"share_inputs": False},
    "e4m3": {"fp8_format": "e4m3"},
    "e5m2": {"fp8_format": "e5m2", "recipe": octavo.DynamicScaling()},
}


def fresh_dynamo() -> Iterator[None]:
    """The body of a fixture: no graph and no count of another test."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def graphs() -> int:
    """How many graphs were made since the test began."""
    return counters["stats"]["unique_graphs"]


def no_recompiling() -> contextlib.AbstractContextManager:
    return torch.compiler.set_stance("fail_on_recompile")


class Block(torch.nn.Module):
    """Three linears on one input, what a gated network makes of them, and a linear back."""

    def __init__(self, device: torch.device, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(K, device=device, dtype=dtype)
        self.q, self.k, self.v = (linear(K, 40, dtype, device) for _ in range(3))
        self.out = linear(40, K, dtype, device, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.out(F.gelu(self.q(h)) * self.k(h) + self.v(h))


def inputs(device: torch.device, count: int = 3, rows: int = 7, dtype: torch.dtype = BF16) -> list[Tensor]:
    """The second is larger and the third smaller than what a history of the first expects."""
    return [torch.randn(rows, K, device=device, dtype=dtype) * (1, 5, 0.3)[n % 3] for n in range(count)]


def note_state(model: torch.nn.Module) -> Notes:
    linears = octavo.state_dict(model)["linears"]
    return [
        (f"{name} {key} {entry['policy']}", entry[key].clone())
        for name, entry in sorted(linears.items())
        for key in ("scale", "pending", "seeded", "history")
    ]


def trained(
    model: torch.nn.Module,
    call: Callable[[Tensor], Tensor],
    xs: list[Tensor],
    region: Context = octavo.fp8_autocast,
    backward_in: Context = contextlib.nullcontext,
    micro_batches: int = 1,
) -> Notes:
    """Outputs, gradients, parameters and state of a training; an optimizer's step after so many micro-batches."""
    notes: Notes = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.1)
    for number, data in enumerate(xs):
        x = data.clone().requires_grad_()
        with region():
            y = call(x)
        notes.append((f"y {number}", y.detach().clone()))
        with backward_in():
            (y.float() * torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y)).sum().backward()
        assert x.grad is not None
        notes.append((f"dx {number}", x.grad))
        notes += [(f"{n}.grad {number}", p.grad.clone()) for n, p in model.named_parameters() if p.grad is not None]
        notes += note_state(model)
        if (number + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
            notes += [(f"{name} {number}", p.detach().clone()) for name, p in model.named_parameters()]
            notes += note_state(model)
    return notes


def assert_same_notes(actual: Notes, expected: Notes) -> None:
    assert [what for what, _ in actual] == [what for what, _ in expected] and expected
    for (what, a), (_, b) in zip(actual, expected, strict=True):
        assert_bits(a, b, what)


def fp8_rows(report: octavo.Report) -> dict[tuple, int]:
    return {(row.m, row.n, row.k, row.reason): row.calls for row in report.rows if row.is_fp8}


def reasons(report: octavo.Report) -> set[str]:
    return {row.reason for row in report.rows}


def fresh(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The same parameters each time, and nothing known of them."""
    octavo.fp8_state().reset()
    octavo.report(reset=True)
    torch.manual_seed(1)
    return make()


def assert_trains_alike(
    make: Callable[[], torch.nn.Module],
    xs: list[Tensor],
    program: Program = lambda model: model,
    *,
    plain: Program | None = None,
    same_report: bool = True,
    options: dict[str, Any] | None = None,
    around: Context = contextlib.nullcontext,
    **arguments: Any,
) -> octavo.Report:
    """What `program` makes of a model, trained as it is (or what `plain` makes of it) and compiled: all results and
    counts are equal. The report of the compiled one, which ran FP8."""
    model = fresh(make)
    with around():
        expected = trained(model, (plain or program)(model), xs, **arguments)
    want = octavo.report()
    model = fresh(make)
    options = {"backend": "aot_eager", "fullgraph": True, **(options or {})}
    compiled = torch.compile(program(model), **options)
    with around():
        actual = trained(model, compiled, xs, **arguments)
    report = octavo.report()
    assert want.fp8_calls > 0 and report.fp8_calls > 0 and (graphs() > 0 or not options["fullgraph"])
    assert_same_notes(actual, expected)
    if same_report:
        assert fp8_rows(report) == fp8_rows(want) and reasons(report) == reasons(want)
    return report


def another_region() -> octavo.fp8_autocast:
    return octavo.fp8_autocast(recipe=octavo.DynamicScaling(3), fp8_format="e4m3")


class Layer(torch.nn.Linear):
    """A frame of its own to compile, where the one that calls it is given up."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).relu()


def three(device: torch.device) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(Layer(K, K, device=device, dtype=BF16) for _ in range(3))
