"""The library and the torch that it was built for; the C++ example on an installed Octavo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo
from octavo._library import BUILD, check_torch

ROOT = Path(__file__).parents[2]
BUILT = {"version": "0.1.0", "torch": "2.11", "cuda": "13"}


def test_the_torch_it_was_built_for_is_accepted() -> None:
    """Patch releases and local versions of one torch share their interface; a CPU build suits any CUDA."""
    check_torch(BUILT, "2.11.0", "13.0")
    check_torch(BUILT, "2.11.3", "13.1")
    check_torch({**BUILT, "cuda": None}, "2.11.0", None)
    check_torch({**BUILT, "cuda": None}, "2.11.0", "12.8")


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        ("2.12.0", "13.0", ["torch 2.11", "torch 2.12.0", "pip install"]),
        ("2.1.1", "13.0", ["torch 2.11", "torch 2.1.1"]),
        ("2.11.0", "12.8", ["CUDA 13", "CUDA 12", "make build"]),
        ("2.11.0", None, ["CUDA 13", "no CUDA"]),
    ],
)
def test_another_torch_is_refused_in_one_sentence(version: str, cuda: str | None, words: list[str]) -> None:
    """What it was built for, what is there, what to do: instead of an opaque loader error."""
    with pytest.raises(ImportError) as error:
        check_torch(BUILT, version, cuda)
    assert all(word in str(error.value) for word in words)
    assert str(error.value).count("\n") == 0


def test_the_check_comes_before_loading(tmp_path: Path) -> None:
    """A package built for another torch raises that sentence, and nothing of the library is loaded."""
    package = tmp_path / "octavo"
    shutil.copytree(Path(octavo.__file__).parent, package)
    (package / "lib" / "build_info.json").write_text(json.dumps({**BUILD, "torch": "2.10"}))
    (package / "lib" / "liboctavo.so").write_bytes(b"not even a library")
    script = "import torch\ntry:\n    import octavo\nexcept ImportError as e:\n    print(e)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "built for torch 2.10" in done.stdout


def test_importing_changes_nothing() -> None:
    """No override, no hook, no Dynamo, until a region is entered."""
    script = """
import sys
import torch
before = set(sys.modules)
import octavo
from torch.optim import optimizer
table = torch._C._dispatch_dump_table("aten::linear")
assert "octavo" not in table and "aten_linear" not in table, table
assert not optimizer._global_optimizer_post_hooks
assert "torch._dynamo" in before or "torch._dynamo" not in sys.modules
with octavo.fp8_autocast():
    pass
assert "aten_linear" in torch._C._dispatch_dump_table("aten::linear")
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env={**os.environ})


def test_this_build_knows_its_devices() -> None:
    """CPUs are emulated; a GPU is what the table says, or the build says that it has no kernels for one."""
    assert octavo.fp8_support("cpu") == "emulated"
    if BUILD["cuda"] is None:
        with pytest.raises(RuntimeError, match="rebuild it with CUDA"):
            octavo.fp8_support("cuda:0")
    elif torch.cuda.is_available():
        assert octavo.fp8_support("cuda:0") in ("native", "emulated")


@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("ninja") is None, reason="no cmake, no ninja")
@pytest.mark.skipif(not (ROOT / "build").exists(), reason="no build tree to install from")
def test_the_cpp_example_trains(tmp_path: Path) -> None:
    """cmake --install, find_package(octavo) in a project of its own, and a training run in FP8 without Python."""
    tree = next(t for t in (ROOT / "build" / half for half in ("cuda", "cpu")) if (t / "lib" / "liboctavo.so").exists())
    torch_folder = Path(torch.__file__).parent
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    source = ROOT / "examples" / "cpp"
    for command in (
        ["cmake", "--install", tree, "--prefix", prefix],
        ["cmake", "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix};{torch_folder}"],
        ["cmake", "--build", build],
        [build / "train"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
