# SPDX-License-Identifier: Apache-2.0
"""The commands: python -m octavo --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from octavo import _tune_command, _tune_small_command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m octavo", description="FP8 training for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _tune_command.add_command(commands)
    _tune_small_command.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        sys.exit(f"octavo {options.command}: {error}")


if __name__ == "__main__":
    main()
