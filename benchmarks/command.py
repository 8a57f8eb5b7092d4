# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks' command lines share: arguments, errors of one line, the environment, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import peers
import torch
from timing import environment
from tracing import Profile
from variants import BF16, OCTAVO, Variant

from octavo.tune import Shape, parse_shapes


class UsageError(Exception):
    """What the user can put right. It is printed as one line."""


class Parser(argparse.ArgumentParser):
    """Every benchmark's --json, --peer where whole linears are measured, and its own arguments. A mistake raises
    UsageError."""

    def __init__(self, description: str | None, peers: bool = True) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
        if not peers:
            return
        self.add_argument(
            "--peer", nargs="+", choices=("te", "torchao"), default=[], help="measure these libraries beside Octavo"
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self) -> argparse.Namespace:
        options = self.parse_args()
        if options.json and not options.json.absolute().parent.is_dir():
            raise UsageError(f"--json: there is no folder {options.json.absolute().parent}")
        return options

    def check_positive(self, options: argparse.Namespace, *names: str) -> None:
        for name in names:
            if not getattr(options, name) > 0:
                raise UsageError(f"--{name} must be positive, not {getattr(options, name)}")

    def add_recipes(self) -> None:
        self.add_argument(
            "--recipe",
            nargs="+",
            choices=tuple(OCTAVO),
            default=["delayed", "dynamic"],
            help="Octavo's, default: delayed dynamic",
        )


def shapes_of(words: list[str]) -> list[Shape]:
    """octavo.tune's shapes, by their names or as MxNxK."""
    try:
        return parse_shapes(words)
    except ValueError as error:
        raise UsageError(str(error)) from error


def chosen(options: argparse.Namespace, compiled_peers: bool = False) -> list[Variant]:
    """bf16 first, then --recipe and --peer. `compiled_peers`: torchao with its linears compiled too."""
    variants = [BF16, *(OCTAVO[recipe] for recipe in dict.fromkeys(options.recipe))]
    for peer in dict.fromkeys(options.peer):
        try:
            variants += peers.variants(peer, compiled_peers)
        except ImportError as error:
            raise UsageError(f"--peer {peer}: {error}") from error
    return variants


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError("this benchmark needs a CUDA GPU, and PyTorch sees none")


def print_environment() -> None:
    print(", ".join(f"{key} {value}" for key, value in environment().items()))


def write_json(path: Path | None, results: Any, profiles: Mapping[str, Profile] | None = None, **more: Any) -> None:
    """The environment, `more`, the results, and the profiles if there are some. Does nothing without a path."""
    if not path:
        return
    record = {"environment": environment(), **more, "results": results}
    if profiles:
        record["profiles"] = {title: made.summary() for title, made in profiles.items()}
    path.write_text(json.dumps(record, indent=1) + "\n")


def first_line(error: BaseException, width: int = 160) -> str:
    """An exception as one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:width]


def run(main: Callable[[], None]) -> None:
    """Runs a benchmark's main; a UsageError ends the process with its one line."""
    try:
        main()
    except UsageError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
