# SPDX-License-Identifier: Apache-2.0
"""The tables that decide bits: which linears are left in 16 bits, and which algorithms the others' products run by."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from octavo.gemm_table import gemm_tables


@dataclass(frozen=True)
class Table:
    """A table in force, of either kind: "small" or "gemm". hash: of its contents."""

    kind: str
    name: str
    hash: str

    def describe(self) -> str:
        return f"{self.kind} {self.name} ({self.hash})"


def tables() -> list[Table]:
    """The small-product tables that recipes may name, and the tables of algorithms."""
    names, _, hashes = torch.ops.octavo._small_tables()
    found = [Table("small", name, text_hash) for name, text_hash in zip(names, hashes, strict=True)]
    try:
        return found + [Table("gemm", table.name, table.hash) for table in gemm_tables()]
    except RuntimeError as error:  # OCTAVO_GEMM_TABLE names no table, which products on a GPU will raise
        return [*found, Table("gemm", str(error).splitlines()[0], "unreadable")]


def as_state() -> dict[str, str]:
    """For a saved state: hashes by kind and name."""
    return {f"{table.kind} {table.name}": table.hash for table in tables()}


def warn_if_others(saved: Any) -> None:
    """Says it where a state was saved under other tables: training goes on, but not with the same bits."""
    if not isinstance(saved, dict):
        return
    here = as_state()
    missing = [name for name, text_hash in saved.items() if here.get(name) != text_hash]
    if missing:
        warnings.warn(
            f"octavo: the scaling state was saved under tables that are not in force here: {', '.join(missing)}. "
            "Products may run in another precision or by another algorithm, and results differ in their last bits; "
            "load those tables (octavo.load_small_table, octavo.load_gemm_table) to go on exactly",
            stacklevel=3,
        )
