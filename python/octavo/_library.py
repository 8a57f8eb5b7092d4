# SPDX-License-Identifier: Apache-2.0
"""Finds liboctavo.so, makes sure that it was built for this torch, and loads it."""

import json
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent / "lib"


def check_torch(built: dict, version: str, cuda: str | None) -> None:
    """Raises ImportError unless the library described by `built` fits torch `version` with CUDA `cuda`.

    A library for another torch would fail with an undefined symbol, or worse, run.
    """
    minor = ".".join(version.split(".")[:2])
    if built["torch"] != minor:
        raise ImportError(
            f"octavo {built['version']} was built for torch {built['torch']}, but torch {version} is installed: "
            f'run `pip install "torch=={built["torch"]}.*"`, or rebuild octavo beside this torch (`make build`).'
        )
    major = cuda.split(".")[0] if cuda else None
    if built["cuda"] is not None and built["cuda"] != major:
        has = f"is for CUDA {major}" if major else "has no CUDA"
        raise ImportError(
            f"octavo {built['version']} was built for CUDA {built['cuda']}, but the installed torch {version} {has}: "
            f"install a torch for CUDA {built['cuda']}, or rebuild octavo beside this one (`make build`)."
        )


def _load() -> dict:
    library, info = _FOLDER / "liboctavo.so", _FOLDER / "build_info.json"
    if not library.exists() or not info.exists():
        raise ImportError(f"octavo's library is not built ({library} is missing): run `make build` in its checkout.")
    built = json.loads(info.read_text())
    check_torch(built, torch.__version__.split("+")[0], torch.version.cuda)
    torch.ops.load_library(library)
    return built


BUILD: dict = _load()
__version__: str = BUILD["version"]
