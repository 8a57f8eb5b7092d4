# SPDX-License-Identifier: Apache-2.0
"""linear_forward_fp8 and linear_backward_fp8, and every public op as the dispatcher sees it."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch
from checks import assert_bits, assert_column_sum, assert_product, operand

import octavo


@pytest.mark.parametrize("lead", [(), (1,), (17,), (2, 3), (2, 1, 5)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_linear_forward(
    device: torch.device, fmt: str, dtype: torch.dtype, has_bias: bool, lead: tuple[int, ...]
) -> None:
    """x and w quantised with the given steps, their product, the bias; both amaxes are those of the tensors."""
    form = oracle.FORMATS[fmt]
    x = torch.randn(*lead, 33, device=device).to(dtype)
    w = torch.randn(17, 33, device=device).to(dtype)
    bias = torch.randn(17, device=device).to(dtype) if has_bias else None
    sx, sw = 0.0371, 0.011
    y, amax_x, amax_w = octavo.linear_forward_fp8(x, w, bias, sx, sw, fmt)
    qx = oracle.quantise(oracle.values(x).reshape(-1, 33), sx, form)
    want = oracle.product(qx, oracle.quantise(oracle.values(w), sw, form), (form, form), (sx, sw), bias, dtype)
    assert y.shape == (*lead, 17)
    assert_product(y.reshape(-1, 17), want, "fast")
    for amax, tensor in ((amax_x, x), (amax_w, w)):
        assert amax.shape == () and amax.dtype == torch.float32 and amax.item() == tensor.abs().max().item()


@pytest.mark.parametrize("masks", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fmt", "operand_fmt"), [("e5m2", None), ("e4m3", None), ("e5m2", "e5m2")])
def test_linear_backward(
    device: torch.device, fmt: str, operand_fmt: str | None, dtype: torch.dtype, masks: tuple[bool, bool, bool]
) -> None:
    """x and w are E4M3 unless told otherwise, dy is `fmt`; what is not asked for is None, amax_g always measured."""
    x = torch.randn(2, 9, 33, device=device).to(dtype)
    w = torch.randn(17, 33, device=device).to(dtype)
    dy = torch.randn(2, 9, 17, device=device).to(dtype)
    sg, sw, sx = 2e-4, 0.011, 0.0371
    more = {} if operand_fmt is None else {"operand_fmt": operand_fmt}
    dx, dw, db, amax_g = octavo.linear_backward_fp8(dy, x, w, masks, sg, sw, sx, fmt, **more)
    gradient, other = oracle.FORMATS[fmt], oracle.FORMATS[operand_fmt or "e4m3"]
    qg = oracle.quantise(oracle.values(dy).reshape(-1, 17), sg, gradient)
    qx = oracle.quantise(oracle.values(x).reshape(-1, 33), sx, other)
    qw = oracle.quantise(oracle.values(w), sw, other)
    assert (dx is None, dw is None, db is None) == tuple(not mask for mask in masks)
    assert amax_g.item() == dy.abs().max().item()
    if dx is not None:
        assert dx.shape == x.shape
        assert_product(
            dx.reshape(-1, 33), oracle.product(qg, qw.T, (gradient, other), (sg, sw), dtype=dtype), what="dx"
        )
    if dw is not None:
        assert_product(dw, oracle.product(qg.T, qx.T, (gradient, other), (sg, sx), dtype=dtype), what="dw")
    if db is not None:
        assert db.dtype == dtype and db.shape == (17,)
        assert_column_sum(db, dy)


def test_bias_gradient_is_not_quantised(device: torch.device) -> None:
    """db sums dy itself: steps so coarse that every quantised dy is zero leave db as it is."""
    x, w = torch.randn(40, 16, device=device).bfloat16(), torch.randn(24, 16, device=device).bfloat16()
    dy = torch.randn(40, 24, device=device).bfloat16()
    dx, _, db, _ = octavo.linear_backward_fp8(dy, x, w, (True, True, True), 1e9, 1.0, 1.0, "e5m2")
    assert (dx == 0).all()
    assert_column_sum(db, dy)


def test_bias_gradient_is_the_same_for_any_strides(device: torch.device) -> None:
    """db has one order of summation, whatever the strides of dy."""
    for rows in [1, 7, 33, 100, 1000]:
        x, w = torch.randn(rows, 16, device=device).bfloat16(), torch.randn(24, 16, device=device).bfloat16()
        dy = (torch.randn(rows, 24, device=device) * 100).bfloat16()
        masks, steps = (False, False, True), (1.0, 1.0, 1.0)
        plain = octavo.linear_backward_fp8(dy, x, w, masks, *steps, "e5m2")[2]
        turned = octavo.linear_backward_fp8(dy.t().contiguous().t(), x, w, masks, *steps, "e5m2")[2]
        assert_bits(turned, plain, f"{rows} rows")
        assert_column_sum(plain, dy)


@pytest.mark.parametrize("bad", [(True, True), (True, True, True, True), (True,)])
def test_masks_are_three(bad: tuple[bool, ...]) -> None:
    """(x, w, b), no more and no fewer."""
    x, w, dy = torch.randn(4, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(4, 5).bfloat16()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        octavo.linear_backward_fp8(dy, x, w, bad, 1.0, 1.0, 1.0, "e5m2")


# Dispatcher ---------------------------------------------------------------------------------------------------------

OPS = ["quantize", "mm_fp8", "linear_forward_fp8", "linear_backward_fp8"]


def op_arguments(name: str, device: torch.device) -> tuple:
    """Arguments of the op itself, which takes a format as its dtype."""
    one = torch.ones((), device=device)
    x, w = torch.randn(6, 33, device=device).bfloat16(), torch.randn(17, 33, device=device).bfloat16()
    a, b = operand(6, 33, "e4m3", device), operand(17, 33, "e4m3", device)
    match name:
        case "quantize":
            return (x.t(), one, torch.float8_e4m3fn)
        case "mm_fp8":
            return (a, b, one, one, None, torch.float16)
        case "linear_forward_fp8":
            return (x, w, torch.randn(17, device=device).bfloat16(), one, one, torch.float8_e4m3fn)
    dy = torch.randn(6, 17, device=device).bfloat16()
    return (dy, x, w, (True, True, True), one, one, one, torch.float8_e5m2)


@pytest.mark.parametrize("name", OPS)
def test_opcheck(device: torch.device, name: str) -> None:
    """The schema tells the truth, a fake tensor gives the same shapes and dtypes, autograd is registered properly.

    test_schema compares tensors with operations that torch does not have for float8, so it applies only to the ops
    without a float8 argument or result.
    """
    checks = ["test_faketensor", "test_autograd_registration"]
    if name.startswith("linear"):
        checks.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.octavo, name).default, op_arguments(name, device), test_utils=checks)


@pytest.mark.parametrize("name", OPS)
def test_python_names_are_the_ops(device: torch.device, name: str) -> None:
    """octavo.x, which takes a format by name or enum, and torch.ops.octavo.x, which takes a dtype: the same bits."""
    args = op_arguments(name, device)
    formats = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: octavo.FP8Format.E5M2}
    named = [formats.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
    ours, theirs = getattr(octavo, name)(*named), getattr(torch.ops.octavo, name)(*args)
    if isinstance(ours, torch.Tensor):
        ours, theirs = (ours,), (theirs,)
    for a, b in zip(ours, theirs, strict=True):
        assert_bits(a, b, name)
