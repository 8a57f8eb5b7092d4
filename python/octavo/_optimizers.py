# SPDX-License-Identifier: Apache-2.0
"""Which optimizer steps which parameters.

An optimizer's step advances the slots of the parameters in its groups, and of those in no optimizer's. So all of them
have to be known, also those that have not stepped yet: the ones alive are looked for once, later ones are met in
`Optimizer.add_param_group`, through which every group of every optimizer goes.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any

import torch
from torch.optim import Optimizer

_numbers = itertools.count(1)
_known: weakref.WeakKeyDictionary[Optimizer, _Groups] = weakref.WeakKeyDictionary()
_gone: list[int] = []  # numbers of optimizers that have died since the last step
_changes = 0  # of who owns what


class _Groups:
    """An optimizer's number, and what was known when its parameters were last claimed for it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.number = next(_numbers)
        self.seen: Any = None
        weakref.finalize(optimizer, _gone.append, self.number)


def install() -> None:
    """Knows all optimizers from now on; once, when a region is first entered."""
    original = Optimizer.add_param_group
    if getattr(original, "_octavo", False):
        return

    @functools.wraps(original)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        global _changes
        original(self, param_group)
        _meet(self)
        _changes += 1

    add_param_group._octavo = True  # type: ignore[attr-defined]
    Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):
            _meet(thing)


def number_of(optimizer: Optimizer) -> int:
    """The number by which slots know this optimizer, which is about to step: its parameters are claimed for it."""
    global _changes
    groups = _meet(optimizer)
    while _gone:
        torch.ops.octavo._release(_gone.pop())
        _changes += 1
    if groups.seen != _what_is_known(optimizer):
        for other, others in list(_known.items()):
            torch.ops.octavo._claim(_parameters(other), others.number, False)
        if torch.ops.octavo._claim(_parameters(optimizer), groups.number, True):
            _changes += 1  # another optimizer that steps them too has to take them back
        groups.seen = _what_is_known(optimizer)
    return groups.number


def _meet(optimizer: Optimizer) -> _Groups:
    global _changes
    groups = _known.get(optimizer)
    if groups is None:
        groups = _known[optimizer] = _Groups(optimizer)
        _changes += 1
    return groups


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _what_is_known(optimizer: Optimizer) -> tuple[int, int, int]:
    """Where none of these has moved, every parameter is claimed: states ever made, groups, changes of hands."""
    return torch.ops.octavo._states_made(), sum(len(g["params"]) for g in optimizer.param_groups), _changes
