# SPDX-License-Identifier: Apache-2.0
"""What ran in FP8 inside regions, and what did not, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from octavo.tables import tables


@dataclasses.dataclass(frozen=True)
class ReportRow:
    """Calls of linears y[m, n] = x[m, k] w[n, k]^T. reason: "fp8…", or why not. m, n, k are -1
    where shapes are not told apart."""

    m: int
    n: int
    k: int
    calls: int
    reason: str

    @property
    def is_fp8(self) -> bool:
        return self.reason.startswith("fp8")


@dataclasses.dataclass(frozen=True)
class Report:
    """Calls of linears inside regions since the process began, or since the last reset; not recomputations' savings."""

    rows: tuple[ReportRow, ...]
    tables: tuple[str, ...] = ()  # what decides which products run in FP8, and by which algorithm (octavo.tables)

    @property
    def fp8_calls(self) -> int:
        return sum(row.calls for row in self.rows if row.is_fp8)

    @property
    def other_calls(self) -> int:
        return sum(row.calls for row in self.rows if not row.is_fp8)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fp8_calls": self.fp8_calls,
            "other_calls": self.other_calls,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "tables": list(self.tables),
        }

    def __str__(self) -> str:
        lines = [f"linears inside FP8 regions: {self.fp8_calls} calls in FP8, {self.other_calls} not"]
        if self.rows:
            lines.append(f"{'M':>8} {'N':>8} {'K':>8} {'calls':>8}  ran as")
        for row in self.rows:
            ran = row.reason if row.is_fp8 else f"not FP8: {row.reason}"
            shape = ("(any)", "", "") if row.m < 0 else (row.m, row.n, row.k)
            lines.append("{:>8} {:>8} {:>8} {:>8}  {}".format(*shape, row.calls, ran))
        if self.rows:
            lines += [f"table: {table}" for table in self.tables]
        return "\n".join(lines)


def report(*, reset: bool = False) -> Report:
    """Calls of linears inside FP8 regions by shape, each with "fp8" or the reason why not.

    Args:
        reset: start counting anew after this.
    """
    numbers, reasons = torch.ops.octavo._report()
    rows = tuple(ReportRow(*numbers[4 * i : 4 * i + 4], reason) for i, reason in enumerate(reasons))
    if reset:
        torch.ops.octavo._clear_report()
    return Report(rows, tuple(table.describe() for table in tables()))
