# SPDX-License-Identifier: Apache-2.0
"""Tables of algorithms and the command that makes them; products that are added to what is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from checks import accumulation_error, assert_bits, bits, operand, plain, ulp

import octavo
from octavo.__main__ import main
from octavo._library import BUILD
from octavo.tune import PRODUCTS, SHAPES, Operands, parse_shapes, table_lines, write_table

HEADER = "octavo-gemm-table 1\n"
ENTRY = (
    'device="Some GPU" cublaslt=1 m=16 n=16 k=16 a=e4m3 b=e4m3 d=bf16 bias=none fast=1 accumulate=0 '
    "id=66 tile=1 stages=36 splitk=1 reduction=0 swizzle=0 custom=0 inner=0 cluster=3\n"
)

with_tables = pytest.mark.skipif(BUILD["cuda"] is None, reason="a build without CUDA")


def words(step: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([step], device=device).view(torch.int32)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "COMMAND"),
        (["tine"], "invalid choice: 'tine'"),
        (["tune", "--shapes", "4096x4096"], "MxNxK as in 4096x4096x1536, not '4096x4096'"),
        (["tune", "--shapes", "0x16x16"], "not '0x16x16'"),
        (["tune", "--products", "backward"], "invalid choice: 'backward'"),
        (["tune", "--recipe-products", "fast", "fast"], "expected 3 arguments"),
        (["tune", "--recipe-products", "fast", "fast", "high"], "invalid choice: 'high'"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    """Each is said, with what is possible, before anything is looked for."""
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    """One sentence, no traceback, no file."""
    command = [sys.executable, "-m", "octavo", "tune", "--out", str(tmp_path / "table.txt")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.strip() == "octavo tune: algorithms are tuned on a CUDA GPU, and PyTorch sees none"


def test_shapes() -> None:
    """Groups, all, and shapes of one's own, each once."""
    assert parse_shapes(["all"]) == parse_shapes(list(SHAPES))
    assert parse_shapes(["odd", "16x4096x4096", "1x2x3"]) == [*SHAPES["odd"], (1, 2, 3)]


def test_wrong_calls() -> None:
    """octavo.tune names what it does not know, also where there is no GPU."""
    with pytest.raises(ValueError, match="products are forward, dgrad"):
        octavo.tune([(16, 16, 16)], ["backward"])
    with pytest.raises(ValueError, match="three of 'fast' and 'accurate'"):
        octavo.tune([(16, 16, 16)], precisions=("fast", "high", "fast"))
    with pytest.raises(ValueError, match="three positive numbers"):
        octavo.tune([(16, 0, 16)])


def test_a_product_knows_its_sizes() -> None:
    """Rows, columns and contraction of y = x w^T, dx = dy w and dw = dy^T x."""
    sizes = {name: product.sizes((1, 2, 3)) for name, product in PRODUCTS.items()}
    assert sizes["forward"] == (1, 2, 3) and sizes["dgrad"] == (1, 3, 2) and sizes["wgrad"] == (2, 3, 1)


# Tables --------------------------------------------------------------------------------------------------------------


@with_tables
def test_a_loaded_table_is_asked_first(tmp_path: Path) -> None:
    """Its name, a hash of its text, and its number of entries are there to be told; loading again replaces it."""
    before = octavo.gemm_tables()
    assert before and before[-1].name.startswith("shipped: ")
    path = tmp_path / "table.txt"
    hashes = set()
    for text in (HEADER, HEADER + ENTRY):
        path.write_text(text)
        octavo.load_gemm_table(path)
        first = octavo.gemm_tables()[0]
        assert (first.name, first.entries, first.refused) == (str(path), text.count("device="), ())
        hashes.add(first.hash)
    assert len(hashes) == 2 and octavo.gemm_tables()[1:] == before


@with_tables
def test_a_bad_table_changes_nothing(tmp_path: Path) -> None:
    """The error names the file, the line and what was expected."""
    before = octavo.gemm_tables()
    path = tmp_path / "table.txt"
    path.write_text(HEADER + ENTRY + ENTRY.replace("stages=36", "stages=many"))
    with pytest.raises(RuntimeError, match=rf"{path}:3: expected stages=NUMBER from 0 to 4294967295, found many"):
        octavo.load_gemm_table(path)
    with pytest.raises(RuntimeError, match=r"no-such-table\.txt cannot be read"):
        octavo.load_gemm_table(tmp_path / "no-such-table.txt")
    assert octavo.gemm_tables() == before


@with_tables
@pytest.mark.parametrize(("text", "expected"), [(HEADER + ENTRY, "1 entries"), ("nothing\n", "expected octavo-gemm")])
def test_the_environment_names_a_table(tmp_path: Path, text: str, expected: str) -> None:
    """OCTAVO_GEMM_TABLE is read at the first use of a table; a mistake in the file is an error then."""
    path = tmp_path / "table.txt"
    path.write_text(text)
    script = """
import octavo
try:
    print(octavo.gemm_tables()[0].entries, "entries")
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "OCTAVO_GEMM_TABLE": str(path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert expected in done.stdout


@pytest.mark.skipif(BUILD["cuda"] is not None, reason="a build with CUDA")
def test_a_build_without_cuda_has_no_tables(tmp_path: Path) -> None:
    """None in force, and loading one is an error."""
    assert octavo.gemm_tables() == ()
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        octavo.load_gemm_table(tmp_path / "table.txt")


@pytest.fixture
def native(cuda: torch.device) -> torch.device:
    if octavo.fp8_support(cuda) != "native":
        pytest.skip("no FP8 tensor cores")
    return cuda


@pytest.mark.parametrize("name", PRODUCTS)
def test_tuned_products(native: torch.device, tmp_path: Path, name: str) -> None:
    """The table of a tuning is taken, without a refusal, gives the same result within the bound, and is what a second
    tuning finds in force."""
    shape = (208, 320, 272)  # of no other test
    product = PRODUCTS[name]
    operands = Operands.random(product, shape)
    before = operands.multiply()
    (row,) = octavo.tune([shape], [name])
    assert row.wrong == 0 and row.in_force == 0 and row.tried >= len(row.lines) == len(row.microseconds) > 0
    assert row.best_us <= row.winner_us <= row.heuristic_us
    path = tmp_path / "table.txt"
    write_table(path, table_lines([row, row]))
    octavo.load_gemm_table(path)
    assert octavo.gemm_tables()[0].entries == bool(row.lines[row.winner])
    after = operands.multiply()
    error = (after.float() - before.float()).norm() / before.float().norm()
    assert error < 1e-2 and octavo.gemm_tables()[0].refused == ()
    assert_bits(operands.multiply(), after)
    (again,) = octavo.tune([shape], [name])
    assert again.lines[again.in_force] == row.lines[row.winner] or not row.lines[row.winner]


def test_the_command_writes_a_table(native: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each product, and a file that loads."""
    path = tmp_path / "table.txt"
    main(["tune", "--shapes", "128x272x208", "--recipe-products", "accurate", "fast", "fast", "--out", str(path)])
    printed = capsys.readouterr().out
    assert all(printed.count(name) == 1 for name in ("forward", "dgrad", "wgrad"))
    assert octavo.gemm_tables()[0].name == str(path)
    entries = [line for line in path.read_text().splitlines() if line.startswith("device=")]
    assert all("fast=" + ("0" if " a=e4m3" in line else "1") in line for line in entries)


def test_shapes_of_a_report(native: torch.device) -> None:
    """What a model has run can be tuned: the rows of octavo.report()."""
    layer = torch.nn.Linear(48, 80, device=native, dtype=torch.bfloat16)
    with octavo.fp8_autocast():
        layer(torch.randn(32, 48, device=native, dtype=torch.bfloat16))
        layer(torch.randn(0, 48, device=native, dtype=torch.bfloat16))  # not in FP8
    tuned = octavo.tune(octavo.report().rows, ["forward_bias"])
    assert [row.shape for row in tuned] == [(32, 80, 48)]


# Products that are added ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")])
def test_a_product_added_to_a_matrix(device: torch.device, dtype: torch.dtype, pair: tuple[str, str]) -> None:
    """d + product: float32 of the float64 sum, times either scale, plus d in float32, one rounding to d's dtype."""
    steps = (0.0371, 1.9e-3 if "e4m3" in pair else 1.9e-7)  # fp16 must hold the sums
    for m, n, k in [(16, 16, 16), (17, 33, 48), (64, 96, 128), (5, 24, 64), (1, 1, 16)]:
        rows, columns = -(-m // 16) * 16, -(-n // 16) * 16
        a, b = operand(rows, k, pair[0], device), operand(columns, k, pair[1], device)
        d = torch.randn(m, n).to(dtype).to(device)
        codes = [t.cpu().view(torch.uint8).numpy() for t in (a[:m], b[:n])]
        formats = (oracle.FORMATS[pair[0]], oracle.FORMATS[pair[1]])
        want = oracle.product(*codes, formats, steps, None, torch.float32)
        expected = (want.value.reshape(m, n) + d.cpu().float()).to(dtype)
        exact = want.exact.reshape(m, n) + d.cpu().double().numpy()
        scales = words(steps[0], device), 0, words(steps[1], device), 0
        torch.ops.octavo._mm_into(d, a, b, scales[0], 0, scales[2], 0, False)
        if device.type == "cpu":
            assert_bits(plain(d), plain(expected), f"{m}x{n}x{k}")
            continue
        slack = accumulation_error(k, "accurate") * want.magnitude.reshape(m, n) + 2.0**-22 * abs(exact)
        bound = slack + 0.5 * ulp(abs(exact) + slack, dtype)
        assert (abs(d.cpu().double().numpy() - exact) <= bound).all(), f"{m}x{n}x{k}"


def test_it_is_rounded_once(device: torch.device) -> None:
    """256 + (1 + 2^-8) is 258 in bf16; the product rounded first is 1, and 257 is a tie that stays 256."""
    a = torch.zeros(16, 16, device=device)
    a[0, 0], a[0, 1] = 1.0, 2.0**-4
    codes = a.to(torch.float8_e4m3fn)
    d = torch.full((16, 16), 256.0, device=device, dtype=torch.bfloat16)
    torch.ops.octavo._mm_into(d, codes, codes, words(1.0, device), 0, words(1.0, device), 0, False)
    assert d[0, 0].item() == 258.0 and (d.flatten()[1:] == 256.0).all()


def test_what_cannot_be_added_to(device: torch.device) -> None:
    """Strided, of another rank, or not a float of 16 or 32 bits: an error, and d stays."""
    a = operand(16, 16, "e4m3", device)
    one = words(1.0, device)
    for d in (torch.zeros(16, 32, device=device)[:, ::2], torch.zeros(16, device=device), torch.zeros(16, 16).to(a)):
        before = bits(d)
        with pytest.raises(RuntimeError, match="_mm_into: d must be"):
            torch.ops.octavo._mm_into(d, a, a, one, 0, one, 0, False)
        assert torch.equal(bits(d), before)
