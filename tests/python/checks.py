# SPDX-License-Identifier: Apache-2.0
"""Comparisons the tests share: bits, products within a derived bound, and the state of a linear."""

from __future__ import annotations

import math

import numpy as np
import oracle
import torch

import octavo

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers on the CPU; NaNs and signed zeros become comparable."""
    return t.detach().cpu().contiguous().view(_BITS[t.element_size()])


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same dtype, shape and bits, with the first mismatch in the message."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    a, b = bits(actual), bits(expected)
    if torch.equal(a, b):
        return
    wrong = (a != b).nonzero()
    where = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{what}: {len(wrong)} of {a.numel()} differ, first at {where}: "
        f"{actual.detach().cpu()[where].float().item()!r} (bits {a[where].item():#x}), expected "
        f"{expected.detach().cpu()[where].float().item()!r} (bits {b[where].item():#x})"
    )


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not torch.equal(bits(a), bits(b))


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(bits(a), bits(b)))


def ulp(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Distance between neighbouring numbers of dtype around a value."""
    info = torch.finfo(dtype)
    magnitude = np.maximum(np.abs(value), info.tiny)
    return info.eps * np.exp2(np.floor(np.log2(magnitude)))


def accumulation_error(k: int, mode: str) -> float:
    """c in |y - y64| <= c * sum |a||b| * scales for a GPU product.

    Hopper's FP8 tensor core takes 32 products an instruction and adds them to an accumulator by aligning all 33 terms
    to the largest exponent and cutting what lies 13 bits below it. Each of the 33 terms loses less than 2^-13 of the
    largest, and no term is larger than S = sum |a||b| over what was added so far.
    - "fast" never leaves that accumulator: ceil(K / 32) instructions, c = ceil(K / 32) * 33 * 2^-13.
    - "accurate" moves the partial sum into a float32 register after at most 128 products, so each chunk's S counts its
      own four instructions only and chunks add up to S: c = 4 * 33 * 2^-13, plus a float32 rounding (2^-24) per chunk.
    Two more float32 roundings come from the scales and one from the conversion of the sum.
    """
    unit = 2.0**-13
    instructions = max(1, math.ceil(k / 32))
    if mode == "fast":
        return instructions * 33 * unit + 3 * 2.0**-24
    return min(instructions, 4) * 33 * unit + (math.ceil(k / 128) + 3) * 2.0**-24


def plain(t: torch.Tensor) -> torch.Tensor:
    """A sum's zero has no defined sign and its NaN no defined payload: +0 and one NaN for all. Codes stay."""
    if t.element_size() == 1:
        return t
    t = t.detach().cpu()
    return torch.where(t.isnan(), torch.nan, torch.where(t == 0, 0.0, t)).to(t.dtype)


def assert_product(actual: torch.Tensor, expected: oracle.Product, mode: str = "accurate", what: str = "") -> None:
    """Bit-equal on a CPU; on a GPU within c * sum |a||b| * scales plus half an ulp of the output.

    The output's float32 value is rounded before it is rounded again to the result's dtype, and a bias is added with one
    more float32 rounding: 2^-24 of the value twice. Where the bound reaches past the largest number, Inf is right too.
    """
    if actual.device.type == "cpu":
        assert_bits(plain(actual), plain(expected.value), what)
        return
    assert actual.dtype == expected.value.dtype and actual.shape == expected.value.shape, what
    got = actual.detach().cpu().double().numpy().reshape(expected.exact.shape)
    slack = accumulation_error(expected.k, mode) * expected.magnitude
    reach = np.abs(expected.exact) + slack
    bound = slack + 0.5 * ulp(reach, actual.dtype) + 2 * 2.0**-24 * reach
    overflowed = (
        np.isinf(got) & (np.sign(got) == np.sign(expected.exact)) & (reach + bound > torch.finfo(actual.dtype).max)
    )
    got = np.where(overflowed, expected.exact, got)
    worst = np.abs(got - expected.exact) - bound
    assert (worst <= 0).all(), f"{what}: off by {np.abs(got - expected.exact).max()}, {worst.max()} over the bound"


def assert_column_sum(actual: torch.Tensor, dy: torch.Tensor, what: str = "db") -> None:
    """The bias gradient against float64: |delta| <= 2^-20 * sum |dy| plus an ulp of the output, the contract's own."""
    columns = dy.detach().cpu().double().reshape(-1, dy.shape[-1])
    exact, size = columns.sum(0).numpy(), columns.abs().sum(0).numpy()
    bound = 2.0**-20 * size + ulp(exact, actual.dtype)
    error = np.abs(actual.detach().cpu().double().numpy() - exact)
    assert (error <= bound).all(), f"{what}: off by {error.max()}"


# Data ---------------------------------------------------------------------------------------------------------------


def operand(rows: int, columns: int, fmt: str, device: torch.device) -> torch.Tensor:
    """Random finite codes that look like a quantised tensor: the largest is at the maximum."""
    x = torch.randn(rows, columns)
    form = oracle.FORMATS[fmt]
    code = oracle.quantise(x.numpy(), oracle.step_from_amax(oracle.amax(x.numpy()), form), form)
    return torch.from_numpy(code).view(form.dtype).to(device)


# State --------------------------------------------------------------------------------------------------------------

_SLOTS = ("x", "w", "g")


def meta(weight: torch.Tensor) -> octavo.FP8TensorMeta | None:
    return octavo.fp8_state().get_weight_meta(weight)


def snapshot(weight: torch.Tensor) -> dict[str, torch.Tensor | bool] | None:
    """A copy of everything the state of one linear shows; None where it has none."""
    state = meta(weight)
    if state is None:
        return None
    copy: dict[str, torch.Tensor | bool] = {}
    for slot in _SLOTS:
        copy[f"{slot}_init"] = bool(getattr(state, f"{slot}_init"))
        for name in ("hist", "scale", "pending"):
            copy[f"{slot}_{name}"] = torch.as_tensor(getattr(state, f"{slot}_{name}")).detach().cpu().clone()
    return copy


def empty(state: dict | None) -> bool:
    """No state, or one in which nothing was ever recorded: they mean the same."""
    return state is None or not any(state[f"{slot}_init"] or state[f"{slot}_pending"] for slot in _SLOTS)


def assert_same_state(actual: dict | None, expected: dict | None) -> None:
    if empty(expected):
        assert empty(actual), "something was recorded"
        return
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_bits(actual[key], value, key)
        else:
            assert actual[key] == value, key


def assert_untouched(weight: torch.Tensor) -> None:
    """Nothing was ever recorded for this weight."""
    state = snapshot(weight)
    if state is None:
        return
    for slot in _SLOTS:
        assert not state[f"{slot}_init"], f"{slot} has a history"
        assert state[f"{slot}_pending"].item() == 0, f"{slot} has something pending"


def assert_state(weight: torch.Tensor, expected: oracle.Linear) -> None:
    """Ring, scale, pending amax and seeded flag of w, x and g equal the oracle's, bit for bit."""
    state = snapshot(weight)
    assert state is not None, "no state"
    for name, slot in expected.slots.items():
        assert state[f"{name}_init"] == bool(slot.ring), f"{name}_init"
        assert state[f"{name}_pending"].item() == float(slot.pending), f"{name}_pending"
        if slot.ring:
            ring = torch.tensor([float(a) for a in slot.ring], dtype=torch.float32)
            assert_bits(state[f"{name}_hist"], ring, f"{name}_hist")
            scale = torch.tensor(float(slot.scale), dtype=torch.float32)
            assert_bits(state[f"{name}_scale"].reshape(()), scale, f"{name}_scale")
