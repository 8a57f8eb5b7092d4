# SPDX-License-Identifier: Apache-2.0
"""The region in which linears run in FP8, and the process-wide switch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import torch

from octavo import _attention, _checkpoint, _compile, _compiled_regions, stepping
from octavo._settings import Settings
from octavo.formats import FP8Format
from octavo.recipe import FP8Recipe

Excluded = torch.nn.Module | torch.Tensor


class fp8_autocast(contextlib.ContextDecorator):
    """A region: every eligible linear inside runs its three products in FP8, its backward too, wherever that is called.

    Eligible are linears of bf16 or fp16 operands, given so or made so by torch.autocast. Nests, inherits nothing from
    the region around it, and restores what was there before, also after an exception. Also a decorator. Compiled
    callables (torch.compile) that are called inside have graphs of their own there; a compiled function may also enter
    it, where `exclude`, and making a recipe object there, break the graph.

    Args:
        enabled: False makes a region in which nothing runs in FP8, whatever surrounds it.
        update_interval: the older name of the window's length; only without a recipe object.
        recipe: an octavo.FP8Recipe, or "delayed", "current", "dynamic", "tensorwise". Default: delayed scaling.
        fp8_format: an FP8Format or its name.
        margin: headroom in powers of two; only without a recipe object.
        exclude: modules (with all that is in them) and parameters whose linears stay as they are.
        include_float32: also linears whose operands are float32, which otherwise are left alone.
        share_inputs: linears that follow each other on one input (q, k and v; gate and up) quantise it once and save
            one copy for backward, where their scales are provably equal; not in compiled graphs. The bits are the same
            with and without, as long as nothing changes an input behind autograd's back (`x.data.mul_()`) between
            them.
        keep_fp8_weights: keep the weight's transposed FP8 copy from forward to backward, a byte a parameter, instead
            of quantising it again there.
        on_fallback: "allow", "warn" or "error": what happens to a linear that should run in FP8 and cannot, because
            its tensors are of a subclass, nested or not strided, inside a functorch transform or forward-mode AD, or
            because its weight or bias has not a linear's shape. It runs as outside and is counted in octavo.report();
            or that with a warning; or it is a RuntimeError. What was chosen so (excluded, float32, small, by the
            recipe) is no fallback, nor is an empty product or one whose weight is the result of a computation. But
            torch.func's grad and jvp wrap the weights that they are given, which `exclude` then does not recognise:
            call such a part inside fp8_autocast(enabled=False).

    Raises:
        TypeError, ValueError: naming the argument and its value; nothing is entered then.
    """

    def __init__(
        self,
        enabled: bool = True,
        update_interval: int | None = None,
        recipe: FP8Recipe | str | None = None,
        fp8_format: FP8Format | str = "hybrid",
        margin: float | None = None,
        *,
        exclude: Excluded | Iterable[Excluded] = (),
        include_float32: bool = False,
        share_inputs: bool = True,
        keep_fp8_weights: bool = False,
        on_fallback: str = "allow",
    ) -> None:
        arguments = (
            *(enabled, update_interval, recipe, fp8_format, margin),
            *(exclude, include_float32, share_inputs, keep_fp8_weights, on_fallback),
        )
        if torch.compiler.is_dynamo_compiling():
            self._settings = _compiled_regions.settings(arguments)
            return
        callback = _compile.pause()
        try:
            self._settings = Settings(*arguments)
        finally:
            _compile.go_on(callback)

    @property
    def enabled(self) -> bool:
        """Whether linears run in FP8 inside."""
        return self._settings.enabled

    @property
    def recipe(self) -> FP8Recipe:
        """The scaling policy."""
        return self._settings.recipe

    @property
    def fp8_format(self) -> FP8Format:
        """The formats of the operands."""
        return self._settings.fp8_format

    def __enter__(self) -> fp8_autocast:
        if torch.compiler.is_dynamo_compiling():
            _compiled_regions.enter(self._settings.number)
            return self
        callback = _compile.pause()
        try:
            install()
            region = self._settings.region()
            region.enter()
            _stack().append((self, region))
        finally:
            _compile.go_on(callback)
        return self

    def __exit__(self, *exc: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            _compiled_regions.leave()
            return
        callback = _compile.pause()
        try:
            _leave(self)
        finally:
            _compile.go_on(callback)

    def _recreate_cm(self) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _compiled_regions.RegionInGraph(self._settings.number)
        return self


for _function in (
    fp8_autocast.__init__,
    fp8_autocast.__enter__,
    fp8_autocast.__exit__,
    fp8_autocast._recreate_cm,
):
    _compile.never_compile(_function)


def _leave(region: fp8_autocast) -> None:
    stack = _stack()
    entered = [at for at, (which, _) in enumerate(stack) if which is region]
    if not entered:
        raise RuntimeError("octavo: this fp8_autocast is left on a thread that has not entered it, or left twice")
    stack.pop(entered[-1])[1].exit()


def install() -> None:
    """What has to be in place once a region is entered, and not before."""
    stepping.install_optimizer_hook()
    _compile.install()
    _attention.install()
    _checkpoint.install(_region_in_force)


_local = threading.local()
_default: fp8_autocast | None = None


def _stack() -> list[tuple[fp8_autocast, Any]]:
    """This thread's regions, innermost last."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def innermost() -> fp8_autocast | None:
    """The region that this thread has entered last, else the process-wide one."""
    return _stack()[-1][0] if _stack() else _default


def fp8_linear_enable(enabled: bool = True) -> None:
    """The process-wide switch, for code that cannot use a `with` block: delayed scaling in every thread that is not
    inside a region of its own."""
    global _default
    if not isinstance(enabled, bool):
        raise TypeError(f"octavo: enabled must be a bool, not {enabled!r}")
    if enabled:
        install()
        _default = fp8_autocast()
        _default._settings.region().make_default()
    else:
        _default = None
        torch.ops.octavo._clear_default()


def fp8_linear_enabled() -> bool:
    """Whether the process-wide switch is on."""
    return _default is not None


def _region_in_force() -> _checkpoint.Region:
    """What enters this thread's region again, whatever holds by then; a region that is off where there is none."""
    region = innermost()
    return lambda: region or fp8_autocast(enabled=False)
