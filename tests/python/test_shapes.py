# SPDX-License-Identifier: Apache-2.0
"""Any shape, any strides: S1 to S7 of the cases from public trackers."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_product, assert_same_state, assert_untouched, snapshot
from runs import both, linear, run_beside_oracle

import octavo

BF16 = torch.bfloat16
DIMS = [1, 2, 7, 8, 15, 17, 24, 33, 100, 1000, 4092]
MASKS = (True, True, True)


def sampled(budget: int, count: int) -> list[tuple[int, int, int]]:
    """`count` shapes with M N K within the budget, the same on every run; every dim stands in every place."""
    shuffled, shapes = random.Random(1), []
    for place in range(3):
        for dim in DIMS:
            while True:
                shape = [shuffled.choice(DIMS) for _ in range(3)]
                shape[place] = dim
                if shape[0] * shape[1] * shape[2] <= budget:
                    shapes.append(tuple(shape))
                    break
    while len(shapes) < count:
        shape = tuple(shuffled.choice(DIMS) for _ in range(3))
        if shape[0] * shape[1] * shape[2] <= budget:
            shapes.append(shape)
    return shapes


def padded(t: torch.Tensor, multiple: int = 16) -> torch.Tensor:
    """Zeros up to a multiple in both dimensions."""
    rows, columns = (-size % multiple for size in t.shape)
    return F.pad(t, (0, columns, 0, rows))


def test_s1_forward_and_backward_equal_the_zero_padded_computation(device: torch.device) -> None:
    """Every op runs on every shape, in both directions, and equals the same op on operands padded to sixteens: values,
    gradients and amaxes, bit for bit (S1, S2, S3)."""
    steps = (0.0371, 0.0271, 2e-4)
    for m, n, k in sampled(3 * 10**7, 90):
        what = f"{m}x{n}x{k}"
        x, w, dy = (torch.randn(*shape, device=device).to(BF16) for shape in ((m, k), (n, k), (m, n)))
        b = torch.randn(n, device=device).to(BF16)
        sx, sw, sg = steps
        y, *amaxes = octavo.linear_forward_fp8(x, w, b, sx, sw, "e4m3")
        px, pw, pdy, pb = padded(x), padded(w), padded(dy), F.pad(b, (0, -n % 16))
        py, *padded_amaxes = octavo.linear_forward_fp8(px, pw, pb, sx, sw, "e4m3")
        assert_bits(y, py[:m, :n], f"{what} y")
        dx, dw, db, amax = octavo.linear_backward_fp8(dy, x, w, MASKS, sg, sw, sx, "e5m2")
        pdx, pdw, pdb, padded_amax = octavo.linear_backward_fp8(pdy, px, pw, MASKS, sg, sw, sx, "e5m2")
        assert_bits(dx, pdx[:m, :k], f"{what} dx")
        assert_bits(dw, pdw[:n, :k], f"{what} dw")
        assert_bits(db, pdb[:n], f"{what} db")
        for own, other in zip([*amaxes, amax], [*padded_amaxes, padded_amax], strict=True):
            assert_bits(own, other, f"{what} amax")


def test_s1_small_shapes_equal_the_oracle(device: torch.device) -> None:
    """The padded computation could be wrong too: the same ops against float64 sums."""
    e4m3, e5m2 = oracle.E4M3, oracle.E5M2
    sx, sw, sg = 0.0371, 0.0271, 2e-4
    for m, n, k in sampled(2 * 10**6, 60):
        what = f"{m}x{n}x{k}"
        x, w, dy = (torch.randn(*shape, device=device).to(BF16) for shape in ((m, k), (n, k), (m, n)))
        qx, qw = oracle.quantise(oracle.values(x), sx, e4m3), oracle.quantise(oracle.values(w), sw, e4m3)
        qg = oracle.quantise(oracle.values(dy), sg, e5m2)
        y, *_ = octavo.linear_forward_fp8(x, w, None, sx, sw, "e4m3")
        assert_product(y, oracle.product(qx, qw, (e4m3, e4m3), (sx, sw)), "fast", f"{what} y")
        dx, dw, _, _ = octavo.linear_backward_fp8(dy, x, w, MASKS, sg, sw, sx, "e5m2")
        assert_product(dx, oracle.product(qg, qw.T, (e5m2, e4m3), (sg, sw)), what=f"{what} dx")
        assert_product(dw, oracle.product(qg.T, qx.T, (e5m2, e4m3), (sg, sx)), what=f"{what} dw")


def test_s1_layers_of_any_shape_train(device: torch.device) -> None:
    """The same through the region: two steps beside the oracle, state included, and all of it counted as FP8."""
    for m, n, k in sampled(10**5, 40):
        octavo.report(reset=True)
        recipe, policy = both(history_len=4)
        xs = [torch.randn(m, k, device=device, dtype=BF16) * size for size in (1.0, 3.0)]
        run_beside_oracle(linear(k, n, BF16, device), xs, recipe, policy)
        report = octavo.report()
        assert report.fp8_calls == 2 and report.other_calls == 0, f"{m}x{n}x{k}: {report}"


def test_s3_padding_leaves_the_state_alone(device: torch.device) -> None:
    """A layer of ragged sizes and the same layer embedded in zeros: the same amaxes, rings and scales."""
    small, large = linear(17, 33, BF16, device), linear(32, 48, BF16, device)
    with torch.no_grad():
        large.weight.zero_()[:33, :17] = small.weight
        large.bias.zero_()[:33] = small.bias
    states = []
    x, dy = torch.randn(7, 17, device=device, dtype=BF16), torch.randn(7, 33, device=device, dtype=BF16)
    for layer, data, gradient in (
        (small, x, dy),
        (large, F.pad(x, (0, 15)), F.pad(dy, (0, 15))),
    ):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for _ in range(2):
            data = data.detach().requires_grad_()
            with octavo.fp8_autocast():
                y = layer(data)
            y.backward(gradient)
            optimizer.step()
        states.append((snapshot(layer.weight), y[:, :33], data.grad[:, :17], layer.weight.grad[:33, :17]))
    assert_same_state(states[1][0], states[0][0])
    for a, b in zip(states[1][1:], states[0][1:], strict=True):
        assert_bits(a, b)


def test_s3_padding_rows_do_not_count(device: torch.device) -> None:
    """More rows of zeros (a padded batch) change no amax, no scale and no bit of the rest."""
    layer = linear(33, 17, BF16, device)
    x, dy = torch.randn(5, 33, device=device, dtype=BF16), torch.randn(5, 17, device=device, dtype=BF16)
    results = []
    for extra in (0, 3, 11):
        octavo.fp8_state().reset()
        data = F.pad(x, (0, 0, 0, extra)).requires_grad_()
        with octavo.fp8_autocast():
            y = layer(data)
        dx, dw = torch.autograd.grad(y, (data, layer.weight), F.pad(dy, (0, 0, 0, extra)))
        results.append((y[:5], dx[:5], dw, snapshot(layer.weight)))
    for other in results[1:]:
        for a, b in zip(other[:3], results[0][:3], strict=True):
            assert_bits(a, b)
        assert_same_state(other[3], results[0][3])


# Empty tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("lead", "n", "k"),
    [((0,), 7, 5), ((2, 0), 7, 5), ((0, 3), 7, 5), ((4,), 0, 5), ((4,), 7, 0), ((2, 3), 7, 0), ((0,), 0, 0)],
)
@pytest.mark.parametrize("kind", ["delayed", "dynamic"])
def test_s4_empty(device: torch.device, kind: str, lead: tuple[int, ...], n: int, k: int, bias: bool) -> None:
    """y is the bias, db the column sum, everything else empty or zero, and nothing is recorded."""
    x = torch.randn(*lead, k, device=device, dtype=BF16, requires_grad=True)
    w = torch.nn.Parameter(torch.randn(n, k, device=device, dtype=BF16))
    b = torch.nn.Parameter(torch.randn(n, device=device, dtype=BF16)) if bias else None
    recipe, _ = both(kind)
    with octavo.fp8_autocast(recipe=recipe):
        y = F.linear(x, w, b)
    expected = (b if bias else torch.zeros(n, dtype=BF16, device=device)).detach().expand(*lead, n)
    assert_bits(y, expected, "y")
    dy = torch.randn(*lead, n, device=device, dtype=BF16)
    y.backward(dy)
    assert_bits(x.grad, torch.zeros(*lead, k, dtype=BF16), "dx")
    assert_bits(w.grad, torch.zeros(n, k, dtype=BF16), "dw")
    if bias:
        assert_bits(b.grad, dy.reshape(-1, n).double().sum(0).to(BF16) if n else torch.zeros(0, dtype=BF16), "db")
    octavo.step()
    assert_untouched(w)


def test_s4_an_empty_shard_leaves_an_old_state_alone(device: torch.device) -> None:
    """An empty batch in the middle of training changes nothing, bit for bit."""
    layer = linear(24, 16, BF16, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for rows in (5, 0, 7):
        before = snapshot(layer.weight)
        with octavo.fp8_autocast():
            y = layer(torch.randn(rows, 24, device=device, dtype=BF16))
        y.sum().backward()
        if rows == 0:
            assert_same_state(snapshot(layer.weight), before)
        optimizer.step()
        if rows == 0:
            assert_same_state(snapshot(layer.weight), before)


def test_s4_kernel_ops(device: torch.device) -> None:
    """The ops themselves: shapes, amaxes of zero, None for what is not asked for."""
    for m, n, k in [(0, 7, 5), (4, 0, 5), (4, 7, 0), (0, 0, 0)]:
        x, w, dy = (torch.randn(*shape, device=device).to(BF16) for shape in ((m, k), (n, k), (m, n)))
        y, amax_x, amax_w = octavo.linear_forward_fp8(x, w, None, 1.0, 1.0, "e4m3")
        assert_bits(y, torch.zeros(m, n, dtype=BF16))
        assert amax_x.item() == (x.abs().max().item() if x.numel() else 0)
        assert amax_w.item() == (w.abs().max().item() if w.numel() else 0)
        dx, dw, db, amax_g = octavo.linear_backward_fp8(dy, x, w, MASKS, 1.0, 1.0, 1.0, "e5m2")
        assert_bits(dx, torch.zeros(m, k, dtype=BF16))
        assert_bits(dw, torch.zeros(n, k, dtype=BF16))
        assert_bits(db, dy.double().sum(0).to(BF16))
        assert amax_g.item() == (dy.abs().max().item() if dy.numel() else 0)


# Strides --------------------------------------------------------------------------------------------------------------


def offset(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.new_full((3,), 1e4), t.flatten()])[3:].view(t.shape)


def spread(t: torch.Tensor) -> torch.Tensor:
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), 1e4)
    wide[..., 1::2] = t
    return wide[..., 1::2]


VIEWS = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda t: torch.cat([t, t * 100], dim=-1)[..., : t.shape[-1]],
    "offset": offset,
    "spread": spread,
    "rows apart": lambda t: torch.stack([t, t * 100], dim=1)[:, 0],
}
SHAPE_SETS = [((7, 24), (17, 24)), ((3, 5, 33), (16, 33)), ((16, 32), (48, 32))]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("which", ["x", "w", "dy", "all"])
@pytest.mark.parametrize("shapes", SHAPE_SETS, ids=str)
def test_s5_strides(device: torch.device, shapes: tuple, which: str, view: str) -> None:
    """x, w and dy of any strides equal their contiguous copies: outputs, gradients and state."""
    x_shape, w_shape = shapes
    x, w = torch.randn(x_shape, device=device, dtype=BF16), torch.randn(w_shape, device=device, dtype=BF16)
    b = torch.randn(w_shape[0], device=device, dtype=BF16)
    dy = torch.randn(*x_shape[:-1], w_shape[0], device=device, dtype=BF16)

    def run(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple:
        x, w = x.detach().requires_grad_(), torch.nn.Parameter(w)
        bias = torch.nn.Parameter(b.clone())
        with octavo.fp8_autocast():
            y = F.linear(x, w, bias)
        y.backward(dy)
        return y, x.grad, w.grad, bias.grad, snapshot(w)

    plain = run(x, w, dy)
    strided = {name: VIEWS[view](t) if which in (name, "all") else t for name, t in (("x", x), ("w", w), ("dy", dy))}
    for name, t in strided.items():
        assert_bits(t, {"x": x, "w": w, "dy": dy}[name], "the view is wrong")
    result = run(**strided)
    for name, a, e in zip(("y", "dx", "dw", "db"), result[:4], plain[:4], strict=True):
        assert_bits(a, e, name)
    assert_same_state(result[4], plain[4])


def test_s5_expanded_operands(device: torch.device) -> None:
    """Operands with stride 0 equal their contiguous copies."""
    w = torch.nn.Parameter(torch.randn(16, 24, device=device, dtype=BF16))
    for x in (
        torch.randn(1, 24, device=device, dtype=BF16).expand(7, 24),
        torch.randn(7, 1, device=device, dtype=BF16).expand(7, 24),
        torch.randn(1, 3, 24, device=device, dtype=BF16).expand(5, 3, 24),
        torch.randn((), device=device, dtype=BF16).expand(7, 24),
    ):
        dy = torch.randn(16, device=device, dtype=BF16).expand(*x.shape[:-1], 16)
        results = []
        for a, g in ((x, dy), (x.contiguous(), dy.contiguous())):
            a = a.detach().requires_grad_()
            with octavo.fp8_autocast(recipe=octavo.DynamicScaling()):
                y = F.linear(a, w)
            results.append((y, *torch.autograd.grad(y, (a, w), g)))
        for got, want in zip(*results, strict=True):
            assert_bits(got, want)


def test_s5_a_weight_that_is_a_view(device: torch.device) -> None:
    """A slice of a fused weight: the result of its copy, and the gradient lands in the slice."""
    fused = torch.nn.Parameter(torch.randn(48, 24, device=device, dtype=BF16))
    x = torch.randn(7, 24, device=device, dtype=BF16)
    copy = torch.nn.Parameter(fused.detach()[16:32].clone())
    with octavo.fp8_autocast():
        y, expected = F.linear(x, fused[16:32]), F.linear(x, copy)
    assert_bits(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    assert_bits(fused.grad[16:32], copy.grad)
    assert (fused.grad[:16] == 0).all() and (fused.grad[32:] == 0).all()


def test_s6_sum_backward(device: torch.device) -> None:
    """y.sum().backward() hands over a gradient of stride 0; it equals backward(ones), bit for bit."""
    for shape in ((24,), (7, 24), (2, 3, 24)):
        layer = linear(24, 17, BF16, device)
        results = []
        for how in ("sum", "ones"):
            octavo.fp8_state().reset()
            layer.zero_grad()
            x = torch.ones(shape, device=device, dtype=BF16).mul_(0.37).requires_grad_()
            with octavo.fp8_autocast():
                y = layer(x)
            y.sum().backward() if how == "sum" else y.backward(torch.ones_like(y))
            results.append((x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
        for a, b in zip(*results, strict=True):
            assert_bits(a, b)


# Errors ---------------------------------------------------------------------------------------------------------------


def wrong_calls() -> dict[str, tuple]:
    x, w, b = torch.randn(5, 24).to(BF16), torch.randn(16, 24).to(BF16), torch.randn(16).to(BF16)
    return {
        "mismatched K": (x[:, :23], w, b),
        "integer input": (x.int(), w, b),
        "integer both": (x.int(), w.int(), None),
        "mixed dtypes": (x, w.half(), None),
        "fp32 weight": (x, w.float(), None),
        "bias of another length": (x, w, b[:15]),
        "3-D weight": (x, w.unsqueeze(0), None),
        "0-d input": (x[0, 0], w, None),
        "1-D weight of another length": (x, w[0, :23], None),
        "complex input": (x.to(torch.complex64), w, None),
    }


@pytest.mark.parametrize("name", wrong_calls())
def test_s7_errors_are_those_of_linear(device: torch.device, name: str) -> None:
    """What F.linear refuses is refused with the same type inside a region; what it takes gives the same bits."""
    arguments = [None if t is None else t.to(device) for t in wrong_calls()[name]]
    try:
        outside = F.linear(*arguments)
    except Exception as error:
        outside = error
    with octavo.fp8_autocast():
        if isinstance(outside, Exception):
            with pytest.raises(type(outside)):
                F.linear(*arguments)
        else:
            assert_bits(F.linear(*arguments), outside)


@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 3, 4), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_s7_shape_and_dtype_are_those_of_linear(
    device: torch.device, dtype: torch.dtype, lead: tuple[int, ...]
) -> None:
    """1-D to 5-D inputs: shape, dtype, device, requires_grad of F.linear's result."""
    layer = linear(24, 17, dtype, device)
    x = torch.randn(*lead, 24, device=device, dtype=dtype)
    outside = layer(x)
    with octavo.fp8_autocast():
        inside = layer(x)
        with torch.no_grad():
            quiet = layer(x)
    for y in (inside, quiet):
        assert (y.shape, y.dtype, y.device, y.is_contiguous()) == (outside.shape, dtype, outside.device, True)
    assert inside.requires_grad and not quiet.requires_grad
    assert_bits(quiet, inside)


def test_s7_a_1d_weight_stays_as_it_is(device: torch.device) -> None:
    """F.linear takes a 1-D weight; it is not quantised."""
    x, w = torch.randn(5, 24, device=device, dtype=BF16), torch.randn(24, device=device, dtype=BF16)
    outside = F.linear(x, w)
    with octavo.fp8_autocast():
        assert_bits(F.linear(x, w), outside)
    assert octavo.report().fp8_calls == 0
