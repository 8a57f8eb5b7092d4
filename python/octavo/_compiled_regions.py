# SPDX-License-Identifier: Apache-2.0
"""Regions that are entered inside a compiled function: what Dynamo traces instead of fp8_autocast's own code."""

from __future__ import annotations

from typing import Any

import torch

from octavo import _compile, _graph
from octavo._settings import Settings
from octavo.recipe import FP8Recipe, recipe_by_key


def settings(arguments: tuple[Any, ...]) -> Settings:
    """Settings(*arguments). What Dynamo holds of a recipe is its text, by which it is guarded."""
    enabled, update_interval, recipe, fp8_format, margin, exclude, *others = arguments
    if exclude != ():
        torch._dynamo.graph_break(
            "octavo: fp8_autocast(exclude=...) inside a compiled function; enter it outside, or call what is excluded "
            "inside fp8_autocast(enabled=False)"
        )
    is_recipe = isinstance(recipe, FP8Recipe)
    key = recipe._key_text if is_recipe else None
    return _settings(key, enabled, update_interval, None if is_recipe else recipe, fp8_format, margin, *others)


def _settings(
    key: str | None, enabled: Any, update_interval: Any, recipe: Any, fp8_format: Any, margin: Any, *others: Any
) -> Settings:
    recipe = recipe if key is None else recipe_by_key(key)
    return Settings(enabled, update_interval, recipe, fp8_format, margin, (), *others)


def enter(number: int) -> None:
    """Marks the beginning of a region, by the number of its settings."""
    _take_out_marks()
    torch.ops.octavo._begin_region(number)


def leave() -> None:
    """Marks the end of the region begun last."""
    torch.ops.octavo._end_region()


def _take_out_marks() -> None:
    """Has the graph that is being traced go through our backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    from octavo.autocast import install

    install()
    output = InstructionTranslator.current_tx().output
    if not isinstance(output.compiler_fn, _compile.Backend):
        output.compiler_fn = _compile.Backend(output.compiler_fn, _graph.OUTSIDE)


def is_traced_for_fp8() -> bool:
    """Whether the graph that is being traced has something in a region, as far as it is there."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return isinstance(InstructionTranslator.current_tx().output.compiler_fn, _compile.Backend)


class RegionInGraph:
    """A region by the number of its settings, for the graph alone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        enter(self.number)

    def __exit__(self, *exc: object) -> None:
        leave()


for _function in (_settings, _take_out_marks, is_traced_for_fp8):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called as it is, while tracing
