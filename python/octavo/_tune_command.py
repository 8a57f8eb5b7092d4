# SPDX-License-Identifier: Apache-2.0
"""`python -m octavo tune`: what octavo.tune finds, as a table to read and a table to load."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.gemm_table import load_gemm_table
from octavo.tune import (
    DEFAULT_PRODUCTS,
    PRODUCTS,
    SHAPES,
    TunedProduct,
    check_device,
    parse_shapes,
    table_lines,
    tune,
    write_table,
)


def _algorithms(options: argparse.Namespace) -> Iterator[str]:
    """The section of the algorithms: prints a row for each product; gives the lines of the file."""
    print(
        f"{'M, N, K':<20} {'product':<16} {'tried':>5} {'heuristic us':>12} {'best us':>9} {'TFLOP/s':>8} {'gain':>7}"
    )

    def show(row: TunedProduct) -> None:
        m, n, k = row.shape
        gain = 100 * (row.heuristic_us / row.winner_us - 1)
        notes = [f"{row.wrong} faster with another result"] if row.wrong else []
        if "" in row.lines:
            notes.append(f"{row.lines.count('')} of the last {len(row.lines)} that no table can hold")
        print(
            f"{f'{m}, {n}, {k}':<20} {row.product:<16} {row.tried:>5} {row.heuristic_us:>12.1f} {row.winner_us:>9.1f}"
            f" {row.tflops:>8.0f} {gain:>6.1f}%  {'; '.join(notes)}".rstrip(),
            flush=True,
        )

    tuned = tune(
        options.shapes,
        options.products,
        precisions=options.recipe_products,
        exhaustive=options.exhaustive,
        each=show,
    )
    yield from table_lines(tuned)


# Each prints what it finds and gives lines for the file.
_SECTIONS: tuple[Callable[[argparse.Namespace], Iterator[str]], ...] = (_algorithms,)


def _run(options: argparse.Namespace) -> None:
    check_device()
    lines = [line for section in _SECTIONS for line in section(options)]
    if options.out is None:
        print("\nNothing is written without --out FILE.")
        return
    write_table(options.out, lines)
    load_gemm_table(options.out)  # a mistake in the file would show here
    print(f"\n{len(lines)} entries in {options.out}; octavo.load_gemm_table or OCTAVO_GEMM_TABLE puts them in force.")


class _ShapesAction(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:
        try:
            setattr(namespace, self.dest, parse_shapes(values))
        except ValueError as error:
            parser.error(str(error))


def add_command(commands) -> None:
    """`tune`, to the commands of `python -m octavo`."""
    parser = commands.add_parser(
        "tune",
        help="time cuBLASLt's algorithms on this GPU and write the table of the fastest",
        description="Times cuBLASLt's algorithms for the products of linears y[M, N] = x[M, K] w[N, K]^T on this GPU, "
        "on random normal data, and writes the table of the fastest. Takes about a second for each product.",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        action=_ShapesAction,
        default=parse_shapes(["all"]),
        metavar="SHAPE",
        help=f"all, {', '.join(SHAPES)}, or MxNxK (default: all)",
    )
    parser.add_argument(
        "--products",
        nargs="+",
        choices=PRODUCTS,
        default=list(DEFAULT_PRODUCTS),
        metavar="PRODUCT",
        help=f"of {', '.join(PRODUCTS)} (default: {' '.join(DEFAULT_PRODUCTS)})",
    )
    parser.add_argument(
        "--recipe-products",
        nargs=3,
        choices=("fast", "accurate"),
        default=["fast", "accurate", "accurate"],
        metavar=("FORWARD", "DGRAD", "WGRAD"),
        help="each fast or accurate, as in the recipe (default: fast accurate accurate)",
    )
    parser.add_argument("--exhaustive", action="store_true", help="also algorithms that the heuristic does not offer")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there")
    parser.set_defaults(run=_run)
