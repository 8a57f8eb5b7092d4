# SPDX-License-Identifier: Apache-2.0
"""Text that is the same for equal recipes and differs for others: by it they share their state, on disk too."""

from __future__ import annotations

import hashlib
import weakref
from typing import Any

import torch

_classes: dict[str, weakref.WeakKeyDictionary[type, int]] = {}
_last_numbers: dict[str, int] = {}


def class_name(cls: type) -> str:
    """A name for a class: its own, and a number where another class of this process had that name first."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    numbers = _classes.setdefault(name, weakref.WeakKeyDictionary())
    if cls not in numbers:
        _last_numbers[name] = numbers[cls] = _last_numbers.get(name, 0) + 1
    return name if numbers[cls] == 1 else f"{name}#{numbers[cls]}"


def describe(name: str, value: Any) -> str:
    """An attribute's value as text that tells different values apart and is the same for equal ones."""
    if isinstance(value, torch.Tensor):
        contents = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor({value.dtype}, {list(value.shape)}, {hashlib.sha256(contents).hexdigest()})"
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(
            f"octavo: the recipe's attribute {name}={text} cannot be compared by value, as equal recipes share their "
            "state; give its class a __repr__ that tells its value, or write the policy as a method"
        )
    return text
