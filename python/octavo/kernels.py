# SPDX-License-Identifier: Apache-2.0
"""The kernel interface: public functions over the ops of the same names in torch.ops.octavo, usable without a region.

Every scale is a quantisation *step*, a float or a one-element float32 tensor: x ~ q * scale (as torch._scaled_mm's;
TransformerEngine's are the reciprocal). A float or CPU scale that is not finite and positive raises; a scale on the GPU
is not read by the host, and an invalid one makes every byte NaN (0x7f).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.formats import FP8Format, parse_format

Scale = float | torch.Tensor

_DTYPES = {FP8Format.E4M3: torch.float8_e4m3fn, FP8Format.E5M2: torch.float8_e5m2}


def _dtype(fmt: FP8Format | str, argument: str = "fmt") -> torch.dtype:
    parsed = parse_format(fmt, argument)
    if parsed not in _DTYPES:
        raise ValueError(f"octavo: {argument} must be 'e4m3' or 'e5m2' here, not {fmt!r}")
    return _DTYPES[parsed]


def _scale(scale: Scale, argument: str) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        if scale.dtype != torch.float32:
            raise TypeError(f"octavo: {argument} must be a float or a one-element float32 tensor, not {scale.dtype}")
        return scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"octavo: {argument} must be a float or a one-element float32 tensor, not {scale!r}")
    # float64: made into float32 by the op, which keeps subnormals whatever torch.set_flush_denormal says.
    return torch.tensor(float(scale), dtype=torch.float64, device="cpu")


def quantize(x: torch.Tensor, scale: Scale, fmt: FP8Format | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts x / scale to FP8.

    Args:
        x: bf16, fp16 or float32, any shape and strides.
        scale: the step.
        fmt: "e4m3" or "e5m2".

    Returns:
        q (float8, x's shape, contiguous) and amax (0-d float32, the largest finite |x|).
    """
    return torch.ops.octavo.quantize(x, _scale(scale, "scale"), _dtype(fmt))


def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Scale,
    scale_b: Scale,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Scale | None = None,
    *,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """a[M, K] b[N, K]^T * scale_a * scale_b + bias[N], rounded once to out_dtype; any M, N, K.

    Args:
        a, b: float8_e4m3fn or float8_e5m2.
        bias: out_dtype's dtype; bf16, fp16 or float32 where the output is FP8.
        out_dtype: bfloat16, float16, float32, or float8_e4m3fn.
        out_scale: the output's step; with, and only with, float8_e4m3fn.
        fast_accumulation: Hopper's shorter accumulator.
    """
    return torch.ops.octavo.mm_fp8(
        a,
        b,
        _scale(scale_a, "scale_a"),
        _scale(scale_b, "scale_b"),
        bias,
        out_dtype,
        None if out_scale is None else _scale(out_scale, "out_scale"),
        fast_accumulation,
    )


def linear_forward_fp8(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, sx: Scale, sw: Scale, fmt: FP8Format | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y[..., N] = x[..., K] w[N, K]^T + bias[N] with both operands quantised to `fmt` with the steps sx and sw.

    Returns:
        y (x's dtype), amax_x, amax_w.
    """
    return torch.ops.octavo.linear_forward_fp8(x, w, bias, _scale(sx, "sx"), _scale(sw, "sw"), _dtype(fmt))


def linear_backward_fp8(
    g: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    masks: Sequence[bool],
    sg: Scale,
    sw: Scale,
    sx: Scale,
    fmt: FP8Format | str,
    operand_fmt: FP8Format | str = "e4m3",
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The gradients of that linear, for the gradient g[..., N] of its output.

    Args:
        masks: which of the gradients of (x, w, bias) are asked for.
        sg, sw, sx: the steps of g, w and x.
        fmt: the format of g; operand_fmt: that of x and w.

    Returns:
        grad_x, grad_w, grad_b (g's dtype; None where not asked for) and amax_g, which is always measured.
    """
    if not isinstance(masks, (tuple, list)) or len(masks) != 3 or not all(isinstance(m, (bool, int)) for m in masks):
        raise ValueError(f"octavo: masks must be three bools, for x, w and bias, not {masks!r}")
    return torch.ops.octavo.linear_backward_fp8(
        g,
        x,
        w,
        [bool(m) for m in masks],
        _scale(sg, "sg"),
        _scale(sw, "sw"),
        _scale(sx, "sx"),
        _dtype(fmt),
        _dtype(operand_fmt, "operand_fmt"),
    )
