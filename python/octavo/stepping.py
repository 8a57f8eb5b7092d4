# SPDX-License-Identifier: Apache-2.0
"""When weights have been updated, what was measured becomes history: torch.optim's hook, and `step` for other loops."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo import _checkpoint, _optimizers
from octavo.formats import FP8Format
from octavo.recipe import FP8Recipe

_recipes: dict[str, FP8Recipe] = {}  # recipes of Python's own, by identity
_hook: Any = None


def register_recipe(recipe: FP8Recipe) -> None:
    """Remembers a recipe whose steps Python computes, so that `step` finds it by what the state says."""
    if recipe._kind() == "custom":
        _recipes.setdefault(recipe._identity(), recipe)


def install_optimizer_hook() -> None:
    """Once, when a region is first entered."""
    global _hook
    if _hook is None:
        _optimizers.install()
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _advance(_optimizers.number_of(optimizer), getattr(optimizer, "found_inf", None))


def step() -> None:
    """Tells Octavo that the weights have been updated, in loops that use no torch.optim optimizer.

    Every slot that recorded an amax since the last call puts it into its history and takes a new step. Inside a
    backward it takes effect when that backward is over. Does not wait for the device.
    """
    _advance(0, None)


def _advance(owner: int, found_inf: torch.Tensor | None) -> None:
    if torch._C._current_graph_task_id() == -1:
        _advance_now(owner, found_inf)
    else:  # an optimizer that steps inside a backward: the rest of that backward belongs to the old scales
        _checkpoint.after_backward(lambda: _advance_now(owner, found_inf))


@torch.no_grad()
def _advance_now(owner: int, found_inf: torch.Tensor | None) -> None:
    torch.ops.octavo._step(owner, found_inf)
    for policy in torch.ops.octavo._external_policies():
        *_, maxes, identity = policy.split(":", 5)
        recipe = _recipes.get(identity)
        if recipe is not None:
            _apply(recipe, policy, [FP8Format.E5M2 if m == "57344" else FP8Format.E4M3 for m in maxes.split(",")])


def _apply(recipe: FP8Recipe, policy: str, formats: list[FP8Format]) -> None:
    for slots in torch.ops.octavo._slots_using(policy):
        amax, due = torch.ops.octavo._rings(slots, policy)
        steps = torch.stack([_steps(recipe, amax[:, i], fmt) for i, fmt in enumerate(formats)], dim=1)
        torch.ops.octavo._apply_custom_steps(slots, due, steps, policy)


def _steps(recipe: FP8Recipe, amax: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
    """amax [slots, history_len] -> steps [slots], by the recipe's own code."""
    if recipe.batched:
        steps = torch.as_tensor(recipe.scale_from_history(amax, fmt), dtype=torch.float32, device=amax.device)
        if steps.numel() != len(amax):
            raise ValueError(
                f"octavo: {type(recipe).__name__}.scale_from_history returned shape {list(steps.shape)} "
                f"for the windows of {len(amax)} slots; a batched recipe returns one step a slot"
            )
        return steps.reshape(len(amax))
    each = [
        torch.as_tensor(recipe.scale_from_history(window, fmt), dtype=torch.float32, device=amax.device)
        for window in amax
    ]
    for one in each:
        if one.numel() != 1:
            raise ValueError(
                f"octavo: {type(recipe).__name__}.scale_from_history returned shape {list(one.shape)}; "
                "it must return one step (or set batched = True)"
            )
    return torch.stack([one.reshape(()) for one in each])
