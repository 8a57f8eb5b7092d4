# SPDX-License-Identifier: Apache-2.0
"""Linears that a table leaves in 16 bits: by size alone, by name anywhere, told in the report, saved with the state."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import octavo
from octavo.__main__ import main
from octavo.small import corners, write_small_table

HEADER = 'octavo-small-table 1\nname={}\ndevice="{}"\n'


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of sizes that a test can afford."""
    path = tmp_path_factory.mktemp("tables") / "toy.txt"
    write_small_table(path, "toy", "no such GPU", {"delayed": [(32, 48, 64), (64, 16, 64)], "dynamic": [(64, 64, 64)]})
    return octavo.load_small_table(path)


def ran(recipe: octavo.FP8Recipe, shape: tuple[int, int, int], device: torch.device, grad: bool = True) -> str:
    m, n, k = shape
    x = torch.randn(2, m // 2, k, device=device, dtype=torch.bfloat16)
    w = torch.nn.Parameter(torch.randn(n, k, device=device, dtype=torch.bfloat16))
    octavo.report(reset=True)
    with octavo.fp8_autocast(recipe=recipe), torch.set_grad_enabled(grad):
        y = F.linear(x, w)
    (row,) = octavo.report(reset=True).rows
    if not row.is_fp8:
        assert torch.equal(y, F.linear(x, w))
    return row.reason


@pytest.mark.parametrize("grad", [True, False])
def test_a_table_decides_by_all_three_sizes(device: torch.device, toy: str, grad: bool) -> None:
    delayed, dynamic = octavo.DelayedScaling(small=toy), octavo.DynamicScaling(small=toy)
    for shape, by_delayed, by_dynamic in [
        ((32, 48, 64), True, False),
        ((30, 48, 64), False, False),
        ((32, 47, 64), False, False),
        ((32, 48, 63), False, False),
        ((64, 16, 64), True, False),
        ((62, 16, 64), False, False),
        ((64, 64, 64), True, True),
        ((128, 256, 128), True, True),
        ((4096, 8, 4096), False, False),
    ]:
        for recipe, fp8 in ((delayed, by_delayed), (dynamic, by_dynamic)):
            reason = ran(recipe, shape, device, grad)
            assert reason.startswith("fp8" if fp8 else "small"), (shape, recipe, reason)


def test_the_shipped_table_by_name(device: torch.device) -> None:
    """small="h200" makes the H200's choice on any device."""
    assert "h200" in [table.name for table in octavo.small_tables()]
    assert ran(octavo.DelayedScaling(small="h200"), (64, 64, 64), device).startswith("small")
    assert ran(octavo.DelayedScaling(small=None), (64, 64, 64), device) == "fp8"


def test_auto_is_the_default_and_a_cpu_has_no_table() -> None:
    octavo.FP8Recipe.small, before = "auto", octavo.FP8Recipe.small
    try:
        assert octavo.DelayedScaling().small == octavo.DynamicScaling().small == "auto"
        assert ran(octavo.DelayedScaling(), (16, 16, 16), torch.device("cpu")) == "fp8"
    finally:
        octavo.FP8Recipe.small = before


def test_auto_takes_the_table_of_the_device(cuda: torch.device, tmp_path: Path) -> None:
    path = tmp_path / "here.txt"
    path.write_text(HEADER.format("here", torch.cuda.get_device_name()) + "delayed 64 64 64\n")
    octavo.load_small_table(path)
    auto = octavo.DelayedScaling(small="auto")
    assert ran(auto, (64, 64, 64), cuda) == "fp8"
    assert ran(auto, (64, 64, 48), cuda).startswith("small")


class Largest(octavo.FP8Recipe):
    """A policy of one's own: what it is called by must leave `small` out too."""

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return amax.max() / octavo.FP8_MAX[fmt]


@pytest.mark.parametrize("kind", [octavo.DelayedScaling, Largest])
def test_it_is_part_of_the_value_but_not_of_the_state(device: torch.device, toy: str, kind: type) -> None:
    """Under another table the same history goes on: another policy's would begin with the second amax alone."""
    plain, small = kind(small=None), kind(small=toy)
    assert plain != small and hash(plain) != hash(small) and "toy" in repr(small)
    w = torch.nn.Parameter(torch.randn(64, 64, device=device, dtype=torch.bfloat16))
    for recipe, size in ((plain, 4.0), (small, 1.0)):
        with octavo.fp8_autocast(recipe=recipe):
            F.linear(torch.full((64, 64), size, device=device, dtype=torch.bfloat16), w).sum().backward()
        octavo.step()
    history = octavo.fp8_state().get_weight_meta(w).x_hist
    assert history[-2:].tolist() == [4.0, 1.0] and history[0] == 4.0


@pytest.mark.parametrize("small", ["nowhere", "", 3, True])
def test_a_name_that_no_table_has(small: object) -> None:
    with pytest.raises(ValueError, match="octavo: small must be None, 'auto', 'h200'"):
        octavo.DelayedScaling(small=small)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "expected the lines"),
        ("octavo-small-table 2\n", ":1: expected"),
        (HEADER.format("auto", "x"), ":2: expected"),
        (HEADER.format("a", "x") + "delayed 1 2\n", ":4: expected"),
        (HEADER.format("a", "x") + "delayed 1 2 0\n", ":4: expected"),
        (HEADER.format("a", "x") + "delayed 1 2 3 4\n", ":4: expected"),
        (HEADER.format("a", "x") + "\n# remark\nslow 1 2 3\n", ":6: expected"),
        ("octavo-small-table 1\nname=a\ndelayed 1 2 3\n", "expected the lines"),
    ],
)
def test_a_file_that_is_no_table(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "broken.txt"
    path.write_text(text)
    before = octavo.small_tables()
    with pytest.raises(ValueError, match=r"broken\.txt") as raised:
        octavo.load_small_table(path)
    assert where in str(raised.value) and octavo.small_tables() == before


def test_the_report_and_the_saved_state_name_the_tables(device: torch.device, toy: str) -> None:
    ran(octavo.DelayedScaling(small=toy), (64, 64, 64), device)
    model = torch.nn.Linear(64, 64, device=device, dtype=torch.bfloat16)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(small=toy)):
        model(torch.randn(64, 64, device=device, dtype=torch.bfloat16)).sum().backward()
    assert "table: small toy (" in str(octavo.report())
    state = octavo.state_dict(model)
    assert {"small toy", "small h200"} <= set(state["tables"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octavo.load_state_dict(model, state)
        del state["tables"]
        octavo.load_state_dict(model, state)  # of before there were tables
    state["tables"] = {"small theirs": "0123"}
    with pytest.warns(UserWarning, match="tables that are not in force here: small theirs"):
        octavo.load_state_dict(model, state)


def test_a_table_that_took_the_place_of_another(tmp_path: Path) -> None:
    """It is listed once, and a state saved under the old one says so when it is loaded."""
    path, model = tmp_path / "mine.txt", torch.nn.Linear(16, 16)
    path.write_text(HEADER.format("mine", "no such GPU") + "delayed 64 64 64\n")
    assert octavo.load_small_table(path) == "mine"
    state = octavo.state_dict(model)
    path.write_text(HEADER.format("mine", "no such GPU") + "delayed 32 64 64\n")
    for _ in range(2):
        octavo.load_small_table(path)
    assert [table.name for table in octavo.small_tables()].count("mine") == 1
    with pytest.warns(UserWarning, match="not in force here: small mine"):
        octavo.load_state_dict(model, state)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the table {tmp_path} cannot be read"):
        octavo.load_small_table(tmp_path)


def test_corners() -> None:
    """The smallest measured shapes that are faster, with nothing slower above them."""
    ratios = {(m, n, 1): 1.2 for m in (1, 2, 3) for n in (1, 2, 3)}
    assert corners(ratios) == [(1, 1, 1)]
    ratios[(1, 3, 1)] = 0.9
    assert corners(ratios) == [(2, 1, 1)]
    ratios |= {(2, 1, 1): 0.995, (3, 3, 1): 0.992}
    assert corners(ratios) == [(2, 2, 1), (3, 1, 1)]
    assert corners({(1, 1, 1): 0.5}) == []


def test_the_command_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="octavo tune-small: "):
        main(["tune-small"])
