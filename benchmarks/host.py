# SPDX-License-Identifier: Apache-2.0
"""What the host needs for one linear's forward and backward: a stack of small ones, where nothing else is in the way.

32 linears of 512 x 512 on 16 tokens, bf16; wall time of the host without waiting for the GPU, which is let run empty
between the windows. bf16 and FP8 in turn, medians. In FP8 every product of the stack runs in FP8, small as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from timing import environment

import octavo

DEPTH, TOKENS, FEATURES = 32, 16, 512
WINDOWS, STEPS, WARMUPS = 30, 5, 10


def make_step(recipe: str | None, device: torch.device) -> Callable[[], None]:
    """One forward and backward of the whole stack."""
    model = torch.nn.Sequential(
        *(torch.nn.Linear(FEATURES, FEATURES, device=device, dtype=torch.bfloat16) for _ in range(DEPTH))
    )
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    region = octavo.fp8_autocast(enabled=recipe is not None, recipe=recipe)

    def step() -> None:
        model.zero_grad()
        with region:
            y = model(x)
        y.backward(dy)

    for _ in range(WARMUPS):
        step()
        octavo.step()
    return step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("host.py: PyTorch sees no GPU here")
    torch.manual_seed(0)
    steps = {
        name: make_step(recipe, torch.device("cuda"))
        for name, recipe in (("bf16", None), ("delayed", "delayed"), ("dynamic", "dynamic"))
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WINDOWS):
        for name, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            samples[name].append(1e6 * (time.perf_counter() - began) / STEPS / DEPTH)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    print("Host time of one linear's forward and backward, stack of 32, M=16, N=K=512.\n")
    for name, us in medians.items():
        print(f"{name:<10} {us:8.1f} us   {us / medians['bf16']:.2f} x bf16")
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "microseconds": medians}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
