# SPDX-License-Identifier: Apache-2.0
"""quantize for any shape and strides: the bytes of the contiguous copy, and torch's own maximum."""

from __future__ import annotations

import pytest
import torch
from checks import assert_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of 1 to 3 dimensions seen through up to four of transpose, slice, narrow, expand and unsqueeze."""
    shape = draw(st.lists(st.one_of(st.integers(0, 6), st.integers(0, 70)), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    t = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 1e4]))
    t = t.to(draw(st.sampled_from(DTYPES)))
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, t.dim() - 1))
        match draw(st.sampled_from(["transpose", "slice", "narrow", "expand", "unsqueeze", "select"])):
            case "transpose":
                t = t.transpose(dim, draw(st.integers(0, t.dim() - 1)))
            case "slice":
                t = t[(slice(None),) * dim + (slice(draw(st.integers(0, 3)), None, draw(st.integers(1, 4))),)]
            case "narrow" if t.shape[dim] > 0:
                start = draw(st.integers(0, t.shape[dim] - 1))
                t = t.narrow(dim, start, draw(st.integers(0, t.shape[dim] - start)))
            case "expand" if t.shape[dim] == 1:
                t = t.expand(*t.shape[:dim], draw(st.integers(0, 9)), *t.shape[dim + 1 :])
            case "unsqueeze" if t.dim() < 4:
                t = t.unsqueeze(dim)
            case "select" if t.shape[dim] > 0:
                t = t.select(dim, draw(st.integers(0, t.shape[dim] - 1)))
                if t.dim() == 0:
                    return t
    return t


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max().float() if x.numel() else torch.zeros((), device=x.device)


def check(x: torch.Tensor, fmt: str) -> None:
    q, amax = octavo.quantize(x, 0.0371, fmt)
    copy, copy_amax = octavo.quantize(x.contiguous(), 0.0371, fmt)
    assert q.is_contiguous() and q.shape == x.shape
    assert_bits(q, copy, f"strides {x.stride()}")
    assert_bits(amax, copy_amax, "amax of the copy")
    assert_bits(amax, largest(x), "amax")


@given(x=views(), fmt=st.sampled_from(["e4m3", "e5m2"]))
@settings(max_examples=300)
def test_any_strides_equal_the_contiguous_copy(device: torch.device, x: torch.Tensor, fmt: str) -> None:
    """Bytes and amax do not depend on how a tensor lies in memory."""
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    check(flat.to(device).as_strided(x.shape, x.stride(), x.storage_offset()), fmt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 100003), (4097, 33), (33, 4097), (2, 3, 1000, 17), (1024, 1024), (5, 1, 7, 1, 9)]
)
def test_large_and_odd_shapes(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sizes that no tile divides, read straight, transposed, from an offset, and with a step."""
    x = torch.randn(shape, device=device).to(dtype)
    check(x, "e4m3")
    check(x.transpose(-1, -2), "e5m2")
    check(x[..., 1:, 1:], "e4m3")
    check(x[..., ::3], "e4m3")
    check(x.flatten()[1:], "e4m3")
    check(x.unsqueeze(0).expand(3, *shape), "e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
def test_overlapping_windows(device: torch.device, dtype: torch.dtype) -> None:
    """as_strided and unfold give views in which elements share memory."""
    x = torch.randn(500, device=device).to(dtype)
    check(x.unfold(0, 16, 3), "e4m3")
    check(x.as_strided((20, 30), (1, 5), 7), "e4m3")


def test_amax_is_torchs_for_every_length(device: torch.device) -> None:
    """N6: every length 1 to 4097, the largest element anywhere, as negative as positive."""
    for dtype in DTYPES:
        data = torch.randn(4097 + 4097, device=device).to(dtype)
        ours, theirs = [], []
        for length in range(1, 4098):
            x = data[length : 2 * length]  # another offset and alignment each time
            ours.append(octavo.quantize(x, 1.0, "e4m3")[1])
            theirs.append(x.abs().max().float())
        assert_bits(torch.stack(ours), torch.stack(theirs), f"{dtype}")


def test_amax_finds_the_largest_wherever_it_is(device: torch.device) -> None:
    """One element larger than the rest at every position of lengths around the tile and vector sizes."""
    for length in [1, 7, 8, 15, 16, 17, 31, 33, 127, 129, 257]:
        x = torch.full((length,), 0.5, dtype=torch.bfloat16, device=device)
        found = []
        for position in range(length):
            y = x.clone()
            y[position] = -3.0
            found.append(octavo.quantize(y, 1.0, "e5m2")[1])
        assert torch.stack(found).eq(3.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_of_zeros_and_subnormals(device: torch.device, dtype: torch.dtype) -> None:
    """-0 has amax +0; subnormals are values; nothing at all has amax 0; only finite elements count."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal
    for length in [1, 2, 8, 17, 100]:
        zeros = torch.full((length,), -0.0, dtype=dtype, device=device)
        assert_bits(octavo.quantize(zeros, 1.0, "e4m3")[1], torch.zeros(()))
        small = zeros.clone()
        small[-1] = -tiny
        assert small[-1] != 0
        assert_bits(octavo.quantize(small, 1.0, "e4m3")[1], torch.tensor(tiny, dtype=torch.float32))
        wild = small.clone()
        wild[0] = float("inf")
        want = torch.tensor(tiny if length > 1 else 0.0)
        assert_bits(octavo.quantize(wild, 1.0, "e4m3")[1], want, "inf")
        wild[0] = float("nan")
        assert_bits(octavo.quantize(wild, 1.0, "e4m3")[1], want, "nan")
    empty = octavo.quantize(torch.empty(0, 3, dtype=dtype, device=device), 1.0, "e4m3")
    assert empty[0].shape == (0, 3) and empty[1].item() == 0
