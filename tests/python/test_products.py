# SPDX-License-Identifier: Apache-2.0
"""mm_fp8 and the two linear ops against float64 sums of the codes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import oracle
import pytest
import torch
from checks import accumulation_error, assert_bits, assert_product, bits, operand, ulp

import octavo

SIZES = [1, 2, 7, 8, 15, 17, 24, 33, 100]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")]


def ragged(count: int) -> list[tuple[int, int, int]]:
    """`count` of the 729 shapes, the same ones on every run, each size at least once in each place."""
    shuffled = random.Random(0)
    shapes = []
    while len(shapes) < count:
        shapes += zip(*(shuffled.sample(SIZES, len(SIZES)) for _ in range(3)), strict=True)
    return shapes[:count]


def code(t: torch.Tensor) -> np.ndarray:
    return t.cpu().view(torch.uint8).numpy()


def reference(a, b, pair, steps, bias=None, dtype=torch.bfloat16, out_scale=None) -> oracle.Product:
    formats = (oracle.FORMATS[pair[0]], oracle.FORMATS[pair[1]])
    return oracle.product(code(a), code(b), formats, steps, bias, dtype, out_scale)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("fast", [False, True])
def test_ragged_shapes(device: torch.device, pair: tuple[str, str], fast: bool) -> None:
    """Any M, N, K, every output dtype, with and without bias (N7), both accumulation modes."""
    kinds = itertools.cycle(itertools.product(OUT_DTYPES, [False, True]))
    for (m, n, k), (dtype, has_bias) in zip(ragged(90), kinds, strict=False):
        a, b = operand(m, k, pair[0], device), operand(n, k, pair[1], device)
        bias = torch.randn(n, device=device).to(dtype) if has_bias else None
        steps = (0.0371, 1.9e-3)
        y = octavo.mm_fp8(a, b, *steps, bias=bias, out_dtype=dtype, fast_accumulation=fast)
        want = reference(a, b, pair, steps, bias, dtype)
        assert_product(y, want, "fast" if fast else "accurate", f"{m}x{n}x{k} {dtype} bias={has_bias}")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_sums_that_are_exact_in_any_accumulator(device: torch.device, dtype: torch.dtype, fast: bool) -> None:
    """Small integers whose partial sums stay below 2^13 leave no accumulator anything to round: the bits are forced.

    |a|, |b| <= 2, so |partial sum| <= 4 K <= 4000 for K <= 1000. A wrong element, a padded byte that counts or a
    transposed operand cannot hide in the tolerance of the other tests. Scales are powers of two, the bias small.
    """
    for m, n, k in [(1, 1, 1), (2, 7, 15), (17, 33, 100), (33, 24, 1000), (100, 17, 129), (8, 8, 33)]:
        a = torch.randint(-2, 3, (m, k)).float()
        b = torch.randint(-2, 3, (n, k)).float()
        bias = torch.randint(-4, 5, (n,)).to(dtype)
        for first, second in PAIRS:
            qa = a.to(oracle.FORMATS[first].dtype).to(device)
            qb = b.to(oracle.FORMATS[second].dtype).to(device)
            y = octavo.mm_fp8(qa, qb, 0.5, 4.0, bias.to(device), out_dtype=dtype, fast_accumulation=fast)
            assert_bits(y, ((a @ b.T) * 2.0 + bias.float()).to(dtype), f"{m}x{n}x{k} {first} {second}")


@pytest.mark.parametrize("fast", [False, True])
def test_long_sums(device: torch.device, fast: bool) -> None:
    """K = 4096, where fast accumulation is furthest from float32; a CPU sums exactly."""
    a, b = operand(16, 4096, "e4m3", device), operand(24, 4096, "e4m3", device)
    y = octavo.mm_fp8(a, b, 1e-2, 1e-2, out_dtype=torch.float32, fast_accumulation=fast)
    assert_product(
        y, reference(a, b, ("e4m3", "e4m3"), (1e-2, 1e-2), dtype=torch.float32), "fast" if fast else "accurate"
    )


def test_the_sum_is_exact_before_it_is_rounded() -> None:
    """2^17 - 2^17 + 2^-18 and its like: float32 summation in any order loses the small term, float64 keeps it."""
    form = oracle.E4M3
    big, tiny = form.max, float(form.positive[1])
    a = torch.tensor([[big, tiny, big, tiny]]).to(form.dtype)
    b = torch.tensor([[big, tiny, -big, tiny]]).to(form.dtype)
    for order in itertools.permutations(range(4)):
        y = octavo.mm_fp8(a[:, list(order)], b[:, list(order)], 1.0, 1.0, out_dtype=torch.float32)
        assert y.item() == 2 * tiny * tiny


def test_the_order_of_the_scales() -> None:
    """float32(sum) * step a * step b, rounded after each: not sum * (step a * step b)."""
    a, b = operand(24, 33, "e4m3", torch.device("cpu")), operand(17, 33, "e4m3", torch.device("cpu"))
    steps = (0.0371, 1.9e-3)
    want = reference(a, b, ("e4m3", "e4m3"), steps, dtype=torch.float32)
    at_once = torch.from_numpy(want.exact.astype(np.float32))
    assert (bits(want.value) != bits(at_once)).any(), "these data cannot tell"
    assert_bits(octavo.mm_fp8(a, b, *steps, out_dtype=torch.float32), want.value)


def test_the_bias_is_added_before_the_rounding(device: torch.device) -> None:
    """257 + 2^-8 is 258 in bf16 where it is rounded once; 257 rounded first is 256 (a tie), and 256 + 2^-8 stays."""
    codes = torch.tensor([[16.0, 1.0]]).to(torch.float8_e4m3fn).to(device)
    bias = torch.tensor([2.0**-8], dtype=torch.bfloat16, device=device)
    y = octavo.mm_fp8(codes, codes, 1.0, 1.0, bias, out_dtype=torch.bfloat16)
    assert y.item() == 258.0


def test_scales_on_the_device_equal_numbers(device: torch.device) -> None:
    """A scale as a tensor is the same as a float, for the product and the ops on top of it."""
    a, b = operand(17, 33, "e4m3", device), operand(7, 33, "e4m3", device)
    sa, sb = torch.tensor(0.0371, device=device), torch.tensor([1.9e-3], device=device)
    assert_bits(octavo.mm_fp8(a, b, sa, sb), octavo.mm_fp8(a, b, 0.0371, 1.9e-3))


def test_default_output_is_bf16(device: torch.device) -> None:
    """out_dtype defaults to bf16, no bias, accurate accumulation."""
    a, b = operand(17, 33, "e4m3", device), operand(7, 33, "e4m3", device)
    y = octavo.mm_fp8(a, b, 1.0, 1.0)
    assert y.dtype == torch.bfloat16
    assert_bits(y, octavo.mm_fp8(a, b, 1.0, 1.0, None, torch.bfloat16, None, fast_accumulation=False))


@pytest.mark.parametrize("has_bias", [False, True])
def test_e4m3_output(device: torch.device, has_bias: bool) -> None:
    """quantise of the float32 result, bias included, with the step out_scale; a GPU may be one code off."""
    for m, n, k in ragged(18):
        a, b = operand(m, k, "e4m3", device), operand(n, k, "e4m3", device)
        bias = torch.randn(n, device=device).to(torch.bfloat16) if has_bias else None
        steps, out_scale = (1e-2, 1e-2), 0.05
        y = octavo.mm_fp8(a, b, *steps, bias, torch.float8_e4m3fn, out_scale)
        want = reference(a, b, ("e4m3", "e4m3"), steps, bias, torch.float8_e4m3fn, out_scale).value
        if device.type == "cpu":
            assert_bits(y, want, f"{m}x{n}x{k}")
        else:
            assert y.dtype == want.dtype
            ordered = [torch.where(bits(t) < 128, bits(t).int(), 128 - bits(t).int()) for t in (y, want)]
            assert (ordered[0] - ordered[1]).abs().max() <= 1


def test_e4m3_output_saturates(device: torch.device) -> None:
    """out_scale is a step: a small one saturates, a large one rounds to zero."""
    a = torch.full((3, 16), 448.0).to(torch.float8_e4m3fn).to(device)
    assert (octavo.mm_fp8(a, a, 1.0, 1.0, out_dtype=torch.float8_e4m3fn, out_scale=1.0).float() == 448).all()
    assert (octavo.mm_fp8(a, a, 1.0, 1.0, out_dtype=torch.float8_e4m3fn, out_scale=1e12).float() == 0).all()


def test_e4m3_output_needs_out_scale(device: torch.device) -> None:
    """Without a step there is no meaning to the bytes."""
    a = operand(16, 16, "e4m3", device)
    with pytest.raises((RuntimeError, ValueError, TypeError), match="out_scale"):
        octavo.mm_fp8(a, a, 1.0, 1.0, out_dtype=torch.float8_e4m3fn)


def test_wrong_operands_raise(device: torch.device) -> None:
    """Mismatched K, other ranks, operands that are not FP8, outputs that are not offered, a bias of another length."""
    a = operand(4, 16, "e4m3", device)
    errors = (RuntimeError, ValueError, TypeError)
    for x, y in [
        (a, operand(4, 17, "e4m3", device)),
        (a, a[0]),
        (a.float(), a),
        (a, a.unsqueeze(0)),
        (a, a.bfloat16()),
    ]:
        with pytest.raises(errors):
            octavo.mm_fp8(x, y, 1.0, 1.0)
    with pytest.raises(errors):
        octavo.mm_fp8(a, a, 1.0, 1.0, out_dtype=torch.int32)
    with pytest.raises(errors):
        octavo.mm_fp8(a, a, 1.0, 1.0, bias=torch.zeros(5, device=device, dtype=torch.bfloat16))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 7, 16), (7, 0, 16), (7, 5, 0), (0, 0, 0)])
def test_empty_products(device: torch.device, m: int, n: int, k: int) -> None:
    """Right shapes; without K the result is the bias."""
    a, b = operand(m, k, "e4m3", device), operand(n, k, "e4m3", device)
    bias = torch.randn(n, device=device).bfloat16()
    assert_bits(octavo.mm_fp8(a, b, 1.0, 1.0), torch.zeros(m, n, dtype=torch.bfloat16))
    assert_bits(octavo.mm_fp8(a, b, 1.0, 1.0, bias), bias.expand(m, n) if k == 0 else bias.new_zeros(m, n))


@pytest.mark.parametrize("view", ["transposed", "sliced", "offset"])
def test_strided_operands(device: torch.device, view: str) -> None:
    """Operands of any strides equal their contiguous copies, bit for bit."""

    def seen(t: torch.Tensor) -> torch.Tensor:
        raw = t.view(torch.uint8)
        if view == "transposed":
            return raw.t().contiguous().t().view(t.dtype)
        if view == "sliced":
            return raw.repeat_interleave(2, dim=1)[:, ::2].view(t.dtype)
        return torch.cat([raw.new_full((1,), 0x7F), raw.flatten()])[1:].view(t.shape).view(t.dtype)

    for m, n, k in ragged(18):
        a, b = operand(m, k, "e5m2", device), operand(n, k, "e4m3", device)
        assert_bits(octavo.mm_fp8(seen(a), seen(b), 0.5, 0.1), octavo.mm_fp8(a, b, 0.5, 0.1), f"{m}x{n}x{k}")


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_against_scaled_mm(device: torch.device, dtype: torch.dtype) -> None:
    """torch._scaled_mm on the same bytes. Both sides round the output (half an ulp each, so one ulp together); theirs
    sums in float32 on a CPU (at most K roundings of 2^-24, ours none) and by the same unit on a GPU (c twice)."""
    m, n, k = 32, 48, 64
    a, b = operand(m, k, "e4m3", device), operand(n, k, "e4m3", device)
    sa, sb = torch.tensor(0.0371, device=device), torch.tensor(1.9e-3, device=device)
    try:
        theirs = torch._scaled_mm(a, b.t(), sa, sb, out_dtype=dtype)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch._scaled_mm does not run here: {error}")
    ours = octavo.mm_fp8(a, b, sa, sb, out_dtype=dtype)
    want = reference(a, b, ("e4m3", "e4m3"), (0.0371, 1.9e-3), dtype=dtype)
    c = (k + 4) * 2.0**-24 if device.type == "cpu" else 2 * accumulation_error(k, "accurate")
    reach = np.abs(want.exact) + c * want.magnitude
    bound = c * want.magnitude + ulp(reach, dtype)
    assert (np.abs(ours.cpu().double().numpy() - theirs.cpu().double().numpy()) <= bound).all()


def test_emulated_product_on_a_gpu(cuda: torch.device) -> None:
    """The product forced onto 16-bit tensor cores, from the same bytes, obeys the same meaning."""
    before = octavo.emulated()
    octavo.emulate(True)
    try:
        assert octavo.emulated()
        for pair in PAIRS:
            for m, n, k in ragged(18):
                a, b = operand(m, k, pair[0], cuda), operand(n, k, pair[1], cuda)
                want = reference(a, b, pair, (0.0371, 1.9e-3), dtype=torch.float32)
                y = octavo.mm_fp8(a, b, 0.0371, 1.9e-3, out_dtype=torch.float32)
                assert_product(y, want, "accurate", f"{m}x{n}x{k} {pair}")
    finally:
        octavo.emulate(before)


def test_scales_that_lie_anywhere(device: torch.device) -> None:
    """Steps that are slices of one tensor, at every offset: cuBLASLt alone would want them 16-byte aligned."""
    a, b = operand(32, 48, "e4m3", device), operand(16, 48, "e4m3", device)
    steps = torch.tensor([0.25, 0.5, 2.0, 0.125, 4.0], device=device)
    for i, j in itertools.permutations(range(5), 2):
        y = octavo.mm_fp8(a, b, steps[i], steps[j])
        assert_bits(y, octavo.mm_fp8(a, b, steps[i].item(), steps[j].item()))
