# SPDX-License-Identifier: Apache-2.0
"""`python -m octavo tune-small`: from which sizes on FP8 pays on this GPU, as a table to load."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from octavo.small import corners, grid, load_small_table, measure_small, write_small_table
from octavo.tune import check_device


def _run(options: argparse.Namespace) -> None:
    check_device()
    print(f"{'M, N, K':<20} {'bf16 ms':>9} {'delayed':>8} {'dynamic':>8}")
    measured = []
    for shape in grid():
        measured.append(measure_small(shape))
        ratios = [measured[-1].ratio(recipe) for recipe in ("delayed", "dynamic")]
        print(f"{', '.join(map(str, shape)):<20} {measured[-1].bf16_ms:>9.3f} {ratios[0]:>8.2f} {ratios[1]:>8.2f}")
    found = {recipe: corners({row.shape: row.ratio(recipe) for row in measured}) for recipe in ("delayed", "dynamic")}
    for recipe, shapes in found.items():
        print(f"\n{recipe} pays from: " + "; ".join(f"{m}, {n}, {k}" for m, n, k in shapes))
    if options.out is None:
        print("\nNothing is written without --out FILE.")
        return
    write_small_table(options.out, options.name, torch.cuda.get_device_name(), found)
    load_small_table(options.out)  # a mistake in the file would show here
    print(f"\n{options.out} written; octavo.load_small_table reads it, and recipes take it by small={options.name!r}.")


def add_command(commands) -> None:
    """`tune-small`, to the commands of `python -m octavo`."""
    parser = commands.add_parser(
        "tune-small",
        help="measure from which sizes on FP8 pays on this GPU and write the table",
        description="Times linears of many shapes, forward and backward, in bf16 and in FP8, and writes the table that "
        "a recipe's small= names. Takes about half a minute on an H200.",
    )
    parser.add_argument("--name", default="mine", help="the table's name (default: mine)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there")
    parser.set_defaults(run=_run)
