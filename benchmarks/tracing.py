# SPDX-License-Identifier: Apache-2.0
"""What one iteration does, from torch.profiler's trace: kernels, gaps between them, and whose work they are."""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from timing import BLOCKER_CYCLES_PER_MS
from torch.profiler import ProfilerActivity

KINDS = ("GEMM", "quantise", "attention", "other")
_GPU = {"kernel": "launches", "gpu_memset": "memsets", "gpu_memcpy": "copies"}  # category: field of Profile
_BLOCKER = "spin_kernel"  # what torch.cuda._sleep runs
# The first that matches. Every kernel of Octavo's or TransformerEngine's own counts as quantising, small ones too;
# what a compiler has fused quantising into is "other".
_PATTERNS = (
    ("quantise", re.compile(r"octavo|transformer_engine")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention")),
    ("GEMM", re.compile(r"gemm|gemv|nvjet|xmma|cublas|cutlass|splitk", re.IGNORECASE)),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel, memset or copy: how often, and how many microseconds in all, in one iteration."""

    name: str
    count: float
    us: float


@dataclass(frozen=True)
class Profile:
    """Of one iteration: what ran on the GPU, the longest first, and counts.

    span_us: from the first kernel's start to the last one's end. gaps_us: the part of it in which the GPU was idle.
    operators: calls through PyTorch's dispatcher, nested ones too; 0 where the CPU was not traced.
    """

    kernels: tuple[Kernel, ...]
    launches: float
    memsets: float
    copies: float
    operators: float
    span_us: float
    gaps_us: float

    @property
    def us(self) -> float:
        """Time of all kernels, memsets and copies, added up."""
        return sum(kernel.us for kernel in self.kernels)

    def share(self, kind: str) -> float:
        """The part of `us` that one of KINDS has."""
        return sum(kernel.us for kernel in self.kernels if kind_of(kernel.name) == kind) / max(self.us, 1e-9)

    def summary(self) -> dict[str, Any]:
        """For JSON: everything but the kernels that are not among the 20 longest."""
        shares = {kind: self.share(kind) for kind in KINDS}
        return asdict(self) | {"kernels": [asdict(k) for k in self.kernels[:20]], "us": self.us, "shares": shares}


def kind_of(kernel: str) -> str:
    """One of KINDS, by the kernel's name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(kernel)), "other")


def profile(
    run: Callable[[int], None], iterations: int = 10, operators: bool = False, blocker_ms: float = 0.0
) -> Profile:
    """Traces run(iterations) after a warm-up.

    blocker_ms: holds the GPU up for so long first, so that the gaps are the GPU's own. Without it they have the host's
    in them, which the tracer makes longer; much longer with `operators`.
    """
    run(2)
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if operators else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        if blocker_ms:
            torch.cuda._sleep(int(blocker_ms * BLOCKER_CYCLES_PER_MS))
        run(iterations)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return read_trace(events, iterations)


def read_trace(events: Iterable[Mapping[str, Any]], iterations: int) -> Profile:
    """The events of a Chrome trace, divided by the iterations."""
    counts: dict[str, int] = dict.fromkeys((*_GPU.values(), "operators"), 0)
    times: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category in _GPU and _BLOCKER not in name:
            counts[_GPU[category]] += 1
            times[name].append(event["dur"])
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif category == "cpu_op" and "::" in name and not name.startswith("autograd::"):
            counts["operators"] += 1
    kernels = [Kernel(name, len(us) / iterations, sum(us) / iterations) for name, us in times.items()]
    span, gaps = _span_and_gaps(spans)
    return Profile(
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.us)),
        **{field: count / iterations for field, count in counts.items()},
        span_us=span / iterations,
        gaps_us=gaps / iterations,
    )


def _span_and_gaps(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end, and what no span covers of that; spans may overlap."""
    if not spans:
        return 0.0, 0.0
    spans = sorted(spans)
    first, reached = spans[0]
    gaps = 0.0
    for start, end in spans[1:]:
        gaps += max(0.0, start - reached)
        reached = max(reached, end)
    return reached - first, gaps


def print_profiles(profiles: Mapping[str, Profile], most: int = 20) -> None:
    """Of each, under its title: totals, shares and the longest kernels."""
    for title, made in profiles.items():
        _print_profile(title, made, most)


def _print_profile(title: str, made: Profile, most: int) -> None:
    shares = ", ".join(f"{kind} {100 * made.share(kind):.1f}%" for kind in KINDS)
    print(f"\n{title}: {made.launches:g} kernels, {made.memsets:g} memsets, {made.copies:g} copies in one iteration")
    print(f"  {made.us:.1f} us, gaps {made.gaps_us:.1f} us of {made.span_us:.1f} us; {shares}")
    for kernel in made.kernels[:most]:
        print(f"  {kernel.us:9.1f} us  {kernel.count:6g} x  {kernel.name[:96]}")
    if len(made.kernels) > most:
        rest = made.kernels[most:]
        print(f"  {sum(k.us for k in rest):9.1f} us  {sum(k.count for k in rest):6g} x  {len(rest)} others")
