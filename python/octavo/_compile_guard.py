# SPDX-License-Identifier: Apache-2.0
"""torch.compile inside a region is an error for now: a compiled graph, made here or earlier, would run bf16 unnoticed.

Dynamo sees neither our kernel (AOTAutograd takes aten::linear apart before it) nor the region (C++ thread state). So
the function that every compiled callable passes through before it runs is watched. It is a private name of torch's, in
one place; test_report.py fails where it moves.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
from typing import Any

import torch

_MESSAGE = (
    "octavo: a torch.compile'd function was called inside an FP8 region, which is not supported yet: its linears would "
    "silently run in bf16. Call the model uncompiled there, or call the compiled one outside of the region "
    "(octavo.fp8_autocast(enabled=False) makes such a place)."
)


_MODULE = "torch._dynamo.eval_frame"


def install() -> None:
    """Watches compiled callables from now on, also where Dynamo is imported later; does nothing the second time."""
    if _MODULE in sys.modules:
        _watch(sys.modules[_MODULE])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has the module watched as soon as it is imported, and leaves."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(eval_frame: Any) -> None:
    original = eval_frame._callback_from_stance
    if getattr(original, "_octavo", False):
        return

    @functools.wraps(original)
    def callback_from_stance(callback: Any) -> Any:
        # None and False: Dynamo is being turned off or only runs cached code of a frame already let through.
        if callback is not None and callback is not False and torch.ops.octavo._is_active():
            raise RuntimeError(_MESSAGE)
        return original(callback)

    callback_from_stance._octavo = True  # type: ignore[attr-defined]
    eval_frame._callback_from_stance = callback_from_stance
