"""The README's code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import octavo

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_in_fp8() -> None:
    """Each Python block, as a program of its own; the linears of the first one run in FP8."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    octavo.report(reset=True)
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    report = octavo.report()
    assert report.fp8_calls == 6 and report.other_calls == 0
