# SPDX-License-Identifier: Apache-2.0
"""The libraries that --peer compares with, each with its defaults and trained as its documentation shows.

te: TransformerEngine. nn.Linear becomes te.Linear, under te.autocast, which is entered for each forward. The weight is
cast in every forward, and its transpose is kept for backward.
torchao: convert_to_float8_training, whose default is tensorwise dynamic scaling. It is meant to be compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from variants import Names, Region, Variant

_PACKAGES = {"te": "transformer_engine", "torchao": "torchao"}
_INSTALL = {
    "te": "pip install --no-build-isolation 'transformer_engine[pytorch]'",
    "torchao": "pip install torchao",
}


def available() -> list[str]:
    """The peers that are installed here."""
    return [peer for peer, package in _PACKAGES.items() if importlib.util.find_spec(package)]


def variants(peer: str, compiled: bool = False) -> list[Variant]:
    """A peer's variants. `compiled`: torchao a second time, its modules compiled.

    Raises ImportError, in one line: where the peer is not installed, or does not load.
    """
    return {"te": _te_variants, "torchao": _torchao_variants}[peer](compiled)


def _load(peer: str, module: str) -> ModuleType:
    if peer not in available():
        raise ImportError(f"{_PACKAGES[peer]} is not installed; `{_INSTALL[peer]}` installs it")
    try:
        return importlib.import_module(module)
    except Exception as error:  # of a build for another torch: ImportError, OSError, AssertionError, RuntimeError
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ImportError(f"{_PACKAGES[peer]} is installed but does not load: {reason}") from error


def _te_variants(compiled: bool) -> list[Variant]:
    te = _load("te", "transformer_engine.pytorch")
    recipes = _load("te", "transformer_engine.common.recipe")

    def make(linear: nn.Linear) -> nn.Module:
        made = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        with torch.no_grad():
            for name, parameter in linear.named_parameters():
                getattr(made, name).copy_(parameter)
        return made

    def transform(model: nn.Module, exclude: Names) -> nn.Module:
        return swap_linears(model, exclude, make)

    def region_of(recipe: Any) -> Callable[[nn.Module, Names], Region]:
        if hasattr(te, "autocast"):
            return lambda model, exclude: lambda: te.autocast(enabled=True, recipe=recipe)
        return lambda model, exclude: lambda: te.fp8_autocast(enabled=True, fp8_recipe=recipe)

    return [
        Variant("te delayed", transform, region_of(recipes.DelayedScaling()), peer=True),
        Variant("te current", transform, region_of(recipes.Float8CurrentScaling()), dynamic=True, peer=True),
    ]


def _torchao_variants(compiled: bool) -> list[Variant]:
    convert = _load("torchao", "torchao.float8").convert_to_float8_training

    def transform(model: nn.Module, exclude: Names) -> nn.Module:
        return convert(model, module_filter_fn=lambda module, name: name not in exclude)

    def transform_and_compile(model: nn.Module, exclude: Names) -> nn.Module:
        return torch.compile(transform(model, exclude), dynamic=False)

    plain = Variant("ao", transform, dynamic=True, peer=True)
    return [plain, Variant("ao compiled", transform_and_compile, dynamic=True, peer=True)] if compiled else [plain]


def swap_linears(model: nn.Module, exclude: Names, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Puts make(linear) in the place of every nn.Linear that is not excluded."""
    if isinstance(model, nn.Linear):
        return make(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in exclude:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, make(module))
    return model
