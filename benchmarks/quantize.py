# SPDX-License-Identifier: Apache-2.0
"""The quantise kernels alone: bytes a second, beside the copy rate of the same run.

Each form is one call of the library's internal op on random normal data, timed on the GPU. Bytes are those that the
form has to move: every element read once, and written once for each copy; dynamic scaling reads it twice. L2 is warm
where the tensors fit in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import copy_rate, environment, time_interleaved

import octavo

SHAPES = ((16384, 8192), (8192, 4096), (4096, 4096), (4096, 1536))
X, G = 0, 2  # operands, as csrc/slot.h numbers them
TAPED, AMAX = 0, 1  # where the step comes from, as csrc/ops/primitives.h numbers it


@dataclass(frozen=True)
class Form:
    """What one call makes: which copies, of what input, by which scaling, with column sums or without."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    row: bool = True
    col: bool = True
    dynamic: bool = False
    sums: bool = False

    def moved(self, elements: int) -> int:
        """Bytes read and written; the few of the scales and column sums left out."""
        reads = self.dtype.itemsize * (2 if self.dynamic else 1)
        return elements * (reads + self.row + self.col)


FORMS = (
    Form("row + col, delayed"),
    Form("row, delayed", col=False),
    Form("col, delayed", row=False),
    Form("row + col + sums", sums=True),
    Form("row + col, fp32 in", dtype=torch.float32),
    Form("row + col, dynamic", dynamic=True),
)


def enqueue(form: Form, x: torch.Tensor, policy: int) -> Callable[[int], None]:
    """The form's call on x [rows, cols]. Delayed: the step is known, and the amax is measured on the way, as for dy."""
    taped = torch.tensor([0.01, 0, 0, 0], device="cuda").view(torch.int32)  # one TapedOperand, its step first
    operand, source = (X, AMAX) if form.dynamic else (G, TAPED)
    sums = torch.bfloat16 if form.sums else None

    def run(iterations: int) -> None:
        for _ in range(iterations):
            torch.ops.octavo._quantize_operand(
                x, taped, operand, source, policy, torch.float8_e4m3fn, form.row, form.col, sums
            )

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("quantize.py: PyTorch sees no GPU here")
    with octavo.fp8_autocast(recipe="dynamic"):  # makes the first policy, whose number is 1
        policy = 1
    copied = copy_rate()
    print(", ".join(f"{k} {v}" for k, v in environment().items()))
    print(f"Copy {copied / 1e9:.0f} GB/s. GB/s of each form, and percent of the copy.\n")
    print(f"{'form':<22}" + "".join(f"{f'{m} x {n}':>18}" for m, n in SHAPES))
    rates: dict[str, list[float]] = {form.name: [] for form in FORMS}
    for shape in SHAPES:
        inputs = {dtype: torch.randn(shape, device="cuda").to(dtype) for dtype in {form.dtype for form in FORMS}}
        timings = time_interleaved({form.name: enqueue(form, inputs[form.dtype], policy) for form in FORMS})
        for form in FORMS:
            moved = form.moved(shape[0] * shape[1])
            rates[form.name].append(moved / (timings[form.name].device_ms * 1e-3))
    for name, row in rates.items():
        print(f"{name:<22}" + "".join(f"{rate / 1e9:>11.0f} {100 * rate / copied:>5.0f}%" for rate in row))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "copy": copied, "rates": rates}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
