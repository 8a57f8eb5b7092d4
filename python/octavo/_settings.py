# SPDX-License-Identifier: Apache-2.0
"""What a region is entered with: the arguments of fp8_autocast, checked."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.utils.parametrize

from octavo import stepping
from octavo.formats import parse_format
from octavo.recipe import DelayedScaling, FP8Recipe, check_history, check_margin, parse_recipe

_ON_FALLBACK = ("allow", "warn", "error")
_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Settings] = weakref.WeakValueDictionary()


class Settings:
    """Raises TypeError or ValueError, naming the argument and its value."""

    def __init__(
        self,
        enabled: Any,
        update_interval: Any,
        recipe: Any,
        fp8_format: Any,
        margin: Any,
        exclude: Any,
        include_float32: Any,
        share_inputs: Any,
        keep_fp8_weights: Any,
        on_fallback: Any,
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
        self.excluded = _parameters_of(exclude)
        self._options = (include_float32, share_inputs, keep_fp8_weights, on_fallback)
        self.number = next(_numbers)  # by which a graph refers to it
        _by_number[self.number] = self

    def region(self) -> Any:
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
            self.excluded,
        )


def settings_of(number: int) -> Settings:
    """Settings that are still there."""
    return _by_number[number]


@functools.cache
def outside() -> Any:
    """The region in which nothing runs in FP8."""
    return Settings(False, None, None, "hybrid", None, (), False, True, False, "allow").region()


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
