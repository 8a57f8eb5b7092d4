# SPDX-License-Identifier: Apache-2.0
"""The FP8 products alone: the algorithm in force against the heuristic's choice, the best of all, and bf16.

For each shape and product, cuBLASLt's candidates are timed in turns by the library's own tuning, on operands that are
not in the L2: the heuristic's first choice, the one that the tables in force name (else the heuristic's), and the best.
"of best" is the best's time in percent of that in force. FP8 and bf16 are then timed in turns as whole calls: the
library's internal op, scales and finishing pass included, and torch.mm of the same product, its operands as they lie in
a linear; there L2 is warm where the tensors fit in it. All data are random normal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from command import Parser, print_environment, require_gpu, run, shapes_of, write_json
from timing import time_interleaved
from torch import Tensor

import octavo
from octavo.tune import (
    DEFAULT_PRODUCTS,
    PRODUCTS,
    SHAPES,
    LinearProduct,
    Operands,
    Shape,
    check_device,
)


@dataclass(frozen=True)
class Result:
    """Microseconds of one product at one shape."""

    shape: Shape
    product: str
    heuristic_us: float
    in_force_us: float
    best_us: float
    tried: int
    fp8_us: float
    bf16_us: float

    @property
    def percent_of_best(self) -> float:
        return 100 * self.best_us / self.in_force_us

    @property
    def tflops(self) -> float:
        return PRODUCTS[self.product].flop(self.shape) / self.in_force_us * 1e-6


def bf16_operand(shape: Shape, axes: str) -> Tensor:
    """x [M, K], w [N, K] or dy [M, N], as it lies in a linear, seen with these axes."""
    stored = sorted(axes, key="MNK".index)
    x = torch.randn([shape["MNK".index(axis)] for axis in stored], device="cuda", dtype=torch.bfloat16)
    return x if stored == list(axes) else x.t()


def bf16_product(product: LinearProduct, shape: Shape) -> Callable[[], Tensor]:
    rows, columns, contraction = product.axes
    a, b = bf16_operand(shape, rows + contraction), bf16_operand(shape, contraction + columns)
    return lambda: torch.mm(a, b)


def repeated(call: Callable[[], Tensor]) -> Callable[[int], None]:
    def run(iterations: int) -> None:
        for _ in range(iterations):
            call()

    return run


def measure(name: str, shape: Shape, exhaustive: bool) -> Result:
    product = PRODUCTS[name]
    (row,) = octavo.tune([shape], [name], exhaustive=exhaustive)
    timings = time_interleaved(
        {
            "fp8": repeated(Operands.random(product, shape).multiply),
            "bf16": repeated(bf16_product(product, shape)),
        }
    )
    fp8_us, bf16_us = (1e3 * timings[variant].device_ms for variant in ("fp8", "bf16"))
    return Result(shape, name, row.heuristic_us, row.in_force_us, row.best_us, row.tried, fp8_us, bf16_us)


def print_result(result: Result) -> None:
    m, n, k = result.shape
    print(
        f"{f'{m}, {n}, {k}':<20} {result.product:<14} {result.heuristic_us:>9.1f} {result.in_force_us:>9.1f}"
        f" {result.best_us:>9.1f} {result.percent_of_best:>7.1f}% {result.tflops:>8.0f} {result.fp8_us:>9.1f}"
        f" {result.bf16_us:>9.1f} {result.bf16_us / result.fp8_us:>6.2f}",
        flush=True,
    )


def main() -> None:
    parser = Parser(__doc__, peers=False)
    parser.add_argument(
        "--shapes", nargs="+", default=["all"], metavar="SHAPE", help=f"all, {', '.join(SHAPES)}, or MxNxK"
    )
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(DEFAULT_PRODUCTS))
    parser.add_argument("--table", type=Path, metavar="FILE", help="load this table first")
    parser.add_argument("--exhaustive", action="store_true", help="also candidates that the heuristic does not offer")
    options = parser.parse()
    shapes = shapes_of(options.shapes)
    require_gpu()
    check_device()
    if options.table:
        octavo.load_gemm_table(options.table)
    print_environment()
    print("Tables: " + ", ".join(f"{t.name} ({t.hash}, {t.entries} entries)" for t in octavo.gemm_tables()) + "\n")
    print(
        f"{'M, N, K':<20} {'product':<14} {'heuristic':>9} {'in force':>9} {'best us':>9} {'of best':>8} {'TFLOP/s':>8}"
        f" {'FP8 us':>9} {'bf16 us':>9} {'ratio':>6}"
    )
    results = []
    for shape in shapes:
        for name in options.products:
            results.append(measure(name, shape, options.exhaustive))
            print_result(results[-1])
    rows = [asdict(r) | {"percent_of_best": r.percent_of_best, "tflops": r.tflops} for r in results]
    write_json(options.json, rows, tables=[asdict(table) for table in octavo.gemm_tables()])


if __name__ == "__main__":
    run(main)
