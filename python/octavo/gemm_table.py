# SPDX-License-Identifier: Apache-2.0
"""The tables by which products get their cuBLASLt algorithms."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GemmTable:
    """A table in force. hash: of its text. refused: the entries that cuBLASLt did not take when a product asked for
    them, each with the reason; those products have run by the heuristic's choice."""

    name: str
    hash: str
    entries: int
    refused: tuple[str, ...]


def load_gemm_table(path: str | os.PathLike[str]) -> None:
    """Puts a table that `python -m octavo tune` wrote before those in force, for all products from now on.

    An entry holds for its device, version of cuBLASLt and product alone, so a table of another machine does no harm.

    Raises:
        RuntimeError: the file cannot be read, is not a table (with the line), or this build is without CUDA.
    """
    torch.ops.octavo._load_gemm_table(os.fspath(path))


def gemm_tables() -> tuple[GemmTable, ...]:
    """The tables in force, in the order in which they are asked; none in a build without CUDA.

    The last are those of the library, before them the one that OCTAVO_GEMM_TABLE names, before that those loaded.
    """
    names, hashes, counts, refused = torch.ops.octavo._gemm_tables()
    tables, position = [], 0
    for name, text_hash, entries, count in zip(names, hashes, counts[::2], counts[1::2], strict=True):
        tables.append(GemmTable(name, text_hash, entries, tuple(refused[position : position + count])))
        position += count
    return tuple(tables)
