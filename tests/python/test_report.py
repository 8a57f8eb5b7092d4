# SPDX-License-Identifier: Apache-2.0
"""Nothing is silent: what ran in FP8, what did not and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from runs import batches, linear

import octavo

BF16 = torch.bfloat16


def rows(report: object) -> dict[tuple, int]:
    """(m, n, k, reason) -> calls."""
    found = {(row.m, row.n, row.k, row.reason): row.calls for row in report.rows}
    assert len(found) == len(report.rows), "two rows for one shape and reason"
    return found


def test_rows_by_shape_and_reason(device: torch.device) -> None:
    """Each shape and reason has one row with its calls; the totals are the sums of the rows."""
    first, second = linear(24, 16, BF16, device), linear(24, 33, BF16, device)
    router = torch.nn.Linear(24, 8, device=device)
    x = torch.randn(2, 7, 24, device=device, dtype=BF16)
    with octavo.fp8_autocast(exclude=[second]):
        for _ in range(3):
            first(x)
        first(x[0])
        second(x)
        second(x)
        router(x.float())
    report = octavo.report()
    assert rows(report) == {
        (14, 16, 24, "fp8"): 3,
        (7, 16, 24, "fp8"): 1,
        (14, 33, 24, "excluded"): 2,
        (14, 8, 24, "float32"): 1,
    }
    assert (report.fp8_calls, report.other_calls) == (4, 3)


def test_a_call_is_a_forward(device: torch.device) -> None:
    """Backward does not count a linear again."""
    layer = linear(24, 16, BF16, device)
    with octavo.fp8_autocast():
        y = layer(batches(1, device)[0])
    y.sum().backward()
    assert (octavo.report().fp8_calls, octavo.report().other_calls) == (1, 0)


@pytest.mark.parametrize("by", ["module", "parameter"])
def test_excluded_by_module_and_by_parameter(device: torch.device, by: str) -> None:
    """Both ways give the reason "excluded", with and without gradients."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    with octavo.fp8_autocast(exclude=layer if by == "module" else layer.weight):
        layer(x)
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x)
    assert rows(octavo.report()) == {(7, 16, 24, "excluded"): 3}


def test_nothing_is_counted_outside_a_region(device: torch.device) -> None:
    """The report is about regions; a linear outside, or under enabled=False, does not appear."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    layer(x)
    with octavo.fp8_autocast(), octavo.fp8_autocast(False):
        layer(x)
    report = octavo.report()
    assert (report.fp8_calls, report.other_calls, len(report.rows)) == (0, 0, 0)


def test_reading_and_clearing(device: torch.device) -> None:
    """report() reads, report(reset=True) reads and then clears; a report that was read does not change."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    with octavo.fp8_autocast():
        layer(x)
    first = octavo.report()
    assert octavo.report().fp8_calls == 1
    last = octavo.report(reset=True)
    assert last.fp8_calls == 1 and octavo.report().fp8_calls == 0
    with octavo.fp8_autocast():
        layer(x)
        layer(x)
    assert first.fp8_calls == last.fp8_calls == 1 and octavo.report().fp8_calls == 2


def test_forms_of_a_report(device: torch.device) -> None:
    """str() names shapes and reasons, as_dict() holds plain values."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    with octavo.fp8_autocast(exclude=layer):
        layer(x)
    with octavo.fp8_autocast():
        layer(x)
    report = octavo.report()
    for word in ("fp8", "excluded", "24", "16", "7"):
        assert word in str(report)

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return all(plain(v) for v in value)
        return value is None or isinstance(value, (str, int, float, bool))

    assert isinstance(report.as_dict(), dict) and plain(report.as_dict())


def test_other_reasons_have_names(device: torch.device) -> None:
    """float64 operands, a 1-D weight, functorch: untouched bits, a reason that is not "fp8"."""
    x, w = torch.randn(7, 24, device=device), torch.randn(16, 24, device=device)
    cases = [(x.double(), w.double()), (x.to(BF16), w[0].to(BF16))]
    for a, b in cases:
        outside = F.linear(a, b)
        with octavo.fp8_autocast():
            assert_bits(F.linear(a, b), outside)
        report = octavo.report(reset=True)
        assert report.fp8_calls == 0 and report.other_calls == 1
        assert report.rows[0].reason not in ("", "fp8")
