# SPDX-License-Identifier: Apache-2.0
"""The scaling state, seen from Python: one linear's, everything's, and on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from octavo import tables
from octavo.autocast import innermost
from octavo.formats import FP8Format
from octavo.recipe import FP8Recipe

_VERSION = 1
_TENSORS = ("scale", "pending", "seeded", "history")


@dataclasses.dataclass(frozen=True)
class FP8TensorMeta:
    """The scaling state of one linear, read at one moment: plain CPU tensors.

    For each of w, x and g (the gradient of the output): the history ring, float32 [history_len], oldest first; the step
    in force; whether the ring has entries at all; the largest amax recorded since the last optimizer step; and how many
    steps had an amax past the step in force, so that their largest values were clipped to FP8_MAX.
    """

    x_hist: torch.Tensor
    w_hist: torch.Tensor
    g_hist: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    g_scale: torch.Tensor
    x_init: bool
    w_init: bool
    g_init: bool
    x_pending: torch.Tensor
    w_pending: torch.Tensor
    g_pending: torch.Tensor
    x_clipped: int
    w_clipped: int
    g_clipped: int


class FP8State:
    """The registry: what region this thread is in, and the state of every linear."""

    @property
    def enabled(self) -> bool:
        """Whether linears of this thread run in FP8 here."""
        return torch.ops.octavo._is_active()

    @property
    def recipe(self) -> FP8Recipe | None:
        """The innermost region's recipe; None outside of any."""
        region = innermost()
        return region.recipe if region else None

    @property
    def fp8_format(self) -> FP8Format | None:
        """The innermost region's format; None outside of any."""
        region = innermost()
        return region.fp8_format if region else None

    def get_weight_meta(self, w: torch.Tensor) -> FP8TensorMeta | None:
        """The state of the linear whose weight is `w`, read from the device; None if nothing was recorded yet."""
        if not isinstance(w, torch.Tensor):
            raise TypeError(f"octavo: w must be a weight tensor, not {w!r}")
        scale, pending, seeded, history, policy, clipped = torch.ops.octavo._read_state(w)
        if not policy:
            return None
        fields: dict[str, Any] = {}
        for i, operand in enumerate("xwg"):
            fields[f"{operand}_hist"] = history[i]
            fields[f"{operand}_scale"] = scale[i]
            fields[f"{operand}_init"] = bool(seeded[i])
            fields[f"{operand}_pending"] = pending[i]
            fields[f"{operand}_clipped"] = int(clipped[i])
        return FP8TensorMeta(**fields)

    def reset(self) -> None:
        """Empties the state of every linear."""
        torch.ops.octavo._reset()


_STATE = FP8State()


def fp8_state() -> FP8State:
    """The process's registry."""
    return _STATE


def state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """The scaling state of a model's linears, by parameter name: plain tensors, strings and ints.

    Save it beside the model's own state_dict; torch.load(weights_only=True) reads it. Shared parameters are there once,
    under their first name. What has not been recorded yet (between backward and optimizer step) is included.
    """
    linears: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for suffix, weight in _weights(parameter):
            *tensors, policy, _ = torch.ops.octavo._read_state(weight)
            if policy:
                linears[name + suffix] = {**dict(zip(_TENSORS, tensors, strict=True)), "policy": policy}
    return {"version": _VERSION, "linears": linears, "tables": tables.as_state()}


def _weights(parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameter, and those slices of it that are weights of their own (attention's in_proj_weight), with what is
    put behind the parameter's name for them: @offset:size,size:stride,stride."""
    yield "", parameter
    for offset, *rest in torch.ops.octavo._slices(parameter):
        sizes, strides = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        suffix = f"@{offset}:{','.join(map(str, sizes))}:{','.join(map(str, strides))}"
        yield suffix, _slice(parameter, suffix)


def _slice(parameter: torch.Tensor, suffix: str) -> torch.Tensor:
    offset, *layout = suffix[1:].split(":")
    sizes, strides = ([int(n) for n in numbers.split(",")] for numbers in layout)
    with torch.no_grad():
        return parameter.as_strided(sizes, strides, int(offset))


def _find(name: str, parameters: dict[str, torch.nn.Parameter]) -> torch.Tensor | None:
    """The weight that an entry's name means; None if the model has none such."""
    owner, at, suffix = name.rpartition("@") if "@" in name else (name, "", "")
    if owner not in parameters:
        return None
    if not at:
        return parameters[owner]
    try:
        return _slice(parameters[owner], at + suffix)
    except (ValueError, RuntimeError):
        return None


def load_state_dict(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Puts a state_dict back: training goes on with the same bits. Parameters that `state` does not name keep theirs.
    Warns where it was saved under other tables of small products or of algorithms than those in force.

    Raises:
        ValueError: one, naming every entry that is unknown, incomplete or of the wrong shape; nothing is changed then.
    """
    if not isinstance(state, dict) or state.get("version") != _VERSION or not isinstance(state.get("linears"), dict):
        raise ValueError(f"octavo: this is not a scaling state of version {_VERSION}, as octavo.state_dict makes it")
    parameters = dict(model.named_parameters())
    problems = [p for name, entry in state["linears"].items() for p in _problems(name, entry, parameters)]
    if problems:
        raise ValueError(
            "octavo: the scaling state does not fit this model, nothing was loaded: " + "; ".join(problems)
        )
    tables.warn_if_others(state.get("tables"))
    for name, entry in state["linears"].items():
        torch.ops.octavo._write_state(_find(name, parameters), *(entry[key] for key in _TENSORS), entry["policy"])


def _problems(name: str, entry: Any, parameters: dict[str, torch.nn.Parameter]) -> list[str]:
    if _find(name, parameters) is None:
        return [f"{name!r} is not a parameter of the model, nor a slice of one"]
    keys = {*_TENSORS, "policy"}
    if not isinstance(entry, dict) or set(entry) != keys:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        return [f"{name!r} must have the entries {sorted(keys)}, not {found}"]
    if not isinstance(entry["policy"], str) or not torch.ops.octavo._is_policy(entry["policy"]):
        return [f"{name!r} has the unknown policy {entry['policy']!r}"]
    history_len = int(entry["policy"].split(":")[1])
    shapes = {"scale": [3], "pending": [3], "seeded": [3], "history": [3, history_len]}
    misshapen = [
        f"{name!r} has {key} of shape {list(getattr(entry[key], 'shape', ['no tensor']))}, not {shape}"
        for key, shape in shapes.items()
        if not isinstance(entry[key], torch.Tensor) or list(entry[key].shape) != shape
    ]
    return misshapen or [
        f"{name!r} has {key} with values that are not {rule}"
        for key, rule, is_good in _RULES
        if not bool(is_good(entry[key], entry["seeded"].bool().cpu()).all())
    ]


def _is_finite_and_not_negative(t: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(t) & (t >= 0)


_RULES = (
    ("scale", "finite and positive", lambda t, _: torch.isfinite(t) & (t > 0)),
    ("pending", "finite and not negative", _is_finite_and_not_negative),
    ("history", "finite and not negative", _is_finite_and_not_negative),
    ("history", "positive where it is seeded", lambda t, seeded: (t.cpu() > 0).all(-1) | ~seeded),
)
