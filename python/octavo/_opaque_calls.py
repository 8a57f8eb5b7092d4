# SPDX-License-Identifier: Apache-2.0
"""Python functions that Dynamo puts into its graph as they are, with linears inside that no graph shows: PyTorch's
attention function, and what users have put under torch._dynamo.allow_in_graph."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Linear = Callable[..., Any]

# What it consists of, and its own linears are called by names of its module.
_ATTENTION = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")


def is_opaque(function: Any) -> bool:
    """Whether a graph's call of this may have linears inside."""
    if not isinstance(function, types.FunctionType):
        return False
    return function is F.multi_head_attention_forward or not function.__module__.startswith("torch.")


def with_linear(function: Callable[..., Any], linear: Linear) -> Callable[..., Any]:
    """The function with `linear` in the place of every F.linear."""
    if function is F.multi_head_attention_forward:
        # Not by a mode, for which this function would step aside whole.
        return _attention_with(linear)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Replaced(linear):
            return function(*args, **kwargs)

    return call


class _Replaced(TorchFunctionMode):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if function is F.linear else function)(*args, **(kwargs or {}))


def _attention_with(linear: Linear) -> Callable[..., Any]:
    namespace = dict(vars(F), linear=linear)
    for name in _ATTENTION:
        original = getattr(F, name)
        copy = types.FunctionType(original.__code__, namespace, name, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        copy.__module__ = __name__  # or a graph's code would call the original by its name
        namespace[name] = copy
    return namespace["multi_head_attention_forward"]
