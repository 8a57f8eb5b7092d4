# SPDX-License-Identifier: Apache-2.0
"""Which linears are too small for FP8: the tables that a recipe's `small` names, and the measurement that makes one.

A table says from which sizes on FP8 pays, in lines of M, N and K: a linear runs in FP8 if all three reach those of one
line. It is measured once for a kind of GPU, never while training.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from octavo import stepping
from octavo.autocast import fp8_autocast
from octavo.recipe import DelayedScaling, DynamicScaling


@dataclass(frozen=True)
class SmallTable:
    """A table that a recipe's `small` may name: its name, the GPU that "auto" takes it on, and a hash of it."""

    name: str
    device: str
    hash: str


def small_tables() -> list[SmallTable]:
    """The tables that the library brings, and those loaded since."""
    return [SmallTable(*table) for table in zip(*torch.ops.octavo._small_tables(), strict=True)]


def load_small_table(path: str | Path) -> str:
    """Reads a table that `python -m octavo tune-small` has written. It takes the place of one of the same name or GPU:
    for "auto" at once, for a name in regions that are entered from then on. Not to be called between a forward and its
    backward, which a checkpoint would recompute under the new one.

    Returns:
        its name, for a recipe's `small`.

    Raises:
        ValueError: naming the file, the line and what was expected; nothing is changed then.
    """
    try:
        return torch.ops.octavo._load_small_table(str(path))
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from None


Shape = tuple[int, int, int]  # M tokens, N outputs, K inputs

TOKENS = (256, 1024, 2048, 4096, 8192)
FEATURES = (256, 512, 1024, 1536, 2048, 4096, 8192)
_ITERATIONS, _WINDOWS = 6, 5
_HOLD_CYCLES = 12_000_000  # some ms, in which the host enqueues a window ahead of the GPU
# FP8 pays at a point if it is at least as fast there, and not noticeably slower at any larger one.
_FASTER, _NOT_SLOWER = 1.0, 0.99


@dataclass(frozen=True)
class SmallMeasurement:
    """GPU time of a linear's forward and backward, in ms: bf16's and each recipe's."""

    shape: Shape
    bf16_ms: float
    fp8_ms: dict[str, float]

    def ratio(self, recipe: str) -> float:
        """bf16's time over FP8's."""
        return self.bf16_ms / self.fp8_ms[recipe]


def _linear(shape: Shape, recipe: str | None) -> Callable[[], None]:
    m, n, k = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    everything = {"delayed": DelayedScaling, "dynamic": DynamicScaling}
    region = fp8_autocast(recipe=everything[recipe](small=None)) if recipe else contextlib.nullcontext()

    def step() -> None:
        x.grad = w.grad = None
        with region:
            y = F.linear(x, w)
        y.backward(dy)

    for _ in range(2):
        step()
        stepping.step()
    return step


def _window(step: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HOLD_CYCLES)
    start.record()
    for _ in range(_ITERATIONS):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / _ITERATIONS


def measure_small(shape: Shape, recipes: Iterable[str] = ("delayed", "dynamic")) -> SmallMeasurement:
    """Times a linear of this shape in bf16 and in FP8, in turns, on random normal data."""
    steps = {name: _linear(shape, None if name == "bf16" else name) for name in ("bf16", *recipes)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_WINDOWS):
        for name, step in steps.items():
            times[name].append(_window(step))
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return SmallMeasurement(shape, medians.pop("bf16"), medians)


def corners(ratios: dict[Shape, float]) -> list[Shape]:
    """The smallest shapes from which on FP8 pays, of those measured: bf16's time over FP8's by shape."""

    def reaches(larger: Shape, smaller: Shape) -> bool:
        return all(a >= b for a, b in zip(larger, smaller, strict=True))

    pays = [
        shape
        for shape, ratio in ratios.items()
        if ratio >= _FASTER and all(r >= _NOT_SLOWER for s, r in ratios.items() if reaches(s, shape))
    ]
    return sorted(shape for shape in pays if not any(reaches(shape, other) for other in pays if other != shape))


def write_small_table(path: Path, name: str, device: str, found: dict[str, list[Shape]]) -> None:
    """Writes a table, as octavo.load_small_table reads it. `found`: the corners by recipe."""
    lines = ["octavo-small-table 1", f"name={name}", f'device="{device}"']
    lines += [f"{recipe} {m} {n} {k}" for recipe, shapes in found.items() for m, n, k in shapes]
    path.write_text("\n".join(lines) + "\n")


def grid() -> list[Shape]:
    """The shapes that the command measures."""
    return list(itertools.product(TOKENS, FEATURES, FEATURES))
