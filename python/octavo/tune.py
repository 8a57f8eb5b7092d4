# SPDX-License-Identifier: Apache-2.0
"""Times cuBLASLt's algorithms for the products of linears, and writes the table of the fastest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.devices import emulated, fp8_support
from octavo.report import ReportRow

Shape = tuple[int, int, int]  # M tokens, N outputs, K inputs

# What `python -m octavo tune` and the benchmarks take unless told otherwise.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "large": ((8192, 14336, 4096), (8192, 4096, 14336), (8192, 6144, 4096), (8192, 8192, 8192), (4096, 4096, 4096)),
    "m067": ((4096, 32000, 1536), (4096, 4096, 1536), (4096, 1536, 4096), (4096, 1536, 1536), (4096, 256, 1536)),
    "odd": ((16, 4096, 4096), (1000, 1000, 1000)),
    "te": ((15872, 12288, 4096), (15872, 4096, 4096), (15872, 16384, 4096), (15872, 4096, 16384)),
}

_HEADER = "octavo-gemm-table 1"  # csrc/kernels/algorithm_table.h
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class LinearProduct:
    """One product of a linear y[M, N] = x[M, K] w[N, K]^T. axes: those of its rows, columns and contraction."""

    axes: str
    formats: tuple[torch.dtype, torch.dtype]
    fast: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    accumulate: bool = False

    def sizes(self, shape: Shape) -> Shape:
        """Rows, columns and contraction."""
        rows, columns, contraction = (shape["MNK".index(axis)] for axis in self.axes)
        return rows, columns, contraction

    def flop(self, shape: Shape) -> float:
        return 2.0 * shape[0] * shape[1] * shape[2]


PRODUCTS: dict[str, LinearProduct] = {
    "forward": LinearProduct("MNK", (_E4M3, _E4M3), fast=True),
    "dgrad": LinearProduct("MKN", (_E5M2, _E4M3)),
    "wgrad": LinearProduct("NKM", (_E5M2, _E4M3)),
    "forward_bias": LinearProduct("MNK", (_E4M3, _E4M3), fast=True, bias=True),
    "wgrad_fp32": LinearProduct("NKM", (_E5M2, _E4M3), dtype=torch.float32),
    "wgrad_into_fp32": LinearProduct("NKM", (_E5M2, _E4M3), dtype=torch.float32, accumulate=True),
}
DEFAULT_PRODUCTS = ("forward", "dgrad", "wgrad")


def codes(rows: int, contraction: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A quantised copy of N(0, 1), zero beyond the matrix up to multiples of 16, and its step as an int32 word."""
    largest = torch.finfo(dtype).max
    x = torch.randn(rows, contraction, device="cuda")
    step = torch.maximum(x.amax(), -x.amin()) / largest
    x.div_(step).clamp_(-largest, largest)
    padded = torch.zeros(-(-rows // 16) * 16, -(-contraction // 16) * 16, device="cuda", dtype=torch.uint8)
    padded[:rows, :contraction] = x.to(dtype).view(torch.uint8)
    return padded.view(dtype), step.reshape(1).view(torch.int32)


@dataclass(frozen=True)
class Operands:
    """What the op of a product takes, for a shape."""

    product: LinearProduct
    rows: int
    columns: int
    factors: tuple[Tensor, Tensor, int, Tensor, Tensor, int] = dataclasses.field(repr=False)
    bias: Tensor | None = dataclasses.field(repr=False)

    @staticmethod
    def random(product: LinearProduct, shape: Shape) -> Operands:
        rows, columns, contraction = product.sizes(shape)
        a, step_a = codes(rows, contraction, product.formats[0])
        b, step_b = codes(columns, contraction, product.formats[1])
        bias = torch.randn(columns, device="cuda").to(product.dtype) if product.bias else None
        return Operands(product, rows, columns, (a, b, step_a, 0, step_b, 0), bias)

    def multiply(self) -> Tensor:
        """The product as a training step runs it, by the algorithm in force."""
        p = self.product
        return torch.ops.octavo._mm(*self.factors, self.bias, self.rows, self.columns, p.dtype, p.fast)

    def tune(self, exhaustive: bool) -> tuple[Tensor, list[str], list[int]]:
        p = self.product
        return torch.ops.octavo._tune_mm(
            *self.factors, self.bias, self.rows, self.columns, p.dtype, p.fast, p.accumulate, exhaustive
        )


@dataclass(frozen=True)
class TunedProduct:
    """Times of the fastest algorithms for one product, and which is to be used.

    microseconds, lines: of each that came into the last round, the first being the heuristic's first choice; an empty
    line where no entry of a table can bring it back. in_force, winner: indices into them. wrong: faster ones whose
    result was not the heuristic's.
    """

    shape: Shape
    product: str
    microseconds: tuple[float, ...]
    lines: tuple[str, ...]
    in_force: int
    winner: int
    tried: int
    wrong: int

    @property
    def heuristic_us(self) -> float:
        return self.microseconds[0]

    @property
    def in_force_us(self) -> float:
        return self.microseconds[self.in_force]

    @property
    def winner_us(self) -> float:
        return self.microseconds[self.winner]

    @property
    def best_us(self) -> float:
        """Of all, also of one that beats the heuristic by too little to be the winner."""
        return min(self.microseconds)

    @property
    def tflops(self) -> float:
        """Of the winner."""
        return PRODUCTS[self.product].flop(self.shape) / self.winner_us * 1e-6


def tune_product(name: str, product: LinearProduct, shape: Shape, exhaustive: bool = False) -> TunedProduct:
    times, lines, (in_force, winner, tried, wrong) = Operands.random(product, shape).tune(exhaustive)
    return TunedProduct(shape, name, tuple(times.tolist()), tuple(lines), in_force, winner, tried, wrong)


def check_device() -> None:
    """Raises ValueError where there is nothing to tune."""
    if not torch.cuda.is_available():
        raise ValueError("algorithms are tuned on a CUDA GPU, and PyTorch sees none")
    support = "emulated" if emulated() else fp8_support("cuda")
    if support != "native":
        raise ValueError(f"algorithms are tuned on a GPU with FP8 tensor cores; here FP8 is {support}")


def _shape(shape: Sequence[int] | ReportRow) -> Shape:
    m, n, k = (shape.m, shape.n, shape.k) if isinstance(shape, ReportRow) else shape
    if not all(isinstance(size, int) and size > 0 for size in (m, n, k)):
        raise ValueError(f"octavo: a shape is three positive numbers M, N, K, not {m}, {n}, {k}")
    return m, n, k


def tune(
    shapes: Sequence[Sequence[int] | ReportRow],
    products: Sequence[str] = DEFAULT_PRODUCTS,
    *,
    precisions: Sequence[str] = ("fast", "accurate", "accurate"),
    exhaustive: bool = False,
    each: Callable[[TunedProduct], None] | None = None,
) -> list[TunedProduct]:
    """Times cuBLASLt's algorithms for the products of linears on the current GPU. Changes nothing: the command
    `python -m octavo tune --out FILE` writes what this finds as a file, which `octavo.load_gemm_table` puts in force.

    Args:
        shapes: (M, N, K) of y[M, N] = x[M, K] w[N, K]^T, or rows of `octavo.report()`, of which those that did not run
            in FP8 are passed over.
        products: which, by their names in `PRODUCTS`.
        precisions: "fast" or "accurate" for forward, dgrad and wgrad, as the recipe has them.
        exhaustive: also algorithms that the heuristic does not offer. Takes some seconds for each product.
        each: called with each result as soon as it is there.
    """
    unknown = [name for name in products if name not in PRODUCTS]
    if unknown:
        raise ValueError(f"octavo: products are {', '.join(PRODUCTS)}, not {', '.join(unknown)}")
    if len(precisions) != 3 or not set(precisions) <= {"fast", "accurate"}:
        raise ValueError(f"octavo: precisions are three of 'fast' and 'accurate', not {tuple(precisions)}")
    skipped = [row for row in shapes if isinstance(row, ReportRow) and (not row.is_fp8 or row.m < 0)]
    wanted = list(dict.fromkeys(_shape(shape) for shape in shapes if shape not in skipped))
    check_device()
    fast = {name: word == "fast" for name, word in zip(DEFAULT_PRODUCTS, precisions, strict=True)}
    tuned = []
    for shape in wanted:
        for name in products:
            product = dataclasses.replace(PRODUCTS[name], fast=fast[name.split("_")[0]])
            tuned.append(tune_product(name, product, shape, exhaustive))
            if each:
                each(tuned[-1])
    return tuned


def table_lines(tuned: Iterable[TunedProduct]) -> list[str]:
    """Entries of the winners, one for each product, each with its times as a comment."""
    entries: dict[str, str] = {}
    for row in tuned:
        line = row.lines[row.winner]
        if line:
            key = line.split(" id=")[0]
            entries[key] = f"{line}  # {row.winner_us:.1f} us, heuristic {row.heuristic_us:.1f} us"
    return list(entries.values())


def write_table(path: Path, lines: Iterable[str]) -> None:
    made = f"# Made by `python -m octavo tune` on {torch.cuda.get_device_name()}."
    path.write_text("\n".join([_HEADER, made, *lines]) + "\n")


def parse_shapes(words: list[str]) -> list[Shape]:
    """Shapes from a command line: all, the name of a group, or MxNxK."""
    shapes: list[Shape] = []
    for word in words:
        if word == "all":
            shapes += [shape for group in SHAPES.values() for shape in group]
        elif word in SHAPES:
            shapes += SHAPES[word]
        elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2}", word):
            m, n, k = map(int, word.split("x"))
            shapes.append((m, n, k))
        else:
            raise ValueError(f"--shapes takes all, {', '.join(SHAPES)} or MxNxK as in 4096x4096x1536, not {word!r}")
    return list(dict.fromkeys(shapes))
