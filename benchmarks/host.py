# SPDX-License-Identifier: Apache-2.0
"""What the host does for one linear's forward and backward: a stack of small ones, where nothing else is in the way.

32 linears of 512 x 512 on 16 tokens, bf16, with bias and without. us: wall time of the host, without waiting for the
GPU, which is let run empty between the windows; variants in turn, medians. In FP8 every product of the stack runs in
FP8, small as it is. "bf16 alone" is bf16 before any FP8 region was entered in this process, and so before Octavo put
itself into aten::linear; the ratios are to "bf16", which is measured in turn with the rest.

The other columns are counts for one linear's forward and backward: kernels, memsets and copies on the GPU, calls
through PyTorch's dispatcher (nested ones too), allocations, and tensors saved for backward beside parameters. They
have in them what a region or a zero_grad does once for the stack, a 32nd of it for each linear.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from command import Parser, chosen, first_line, print_environment, require_gpu, run, write_json
from saved import SavedTensors
from torch import nn
from tracing import Profile, print_profiles, profile
from variants import BF16, Variant

import octavo

DEPTH, TOKENS, FEATURES = 32, 16, 512
STEPS, WARMUPS = 5, 10


class Stack:
    """The linears of one variant; `step` is one forward and backward of all of them."""

    def __init__(self, variant: Variant, bias: bool) -> None:
        linears = (nn.Linear(FEATURES, FEATURES, bias=bias, device="cuda", dtype=torch.bfloat16) for _ in range(DEPTH))
        self._model = variant.transform(nn.Sequential(*linears), ())
        self._region = variant.region(self._model, ())
        self._x = torch.randn(TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self._dy = torch.randn_like(self._x)
        for _ in range(WARMUPS):
            self.steps(1)
            octavo.step()

    def _forward(self) -> torch.Tensor:
        with self._region():
            return self._model(self._x)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._model.zero_grad()
            self._forward().backward(self._dy)

    def saved_tensors(self) -> float:
        with SavedTensors(self._model.parameters()) as saved:
            self._forward()
        return saved.tensors / DEPTH

    def allocations(self) -> float:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        self.steps(STEPS)
        return (torch.cuda.memory_stats()["allocation.all.allocated"] - before) / STEPS / DEPTH


@dataclass(frozen=True)
class Result:
    """All for one linear's forward and backward; us is a median. Nothing but zeros where `cannot_run` says why."""

    variant: str
    bias: bool
    us: float = 0.0
    ratio: float = 0.0
    kernels: float = 0.0
    memsets: float = 0.0
    copies: float = 0.0
    operators: float = 0.0
    allocations: float = 0.0
    saved_tensors: float = 0.0
    cannot_run: str = ""


def time_in_turns(steps: Mapping[str, Callable[[int], None]], windows: int) -> dict[str, float]:
    """Median host microseconds for one linear's forward and backward."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(windows):
        for name, enqueue in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            enqueue(STEPS)
            samples[name].append(1e6 * (time.perf_counter() - began) / STEPS / DEPTH)
    return {name: statistics.median(times) for name, times in samples.items()}


def prepare(variants: list[Variant], bias: bool) -> tuple[dict[str, Stack], list[Result]]:
    """The stacks that can run, and the results of the peers that cannot."""
    stacks, refused = {}, []
    for variant in variants:
        try:
            stacks[variant.name] = Stack(variant, bias)
        except Exception as error:
            if not variant.peer:
                raise
            refused.append(Result(variant.name, bias, cannot_run=first_line(error)))
    return stacks, refused


def measure(
    variants: list[Variant], bias: bool, alone_us: float, windows: int, profiles: dict[str, Profile]
) -> list[Result]:
    """bf16 alone, then all variants, bf16 first. `profiles` gets one of each."""
    stacks, refused = prepare(variants, bias)
    medians = time_in_turns({name: stack.steps for name, stack in stacks.items()}, windows)
    results = []
    for name, us in medians.items():
        traced = profile(stacks[name].steps, STEPS, operators=True)
        profiles[f"{name}, {'bias' if bias else 'no bias'}, all {DEPTH} linears"] = traced
        results.append(
            Result(
                variant=name,
                bias=bias,
                us=us,
                ratio=us / medians["bf16"],
                kernels=traced.launches / DEPTH,
                memsets=traced.memsets / DEPTH,
                copies=traced.copies / DEPTH,
                operators=traced.operators / DEPTH,
                allocations=stacks[name].allocations(),
                saved_tensors=stacks[name].saved_tensors(),
            )
        )
    alone = replace(results[0], variant="bf16 alone", us=alone_us, ratio=alone_us / medians["bf16"])
    return [alone, *results, *refused]


def print_results(results: list[Result]) -> None:
    for r in results:
        start = f"{r.variant:<12}{'yes' if r.bias else 'no':<6}"
        if r.cannot_run:
            print(f"{start}cannot run: {r.cannot_run}", flush=True)
            continue
        print(
            f"{start}{r.us:>8.1f}{r.ratio:>7.2f}{r.kernels:>9.1f}{r.memsets:>9.1f}{r.copies:>8.1f}"
            f"{r.operators:>11.1f}{r.allocations:>13.1f}{r.saved_tensors:>7.1f}",
            flush=True,
        )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_recipes()
    parser.add_argument("--windows", type=int, default=30, help="windows of each variant (default: 30)")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a stack too")
    options = parser.parse()
    parser.check_positive(options, "windows")
    variants = chosen(options, compiled_peers=True)
    require_gpu()
    torch.manual_seed(0)
    print_environment()
    print(f"Host time and counts of one linear's forward and backward, stack of {DEPTH}, M={TOKENS}, N=K={FEATURES}.\n")
    print(
        f"{'variant':<12}{'bias':<6}{'us':>8}{'ratio':>7}{'kernels':>9}{'memsets':>9}{'copies':>8}{'operators':>11}"
        f"{'allocations':>13}{'saved':>7}",
        flush=True,
    )
    alone = {bias: time_in_turns({"bf16": Stack(BF16, bias).steps}, options.windows)["bf16"] for bias in (True, False)}
    results: list[Result] = []
    profiles: dict[str, Profile] = {}
    for bias in (True, False):
        made = measure(variants, bias, alone[bias], options.windows, profiles)
        print_results(made)
        results += made
    if options.profile:
        print_profiles(profiles)
    write_json(options.json, [asdict(r) for r in results], profiles if options.profile else None)


if __name__ == "__main__":
    run(main)
