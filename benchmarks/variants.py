# SPDX-License-Identifier: Apache-2.0
"""Ways to train the same model: bf16, and Octavo with some recipe. peers.py has those of other libraries.

To measure another one of Octavo's, add it to `OCTAVO`: --recipe then takes its name in every benchmark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

import octavo

Region = Callable[[], AbstractContextManager[object]]
Names = Collection[str]  # of modules, as named_modules() has them


def _unchanged(model: nn.Module, exclude: Names) -> nn.Module:
    return model


def _no_region(model: nn.Module, exclude: Names) -> Region:
    return contextlib.nullcontext


@dataclass(frozen=True)
class Variant:
    """How a model of bf16 nn.Linear modules is trained. Modules named in `exclude` stay in bf16.

    transform: makes a fresh model the variant's own, in place where it can.
    region: from the transformed model, what gives the context of each forward. Backward runs outside of it.
    dynamic: every tensor is scaled by its own amax, and so is read twice.
    peer: another library's. Where it cannot run, it is listed with the reason; Octavo has to.
    """

    name: str
    transform: Callable[[nn.Module, Names], nn.Module] = _unchanged
    region: Callable[[nn.Module, Names], Region] = _no_region
    dynamic: bool = False
    peer: bool = False


def octavo_variant(name: str, recipe: octavo.FP8Recipe, dynamic: bool = False, **options: bool) -> Variant:
    """Octavo with a recipe, and options of fp8_autocast. The region is made once and entered for each forward."""

    def region(model: nn.Module, exclude: Names) -> Region:
        kept = [module for module_name, module in model.named_modules() if module_name in exclude]
        autocast = octavo.fp8_autocast(recipe=recipe, exclude=kept, **options)
        return lambda: autocast

    return Variant(name, region=region, dynamic=dynamic)


BF16 = Variant("bf16")
# delayed and dynamic: every linear in FP8. auto: the default, which leaves small ones in bf16 by the GPU's table.
# knobs: every linear, fast accumulation throughout, FP8 weights kept from forward to backward.
OCTAVO = {
    "delayed": octavo_variant("delayed", octavo.DelayedScaling(small=None)),
    "dynamic": octavo_variant("dynamic", octavo.DynamicScaling(small=None), dynamic=True),
    "auto": octavo_variant("auto", octavo.DelayedScaling()),
    "auto-dynamic": octavo_variant("auto-dynamic", octavo.DynamicScaling(), dynamic=True),
    "knobs": octavo_variant(
        "knobs", octavo.DelayedScaling(dgrad="fast", wgrad="fast", small=None), keep_fp8_weights=True
    ),
}
