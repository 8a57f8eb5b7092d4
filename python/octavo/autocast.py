# SPDX-License-Identifier: Apache-2.0
"""The region in which linears run in FP8, and the process-wide switch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.utils.parametrize

from octavo import _attention, _checkpoint, _compile_guard, stepping
from octavo.formats import FP8Format, parse_format
from octavo.recipe import DelayedScaling, FP8Recipe, check_history, check_margin, parse_recipe

Excluded = torch.nn.Module | torch.Tensor

_ON_FALLBACK = ("allow", "warn", "error")


class fp8_autocast(contextlib.ContextDecorator):
    """A region: every eligible linear inside runs its three products in FP8, its backward too, wherever that is called.

    Eligible are linears of bf16 or fp16 operands, given so or made so by torch.autocast. Nests, inherits nothing from
    the region around it, and restores what was there before, also after an exception. Also a decorator.

    Args:
        enabled: False makes a region in which nothing runs in FP8, whatever surrounds it.
        update_interval: the older name of the window's length; only without a recipe object.
        recipe: an octavo.FP8Recipe, or "delayed", "current", "dynamic", "tensorwise". Default: delayed scaling.
        fp8_format: an FP8Format or its name.
        margin: headroom in powers of two; only without a recipe object.
        exclude: modules (with all that is in them) and parameters whose linears stay as they are.
        include_float32: also linears whose operands are float32, which otherwise are left alone.
        share_inputs: linears that follow each other on one input (q, k and v; gate and up) quantise it once and save
            one copy for backward, where their scales are provably equal. The bits are the same with and without, as
            long as nothing changes an input behind autograd's back (`x.data.mul_()`) between them.
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
        flags = {
            "enabled": enabled,
            "include_float32": include_float32,
            "share_inputs": share_inputs,
            "keep_fp8_weights": keep_fp8_weights,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"octavo: {name} must be a bool, not {value!r}")
        if on_fallback not in _ON_FALLBACK:
            raise ValueError(f"octavo: on_fallback must be one of {', '.join(_ON_FALLBACK)}, not {on_fallback!r}")
        self.enabled = enabled
        self.recipe = _resolve_recipe(recipe, update_interval, margin)
        self.fp8_format = parse_format(fp8_format)
        self._excluded = _parameters_of(exclude)
        self._options = (include_float32, share_inputs, keep_fp8_weights, on_fallback)
        self._entered = threading.local()

    def _region(self) -> Any:
        r = self.recipe
        stepping.register_recipe(r)
        return torch.classes.octavo.Region(
            self.enabled,
            r._kind(),
            r.history_len,
            float(r.margin),
            r.power_of_two,
            r._identity(),
            r._products(),
            r.small or "",
            self.fp8_format.value,
            *self._options,
            self._excluded,
        )

    def __enter__(self) -> fp8_autocast:
        _install()
        region = self._region()
        region.enter()
        _stack().append(self)
        if not hasattr(self._entered, "regions"):
            self._entered.regions = []
        self._entered.regions.append(region)
        return self

    def __exit__(self, *exc: object) -> None:
        entered = getattr(self._entered, "regions", [])
        if not entered:
            raise RuntimeError("octavo: this fp8_autocast is left on a thread that has not entered it, or left twice")
        entered.pop().exit()
        stack = _stack()
        del stack[len(stack) - 1 - stack[::-1].index(self)]

    def _recreate_cm(self) -> fp8_autocast:
        return self


def _install() -> None:
    """What has to be in place once a region is entered, and not before."""
    stepping.install_optimizer_hook()
    _compile_guard.install()
    _attention.install()
    _checkpoint.install(_region_in_force)


_local = threading.local()
_default: fp8_autocast | None = None


def _stack() -> list[fp8_autocast]:
    """This thread's regions, innermost last."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def innermost() -> fp8_autocast | None:
    """The region that this thread has entered last, else the process-wide one."""
    return _stack()[-1] if _stack() else _default


def _resolve_recipe(recipe: Any, update_interval: Any, margin: Any) -> FP8Recipe:
    if isinstance(update_interval, bool):
        raise TypeError(
            f"octavo: update_interval must be an int, not {update_interval!r}; "
            "TransformerEngine's second argument `calibrating` has no counterpart here"
        )
    if recipe is None:
        history = 16 if update_interval is None else check_history(update_interval, "update_interval")
        return DelayedScaling(history, 0 if margin is None else check_margin(margin))
    parsed = parse_recipe(recipe)
    for name, value in (("update_interval", update_interval), ("margin", margin)):
        if value is not None:
            raise ValueError(
                f"octavo: {name}={value!r} was given beside a recipe, which has its own; "
                "say it there: DelayedScaling(history_len=…, margin=…)"
            )
    return parsed


def _parameters_of(exclude: Any) -> list[torch.Tensor]:
    items = [exclude] if isinstance(exclude, (torch.nn.Module, torch.Tensor)) else exclude
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise TypeError(f"octavo: exclude takes modules and parameters, not {exclude!r}")
    parameters: list[torch.Tensor] = []
    for item in items:
        if isinstance(item, torch.nn.Module):
            _refuse_computed_weights(item)
            parameters.extend(item.parameters())
        elif isinstance(item, torch.Tensor):
            parameters.append(item)
        else:
            raise TypeError(f"octavo: exclude takes modules and parameters, not {item!r}")
    return parameters


def _refuse_computed_weights(module: torch.nn.Module) -> None:
    for name, child in module.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(child):
            raise TypeError(
                f"octavo: exclude cannot tell {name or type(child).__name__!r}, whose weight is parametrized "
                "and new at every use; call it inside octavo.fp8_autocast(enabled=False) instead"
            )


def fp8_linear_enable(enabled: bool = True) -> None:
    """The process-wide switch, for code that cannot use a `with` block: delayed scaling in every thread that is not
    inside a region of its own."""
    global _default
    if not isinstance(enabled, bool):
        raise TypeError(f"octavo: enabled must be a bool, not {enabled!r}")
    if enabled:
        _install()
        _default = fp8_autocast()
        _default._region().make_default()
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
