# SPDX-License-Identifier: Apache-2.0
"""The quantise kernels alone: bytes a second, beside the copy rate of the same run.

Each form is one call of the library's internal op on random normal data, timed on the GPU. Bytes are those that the
form has to move: every element read once, and written once for each copy; dynamic scaling reads it twice. L2 is warm
where the tensors fit in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from command import Parser, print_environment, require_gpu, run, write_json
from timing import copy_rate, time_interleaved

import octavo

SHAPES = ((16384, 8192), (8192, 4096), (4096, 4096), (4096, 1536))
ROW, COL = 1, 2  # what to make, as the bits of csrc/ops/primitives.h


@dataclass(frozen=True)
class Form:
    """What one call makes: which copies, of what input, by which scaling, with column sums or without."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    row: bool = True
    col: bool = True
    dynamic: bool = False
    sums: bool = False
    pair: bool = False

    def moved(self, elements: int) -> int:
        """Bytes read and written; the few of the scales and column sums left out."""
        reads = self.dtype.itemsize * (2 if self.dynamic else 1)
        return elements * (reads + self.row + self.col) * (2 if self.pair else 1)


FORMS = (
    Form("row + col, delayed"),
    Form("row, delayed", col=False),
    Form("col, delayed", row=False),
    Form("row + col + column sums", sums=True),
    Form("row + col, fp32 in", dtype=torch.float32),
    Form("row + col, dynamic", dynamic=True),
    Form("two at once, row + col", pair=True),
)


@dataclass(frozen=True)
class Slot:
    """Where a linear keeps its scaling state, as the ops want it, and the ids of two policies."""

    weight: torch.nn.Parameter  # keeps it alive
    place: tuple[int, int, int]
    delayed: int
    dynamic: int


def seeded_slot() -> Slot:
    """A slot whose three operands have a history."""
    w = torch.nn.Parameter(torch.randn(16, 16, device="cuda", dtype=torch.bfloat16))
    x = torch.randn_like(w).requires_grad_()
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(small=None)):
        F.linear(x, w).sum().backward()
    octavo.step()
    torch.cuda.synchronize()
    *_, policy, _ = torch.ops.octavo._read_state(w)
    *place, seeded, delayed = torch.ops.octavo._slot_of(w, policy)
    assert seeded
    *_, dynamic = torch.ops.octavo._slot_of(w, "2:0:0x1p+0:0:448,448,57344:")
    return Slot(w, tuple(place), delayed, dynamic)


def enqueue(form: Form, x: torch.Tensor, slot: Slot) -> Callable[[int], None]:
    """The form's call on x [rows, cols], as a linear makes it: of its input in forward, or, with sums, of its gradient.

    Delayed: the step is known, and the amax is measured on the way.
    """
    copies, fp8 = ROW * form.row + COL * form.col, torch.float8_e4m3fn
    second = copies if form.pair else 0
    policy = slot.dynamic if form.dynamic else slot.delayed
    place = (-1, 0, 0, False, True, False) if form.dynamic else (*slot.place, True, True, False)
    types = (fp8, fp8, x.dtype)

    def call(x_copies: int, w_copies: int, records: bool, place: tuple[object, ...], policy: int) -> list[torch.Tensor]:
        no_product, none = (False, True), (None,) * 4
        return torch.ops.octavo._linear_forward(
            x, x, None, *place, policy, *types, *no_product, records, x_copies, w_copies, *none
        )

    step = torch.full((1,), 0.01, device="cuda")

    def forward(iterations: int) -> None:
        for _ in range(iterations):
            call(copies, second, not form.dynamic, place, policy)

    def with_sums(iterations: int) -> None:
        for _ in range(iterations):
            torch.ops.octavo._quantize_padded(x, step, fp8, copies, torch.bfloat16, False)

    return with_sums if form.sums else forward


def main() -> None:
    options = Parser(__doc__, peers=False).parse()
    require_gpu()
    slot = seeded_slot()
    copied = copy_rate()
    print_environment()
    print(f"Copy {copied / 1e9:.0f} GB/s. GB/s of each form, and percent of the copy.\n")
    print(f"{'form':<28}" + "".join(f"{f'{m} x {n}':>18}" for m, n in SHAPES))
    rates: dict[str, list[float]] = {form.name: [] for form in FORMS}
    for shape in SHAPES:
        inputs = {dtype: torch.randn(shape, device="cuda").to(dtype) for dtype in {form.dtype for form in FORMS}}
        timings = time_interleaved({form.name: enqueue(form, inputs[form.dtype], slot) for form in FORMS})
        for form in FORMS:
            moved = form.moved(shape[0] * shape[1])
            rates[form.name].append(moved / (timings[form.name].device_ms * 1e-3))
    for name, row in rates.items():
        print(f"{name:<28}" + "".join(f"{rate / 1e9:>11.0f} {100 * rate / copied:>5.0f}%" for rate in row))
    write_json(options.json, rates, copy_bytes_per_second=copied)


if __name__ == "__main__":
    run(main)
