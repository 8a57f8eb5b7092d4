# SPDX-License-Identifier: Apache-2.0
"""Recipes: how amaxes become quantisation steps, and which of a linear's three products run in FP8.

A *step* is what a quantised value is multiplied with to get the value back: x ~ q * step.
"""

from __future__ import annotations

import math
import struct
import weakref
from typing import Any

import torch

from octavo._identity import class_name, describe
from octavo.formats import FP8_MAX, FP8Format

_UNSET: Any = object()  # stands for the class attribute of that name
_NOT_SCALING = ("forward", "dgrad", "wgrad", "small")  # part of a recipe's value, but no matter for its state
_PRECISIONS = ("fast", "accurate", "high")
_MAX_HISTORY = 65536
_MAX_MARGIN = 64.0


def check_history(history_len: Any, argument: str = "history_len") -> int:
    if isinstance(history_len, bool) or not isinstance(history_len, int):
        raise TypeError(f"octavo: {argument} must be an int, not {history_len!r}")
    if not 1 <= history_len <= _MAX_HISTORY:
        raise ValueError(f"octavo: {argument} must be 1 to {_MAX_HISTORY}, not {history_len}")
    return history_len


def check_margin(margin: Any) -> float:
    if isinstance(margin, bool) or not isinstance(margin, (int, float)):
        raise TypeError(f"octavo: margin must be a number, not {margin!r}")
    if not (math.isfinite(margin) and abs(margin) <= _MAX_MARGIN):
        raise ValueError(f"octavo: margin must be -{_MAX_MARGIN:g} to {_MAX_MARGIN:g}, not {margin!r}")
    return float(margin)


def _check_precision(product: str, precision: Any) -> str:
    if precision not in _PRECISIONS:
        raise ValueError(f"octavo: {product} must be one of {', '.join(map(repr, _PRECISIONS))}, not {precision!r}")
    return precision


def _check_small(small: Any) -> None:
    if small is None or small == "auto":
        return
    names, _, _ = torch.ops.octavo._small_tables()
    if not isinstance(small, str) or small not in names:
        known = ", ".join(repr(name) for name in dict.fromkeys(names))
        raise ValueError(
            f"octavo: small must be None, 'auto', {known}, or the name of a table that octavo.load_small_table has "
            f"read, not {small!r}"
        )


_alive: weakref.WeakValueDictionary[int, FP8Recipe] = weakref.WeakValueDictionary()  # by identity: equal ones too


def recipe_by_key(key: str) -> FP8Recipe:
    """Some recipe of that key that is still there."""
    return next(recipe for recipe in list(_alive.values()) if recipe._key_text == key)


class _FrozenWhenMade(type):
    """Closes an object against changes once its __init__, however deep the subclass, is through."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        # Once: regions ask for it each time they are entered, and it may have to read a tensor's values.
        object.__setattr__(made, "_text", made._identify())  # raises where an attribute cannot be compared
        object.__setattr__(made, "_key_text", repr(made._key()))
        _alive[id(made)] = made
        return made


class FP8Recipe(metaclass=_FrozenWhenMade):
    """A scaling policy. Subclass it and override `scale_from_history` to bring one of your own.

    Recipes are immutable once made, compared by value (the class and every attribute), and hashable.

    Args:
        history_len: optimizer steps in the amax window, 1 to 65536.
        margin: headroom in powers of two; the built-in formula multiplies the step with 2**margin.
        power_of_two: the built-in formula rounds steps up to powers of two.
        forward, dgrad, wgrad: how a product runs: y = x w^T, dx = dy w, dw = dy^T x. "fast": FP8 with Hopper's shorter
            accumulator; "accurate": FP8, accumulated in float32; "high": not FP8, in the operands' 16-bit dtype.
        small: linears that are faster in 16 bits stay there. "auto": by the table of the device that they run on, where
            there is one (an H200; a CPU has none); a table's name ("h200"): by that one, anywhere; None: none stays.
            `octavo.small_tables()` lists the tables.

    A subclass that takes arguments of its own sets them as attributes in its __init__; one that does not call this has
    the defaults, which it may also override as class attributes.
    """

    history_len: int = 16
    margin: float = 0.0
    power_of_two: bool = False
    forward: str = "fast"
    dgrad: str = "accurate"
    wgrad: str = "accurate"
    small: str | None = "auto"

    #: True: `scale_from_history` gets the windows of many slots at once, [slots, history_len], and returns [slots].
    batched = False

    def __init__(
        self,
        history_len: int = _UNSET,
        margin: float = _UNSET,
        *,
        power_of_two: bool = _UNSET,
        forward: str = _UNSET,
        dgrad: str = _UNSET,
        wgrad: str = _UNSET,
        small: str | None = _UNSET,
    ) -> None:
        given = {
            "history_len": history_len,
            "margin": margin,
            "power_of_two": power_of_two,
            "forward": forward,
            "dgrad": dgrad,
            "wgrad": wgrad,
            "small": small,
        }
        for name, value in given.items():
            if value is not _UNSET:
                setattr(self, name, check_margin(value) if name == "margin" else value)
        self._check()

    def _check(self) -> None:
        check_history(self.history_len)
        check_margin(self.margin)
        if not isinstance(self.power_of_two, bool):
            raise TypeError(f"octavo: power_of_two must be a bool, not {self.power_of_two!r}")
        for product in ("forward", "dgrad", "wgrad"):
            _check_precision(product, getattr(self, product))
        _check_small(self.small)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_text" in self.__dict__:
            raise AttributeError(f"octavo: recipes are immutable; make a new {type(self).__name__} to change {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"octavo: recipes are immutable; {name!r} cannot be deleted")

    def scale_from_history(self, amax: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
        """The quantisation step from the amax window. *The* place to plug in a policy.

        Called after each optimizer step, for every slot (the x, w or g of one linear) that measured something. The
        result is the final step, which is only clamped to [2**-126, 2**126]; one that is not finite and positive
        leaves the old step, with a warning. Must not wait for the device (no .item()).

        Args:
            amax: float32 [history_len], oldest first, always full, on the device of the linear; with `batched`,
                [slots, history_len].
            fmt: FP8Format.E4M3 or FP8Format.E5M2, the format of that operand.

        Returns:
            float32, one element; with `batched`, [slots].
        """
        raise NotImplementedError(f"octavo: {type(self).__name__} must override scale_from_history(amax, fmt)")

    def _step(self, amax: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
        """The built-in formula: (amax / FP8_MAX) * 2**margin, clamped, rounded up to a power of two if asked."""
        maximum = torch.full_like(amax, FP8_MAX[fmt])  # a GPU would multiply with the reciprocal of a scalar
        step = (amax / maximum) * _float32(2.0**self.margin)
        step = step.clamp(2.0**-126, 2.0**126)
        if self.power_of_two:
            step = ((step.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        return torch.where(amax == 0, torch.ones_like(step), step)

    def _values(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in FP8Recipe.__annotations__}
        return {name: value for name, value in sorted({**options, **vars(self)}.items()) if name != "_text"}

    def _products(self) -> list[str]:
        return [self.forward, self.dgrad, self.wgrad]

    def _kind(self) -> str:
        return "custom"

    def _identity(self) -> str:
        """What the policy is, as text, without the products, which scale nothing."""
        return self.__dict__["_text"]

    def _identify(self) -> str:
        values = {k: v for k, v in self._values().items() if k not in _NOT_SCALING}
        described = ", ".join(f"{name}={describe(name, value)}" for name, value in values.items())
        return f"{class_name(type(self))}({described})"

    def _key(self) -> tuple[str, ...]:
        return (self._identity(), *self._products(), repr(self.small))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FP8Recipe):
            return NotImplemented
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        described = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"{type(self).__name__}({described})"


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


class DelayedScaling(FP8Recipe):
    """The step from the amaxes of the last `history_len` optimizer steps, known before the tensor is.

    Args:
        algorithm: "max", the largest amax of the window, or "most_recent", that of the last step.
        others: as FP8Recipe.
    """

    batched = True

    def __init__(
        self,
        history_len: int = 16,
        margin: float = 0,
        *,
        algorithm: str = "max",
        power_of_two: bool = False,
        forward: str = "fast",
        dgrad: str = "accurate",
        wgrad: str = "accurate",
        small: str | None = _UNSET,
    ) -> None:
        super().__init__(
            history_len,
            margin,
            power_of_two=power_of_two,
            forward=forward,
            dgrad=dgrad,
            wgrad=wgrad,
            small=small,
        )
        if algorithm not in ("max", "most_recent"):
            raise ValueError(f"octavo: algorithm must be 'max' or 'most_recent', not {algorithm!r}")
        self.algorithm = algorithm

    def scale_from_history(self, amax: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
        return self._step(amax.amax(-1) if self.algorithm == "max" else amax[..., -1], fmt)

    def _kind(self) -> str:
        return self.algorithm if _is_builtin(self, DelayedScaling) else "custom"


class DynamicScaling(FP8Recipe):
    """The step from the tensor's own amax ("current scaling"): one more read of each tensor, and no state."""

    batched = True

    def __init__(
        self,
        margin: float = 0,
        *,
        power_of_two: bool = False,
        forward: str = "fast",
        dgrad: str = "accurate",
        wgrad: str = "accurate",
        small: str | None = _UNSET,
    ) -> None:
        super().__init__(1, margin, power_of_two=power_of_two, forward=forward, dgrad=dgrad, wgrad=wgrad, small=small)

    def scale_from_history(self, amax: torch.Tensor, fmt: FP8Format) -> torch.Tensor:
        return self._step(amax[..., -1], fmt)

    def _kind(self) -> str:
        return "dynamic" if _is_builtin(self, DynamicScaling) else "custom"


def _is_builtin(recipe: FP8Recipe, cls: type[FP8Recipe]) -> bool:
    """Whether the library's own code computes the steps: nobody has overridden the policy."""
    return type(recipe).scale_from_history is cls.scale_from_history


_BY_NAME = {
    "delayed": DelayedScaling,
    "current": DynamicScaling,
    "dynamic": DynamicScaling,
    "tensorwise": DynamicScaling,
}


def parse_recipe(recipe: FP8Recipe | str) -> FP8Recipe:
    """The recipe of a name that configs use, or the recipe itself; one clear error for anything else."""
    if isinstance(recipe, FP8Recipe):
        if type(recipe).scale_from_history is FP8Recipe.scale_from_history:
            raise TypeError(
                f"octavo: recipe={recipe!r} has no policy: subclass FP8Recipe and override scale_from_history, or use "
                "DelayedScaling or DynamicScaling"
            )
        recipe._check()  # a subclass may not have called FP8Recipe.__init__
        return recipe
    if isinstance(recipe, str):
        if recipe not in _BY_NAME:
            names = ", ".join(map(repr, _BY_NAME))
            raise ValueError(f"octavo: recipe must be an octavo.FP8Recipe or one of {names}, not {recipe!r}")
        return _BY_NAME[recipe]()
    cls = type(recipe)
    if cls.__module__.partition(".")[0] in ("transformer_engine", "torchao"):
        raise TypeError(
            f"octavo: recipe is a {cls.__module__}.{cls.__qualname__}, another library's; use octavo.DelayedScaling() "
            "or octavo.DynamicScaling() (TransformerEngine's current scaling). Scales are steps here."
        )
    raise TypeError(f"octavo: recipe must be an octavo.FP8Recipe or a name, not {recipe!r}")
