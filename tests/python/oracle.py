# SPDX-License-Identifier: Apache-2.0
"""A slow and obvious model of the numerics contract, in numpy, float64 and bit formats.

Nothing here is shared with the library: the 256 codes of a format are decoded from their bits, rounding is a search in
that table, products are float64 sums, and the scaling state of one linear is a few Python lists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

f32 = np.float32


@dataclass(frozen=True)
class Format:
    """One FP8 format, described by its bit layout."""

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    ieee: bool  # the largest exponent is kept for Inf and NaN

    @cached_property
    def values(self) -> np.ndarray:
        """The value of each of the 256 codes, float64."""
        return np.array([self._decode(code) for code in range(256)])

    def _decode(self, code: int) -> float:
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> self.mantissa_bits
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        if self.ieee and exponent == top:
            return sign * math.inf if mantissa == 0 else math.nan
        if not self.ieee and code & 0x7F == 0x7F:
            return math.nan
        bias = (1 << (self.exponent_bits - 1)) - 1
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - bias - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - bias - self.mantissa_bits)

    @cached_property
    def positive(self) -> np.ndarray:
        """The finite values without sign; the index of a value is its code."""
        return self.values[:128][np.isfinite(self.values[:128])]

    @property
    def max(self) -> float:
        return float(self.positive[-1])

    @property
    def inf_code(self) -> int:
        """What +Inf becomes."""
        return len(self.positive) if self.ieee else 0x7F


E4M3 = Format("e4m3", torch.float8_e4m3fn, 4, 3, ieee=False)
E5M2 = Format("e5m2", torch.float8_e5m2, 5, 2, ieee=True)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


# Casts ------------------------------------------------------------------------------------------------------------


def values(t: torch.Tensor) -> np.ndarray:
    """The tensor's own values as float32: exact for bf16, fp16 and fp32."""
    return t.detach().cpu().float().contiguous().numpy().copy()


def round_even(magnitude: np.ndarray, fmt: Format) -> np.ndarray:
    """The code nearest to a magnitude not above the maximum, ties to the even code. Distances in float64 are exact."""
    table = fmt.positive
    magnitude = np.asarray(magnitude, dtype=np.float64)
    above = np.minimum(np.searchsorted(table, magnitude, side="left"), len(table) - 1)
    below = np.maximum(above - 1, 0)
    to_below, to_above = magnitude - table[below], table[above] - magnitude
    take_below = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
    return np.where(take_below, below, above).astype(np.uint8)


def quantise(x: np.ndarray, step: float, fmt: Format) -> np.ndarray:
    """q = cast(float32(x) * (1 / step)); NaN and Inf are decided on x, all finite x saturate."""
    x = np.asarray(x, dtype=f32)
    with np.errstate(all="ignore"):
        scaled = x * (f32(1) / f32(step))
    scaled = np.where(x == 0, x, scaled)  # also where the reciprocal overflowed
    code = round_even(np.minimum(np.abs(scaled), f32(fmt.max)), fmt)
    code = np.where(np.isinf(x), fmt.inf_code, code)
    code = code | (np.signbit(x).astype(np.uint8) << 7)
    not_a_number = np.isnan(x) | (np.isinf(x) if not fmt.ieee else False)
    return np.where(not_a_number, 0x7F, code).astype(np.uint8)


def dequantise(code: np.ndarray, step: float, fmt: Format) -> np.ndarray:
    return fmt.values[code] * float(f32(step))


def amax(x: np.ndarray) -> np.float32:
    """Largest absolute value over the finite elements, 0 if there is none."""
    finite = np.abs(x[np.isfinite(x)])
    return f32(finite.max()) if finite.size else f32(0)


def step_from_amax(amax: float, fmt: Format, margin: float = 0, power_of_two: bool = False) -> np.float32:
    """(amax / FP8_MAX) * m, two float32 operations, then the clamp, then up to a power of two by bits."""
    if amax == 0:
        return f32(1)
    with np.errstate(all="ignore"):
        step = f32(f32(amax) / f32(fmt.max))
        step = f32(step * f32(2.0 ** float(margin)))
    step = min(max(step, f32(2.0**-126)), f32(2.0**126))
    if power_of_two:
        bits = int(np.asarray(step).view(np.uint32))
        if bits & 0x7FFFFF:
            bits = (bits & ~0x7FFFFF) + 0x800000
        step = np.array(bits, dtype=np.uint32).view(f32)[()]
    return f32(step)


# Products ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product as the contract defines it, with what an error bound needs."""

    value: torch.Tensor  # what a CPU must return, bit for bit
    exact: np.ndarray  # float64, scales and bias included, not rounded
    magnitude: np.ndarray  # sum of |a||b| times the scales, float64
    k: int


def product(
    a: np.ndarray,
    b: np.ndarray,
    formats: tuple[Format, Format],
    steps: tuple[float, float],
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_scale: float | None = None,
) -> Product:
    """a[M,K] times b[N,K] transposed, both codes: the exact sum as float32, times step a, times step b, plus bias."""
    va, vb = formats[0].values[a], formats[1].values[b]
    scales = float(f32(steps[0])) * float(f32(steps[1]))
    with np.errstate(all="ignore"):
        total = va @ vb.T
        result = (total.astype(f32) * f32(steps[0])) * f32(steps[1])
        exact = total * scales
        if bias is not None:
            result = result + values(bias)
            exact = exact + values(bias).astype(np.float64)
        magnitude = (np.abs(va) @ np.abs(vb).T) * scales
    if dtype == torch.float8_e4m3fn:
        value = torch.from_numpy(quantise(result, out_scale, E4M3)).view(dtype)
    else:
        value = torch.from_numpy(np.ascontiguousarray(result, dtype=f32)).to(dtype)
    return Product(value, exact, magnitude, a.shape[1])


# The state of one linear --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """The scaling part of a recipe and the formats."""

    history_len: int = 16
    margin: float = 0
    power_of_two: bool = False
    algorithm: str = "max"
    dynamic: bool = False
    operand: Format = E4M3
    gradient: Format = E5M2

    def step(self, ring: list[float], fmt: Format) -> np.float32:
        chosen = ring[-1] if self.algorithm == "most_recent" else max(ring)
        return step_from_amax(chosen, fmt, self.margin, self.power_of_two)

    def own_step(self, tensor: np.ndarray, fmt: Format) -> np.float32:
        return step_from_amax(amax(tensor), fmt, self.margin, self.power_of_two)


@dataclass
class Slot:
    """Scale, ring and pending amax of one of w, x and g."""

    policy: Policy | None = None
    ring: list[np.float32] = field(default_factory=list)
    pending: np.float32 = field(default_factory=lambda: f32(0))
    scale: np.float32 = field(default_factory=lambda: f32(1))

    def step_for(self, tensor: np.ndarray, policy: Policy, fmt: Format) -> np.float32:
        if policy.dynamic or self.policy != policy or not self.ring:
            return policy.own_step(tensor, fmt)
        return self.scale

    def record(self, measured: np.float32, policy: Policy) -> None:
        if policy.dynamic or measured == 0:
            return
        if self.policy != policy:
            self.policy, self.ring, self.pending = policy, [], f32(0)
        self.pending = max(self.pending, measured)

    def advance(self, fmt: Format) -> None:
        if self.pending == 0:
            return
        length = self.policy.history_len
        self.ring = (self.ring[1:] if self.ring else [self.pending] * (length - 1)) + [self.pending]
        self.scale, self.pending = self.policy.step(self.ring, fmt), f32(0)


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward: values, never references to the state."""

    policy: Policy
    x: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    qx: np.ndarray
    qw: np.ndarray
    sx: np.float32
    sw: np.float32


@dataclass(frozen=True)
class Gradients:
    x: Product
    w: Product
    bias: torch.Tensor


class Linear:
    """Forward, backward and state of one linear layer, as the contract tells it."""

    def __init__(self) -> None:
        self.slots = {"x": Slot(), "w": Slot(), "g": Slot()}

    def forward(
        self,
        policy: Policy,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Product, Saved]:
        """Changes nothing. `dtype` is autocast's where it is active, else x's; the bias takes it before it is added."""
        dtype = dtype or x.dtype
        vx, vw = values(x).reshape(-1, x.shape[-1]), values(w)
        sx = self.slots["x"].step_for(vx, policy, policy.operand)
        sw = self.slots["w"].step_for(vw, policy, policy.operand)
        qx, qw = quantise(vx, sx, policy.operand), quantise(vw, sw, policy.operand)
        added = None if bias is None else bias.detach().to(dtype)
        y = product(qx, qw, (policy.operand, policy.operand), (sx, sw), added, dtype)
        y = replace(y, value=y.value.reshape(*x.shape[:-1], w.shape[0]))
        return y, Saved(policy, x.detach(), w.detach().clone(), bias, qx, qw, sx, sw)

    def backward(self, saved: Saved, dy: torch.Tensor) -> Gradients:
        policy = saved.policy
        vg = values(dy).reshape(-1, dy.shape[-1])
        sg = self.slots["g"].step_for(vg, policy, policy.gradient)
        qg = quantise(vg, sg, policy.gradient)
        formats = (policy.gradient, policy.operand)
        dx = product(qg, saved.qw.T, formats, (sg, saved.sw), dtype=saved.x.dtype)
        dw = product(qg.T, saved.qx.T, formats, (sg, saved.sx), dtype=saved.w.dtype)
        dx = replace(dx, value=dx.value.reshape(saved.x.shape))
        db = torch.from_numpy(vg.astype(np.float64).sum(0))
        db = db.float().to(saved.bias.dtype if saved.bias is not None else dy.dtype)
        self.slots["x"].record(amax(values(saved.x)), policy)
        self.slots["w"].record(amax(values(saved.w)), policy)
        if np.isfinite(vg).all():
            self.slots["g"].record(amax(vg), policy)
        return Gradients(dx, dw, db)

    def step(self) -> None:
        for name, slot in self.slots.items():
            if slot.policy is not None:
                slot.advance(slot.policy.gradient if name == "g" else slot.policy.operand)
