# SPDX-License-Identifier: Apache-2.0
"""torch.compile: a compiled callable that is called inside a region runs its linears in FP8, in a graph of its own.

Dynamo neither sees the region, which is C++ state of the thread, nor our kernel, since AOTAutograd takes aten::linear
apart. So inside a region a compiled callable is given another backend: one that puts our own op into the place of every
linear (_graph.py), and hands the graph on to the user's backend. Dynamo keeps the graphs of different backends apart
and finds them again: what was compiled in a region is used in equal regions and nowhere else. A region that is entered
inside a compiled function is a pair of marks in the graph (_compiled_regions.py), which the same backend takes out.

What this relies on in torch._dynamo is in these three files: `eval_frame._callback_from_stance`, through which every
compiled callable goes before it runs; `_torchdynamo_orig_backend` and `_clone_with_backend`, by which DDPOptimizer
changes backends in the same way; that frames which change the callback are let be. test_compile.py fails where they
move.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame as dynamo

from octavo import _graph

_DYNAMO = "torch._dynamo.eval_frame"


class Backend:
    """The user's backend, for graphs that are compiled in a region, or outside of all and with regions inside."""

    def __init__(self, backend: Callable[..., Any], region: _graph.Region) -> None:
        self._backend, self.region = backend, region
        self.__name__ = getattr(backend, "__name__", type(backend).__name__)
        # What Dynamo asks a backend for. `compiler_fn`: by it Dynamo knows its own.
        self.compiler_fn = _innermost(backend)
        for attribute in ("compiler_name", "get_compiler_config"):
            if hasattr(self.compiler_fn, attribute):
                setattr(self, attribute, getattr(self.compiler_fn, attribute))

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Any], **options: Any) -> Any:
        try:
            _graph.put_in_linears(graph, self.region)
            return self._backend(graph, example_inputs, **options)
        finally:
            for message in torch.ops.octavo._take_warnings():
                warnings.warn(message, stacklevel=2)


_backends: weakref.WeakSet[Backend] = weakref.WeakSet()


def _backend(inner: Callable[..., Any], region: _graph.Region) -> Backend:
    """The same object for equal ones: Dynamo shares the graphs of one code by their backends."""
    for known in _backends:
        if known.region == region and known.compiler_fn == _innermost(inner):
            return known
    made = Backend(inner, region)
    _backends.add(made)
    return made


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _in_region(callback: Any) -> Any:
    """What Dynamo calls to compile a frame, where that is `callback`, for the region that this thread is in."""
    if callback is None or callback is False:
        return callback
    callback = getattr(callback, "_octavo_outside", callback)
    text, excluded = torch.ops.octavo._active_region()
    if not text:
        return callback
    inside = callback.__dict__.setdefault("_octavo_inside", {})
    key = text, frozenset(map(id, excluded))
    if key not in inside or not inside[key][0].is_alive():
        region = _graph.Region(text, excluded)
        inside[key] = region, _with_backend(callback, region)
    return inside[key][1]


def _with_backend(callback: Any, region: _graph.Region) -> Any:
    convert = callback._torchdynamo_orig_backend
    backend = _backend(convert._torchdynamo_orig_backend, region)
    inside = _inside()(convert._clone_with_backend(backend), callback.hooks)
    inside._octavo_outside = callback
    return inside


@functools.cache
def _inside() -> type:
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    from octavo._settings import outside

    class Inside(CatchErrorsWrapper):
        """Compiles outside of all regions: what is to run in FP8, the graph says."""

        def __call__(self, *args: Any) -> Any:
            region = outside()
            region.enter()
            try:
                return super().__call__(*args)
            finally:
                region.exit()

    return Inside


# A region may be entered or left while a compiled callable runs, by a piece of it that Dynamo has left to Python. ----


def pause() -> Any:
    """Keeps Dynamo from compiling what this thread calls, until `go_on` with what this returns."""
    callback = dynamo.get_eval_frame_callback()
    if callback is not None:
        dynamo.set_eval_frame(None)
    return callback


def go_on(callback: Any) -> None:
    """From here on frames are compiled for the region that the thread is in by now."""
    if callback is not None:
        dynamo.set_eval_frame(_in_region(callback))


def never_compile(function: Any) -> None:
    """Lets Dynamo leave a function to Python where it meets it by itself; it is still traced where it is called from
    something compiled."""
    skip, as_ever = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, as_ever))


for _function in (pause, go_on):
    never_compile(_function)


# --------------------------------------------------------------------------------------------------------------------


def install() -> None:
    """Gives compiled callables their backends from now on, also where Dynamo is imported later; once."""
    if _DYNAMO in sys.modules:
        _watch(sys.modules[_DYNAMO])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has the module watched as soon as it is imported, and leaves."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _DYNAMO:
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
        chosen = original(_in_region(callback))
        if chosen is False and callback is not False and _backends:
            raise RuntimeError(
                "octavo: under this torch.compiler.set_stance a compiled callable takes any graph that it has, of "
                "whatever region; use the stance 'fail_on_recompile' to forbid compilation"
            )
        return chosen if isinstance(_innermost(chosen), Backend) else _in_region(chosen)  # another backend was forced

    callback_from_stance._octavo = True  # type: ignore[attr-defined]
    eval_frame._callback_from_stance = callback_from_stance
