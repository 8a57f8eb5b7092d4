# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: what the demo trains on and what it holds out, the same split every time."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
STDLIB_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes kept apart, each uint8 [length]; no file is in both."""

    train: Tensor
    held_out: Tensor
    files: int
    held_out_files: int

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.train.to(device), self.held_out.to(device), self.files, self.held_out_files)

    def unigram_entropy(self) -> float:
        """Entropy of the single bytes of the held-out text, in nats: what a model without context can reach."""
        p = torch.bincount(self.held_out.long(), minlength=VOCABULARY).double() / self.held_out.numel()
        return -torch.special.xlogy(p, p).sum().item()


def load_corpus(folder: Path | None = None, pattern: str = "*.py") -> Corpus:
    """Read the files of `folder` that match `pattern`; by default the Python standard library, without its tests.

    The files are ordered by a hash of their relative path. The first twentieth of them is held out.
    """
    skipped = STDLIB_SKIPPED if folder is None else frozenset()
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    names = [path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file()]
    names = [name for name in names if skipped.isdisjoint(name.parts)]
    if len(names) < 2:
        raise ValueError(f"{folder} holds {len(names)} files that match {pattern!r}, and at least 2 are needed")
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    held_out = max(1, len(names) // 20)
    return Corpus(
        train=_read(folder, names[held_out:]),
        held_out=_read(folder, names[:held_out]),
        files=len(names),
        held_out_files=held_out,
    )


def _read(folder: Path, names: list[Path]) -> Tensor:
    """The files' bytes, a zero byte after each: uint8 [length]."""
    data = bytearray()
    for name in names:
        data += (folder / name).read_bytes() + b"\0"
    return torch.frombuffer(data, dtype=torch.uint8)


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each int64 [len(starts), context], cut from `data` at `starts`."""
    rows = data[starts[:, None] + torch.arange(context + 1, device=data.device)].long()
    return rows[:, :-1], rows[:, 1:]


def require_length(data: Tensor, context: int, what: str) -> None:
    if data.numel() <= context + 1:
        raise ValueError(f"the {what} text has {data.numel()} bytes, and a context of {context} needs {context + 2}")
