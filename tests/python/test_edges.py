"""Places where a linear meets the rest of PyTorch: what was right before has to be right in a region."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits, assert_same_state, differ, meta, snapshot
from runs import linear

import octavo

BF16 = torch.bfloat16


@pytest.mark.parametrize("shape", [(16, 24), (4, 8, 24)])
def test_a_changed_input_is_noticed_where_it_is_kept(device: torch.device, shape: tuple[int, ...]) -> None:
    """With wgrad in high precision x itself is kept: changing it before backward raises, as in bf16."""
    layer, x = linear(24, 16, BF16, device), torch.randn(shape, device=device, dtype=BF16)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(wgrad="high")):
        y = layer(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_below_autograd_there_is_no_graph(device: torch.device) -> None:
    """A kernel that calls linear has a derivative of its own."""
    layer, x = linear(24, 16, BF16, device), torch.randn(7, 24, device=device, dtype=BF16, requires_grad=True)
    with octavo.fp8_autocast():
        want = layer(x)
        with torch._C._AutoDispatchBelowAutograd():
            y = F.linear(x, layer.weight, layer.bias)
    assert not y.requires_grad
    assert_bits(y, want.detach())


@pytest.mark.parametrize("recipe", [None, octavo.DelayedScaling(dgrad="high", wgrad="high")])
def test_the_bias_gradient_does_not_ask_for_strides(device: torch.device, recipe: octavo.FP8Recipe | None) -> None:
    """Fixed tiles in a fixed order, also where nothing else of the gradient is quantised."""
    layer, x = linear(24, 300, BF16, device), torch.randn(1000, 24, device=device, dtype=BF16)
    dy = torch.randn(300, 1000, device=device, dtype=BF16).t()
    found = []
    for gradient in (dy, dy.contiguous()):
        with octavo.fp8_autocast(recipe=recipe):
            y = layer(x)
        found.append(torch.autograd.grad(y, layer.bias, gradient)[0])
    assert_bits(*found)


def test_attention_in_evaluation_runs_as_in_training(device: torch.device) -> None:
    """PyTorch's fused attention for inference would go around linear, and the two forwards would differ (U12)."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, device=device, dtype=BF16).eval()
    x = torch.randn(2, 5, 32, device=device, dtype=BF16)
    with octavo.fp8_autocast():
        want = layer(x)
        calls = octavo.report(reset=True).fp8_calls
        with torch.no_grad():
            got = layer(x)
        assert octavo.report().fp8_calls == calls == 4
    assert_bits(got, want.detach())
    with torch.no_grad():
        assert differ(layer(x), got)


def test_an_excluded_weight_has_to_be_found() -> None:
    """A parametrized weight is another tensor at each use: saying so beats leaving it in."""
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(24, 16))
    with pytest.raises(TypeError, match="parametrized"):
        octavo.fp8_autocast(exclude=layer)


def test_nested_tensors_are_left_alone() -> None:
    """Under autocast too, where they cannot even be asked for their sizes."""
    layer = torch.nn.Linear(24, 16)
    x = torch.nested.nested_tensor([torch.randn(3, 24), torch.randn(5, 24)], layout=torch.jagged)
    with torch.autocast("cpu", BF16):
        want = layer(x)
        with octavo.fp8_autocast():
            got = layer(x)
    assert all(torch.equal(a, b) for a, b in zip(got.unbind(), want.unbind(), strict=True))
    assert octavo.report().fp8_calls == 0 and octavo.report().other_calls > 0


def test_a_recipe_of_high_precision_alone_is_reported_so(device: torch.device) -> None:
    """Nothing of it runs in FP8, and the bits are those outside."""
    layer, x = linear(24, 16, BF16, device), torch.randn(7, 24, device=device, dtype=BF16)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(forward="high", dgrad="high", wgrad="high")):
        y = layer(x)
    assert_bits(y, layer(x))
    (row,) = octavo.report().rows
    assert not row.is_fp8 and "recipe" in row.reason


def test_temporary_weights_cost_no_claims(device: torch.device) -> None:
    """A weight made anew for each use, as a dequantised base is, gives optimizers nothing to look at."""
    base, x = torch.randn(16, 24, device=device), torch.randn(7, 24, device=device, dtype=BF16)
    before, slots = torch.ops.octavo._states_made(), torch.ops.octavo._arena_use()[0]
    for _ in range(10):
        with octavo.fp8_autocast(), torch.no_grad():
            F.linear(x, base.to(BF16))
    assert torch.ops.octavo._states_made() == before
    gc.collect()
    assert torch.ops.octavo._arena_use()[0] <= slots


def test_views_of_a_flat_buffer_that_learn_are_parameters(device: torch.device) -> None:
    """Each has its own state, and its own optimizer advances it."""
    flat = torch.randn(2 * 16 * 24, device=device, dtype=BF16)
    a, b = (part.view(16, 24).requires_grad_() for part in flat.chunk(2))
    x = torch.randn(7, 24, device=device, dtype=BF16)
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    with octavo.fp8_autocast():
        y = F.linear(x, a) + F.linear(x, b)
    y.sum().backward()
    pending = snapshot(b)
    first.step()
    assert meta(a).x_init
    assert_same_state(snapshot(b), pending)
    second.step()
    assert meta(b).x_init


def test_a_dead_layer_writes_into_nobodys_history(device: torch.device) -> None:
    """What a layer recorded before it died goes down with it, whoever gets its memory."""
    x = torch.ones(4, 16, device=device, dtype=BF16)

    def use(layer: torch.nn.Linear, size: float, history: int) -> None:
        with octavo.fp8_autocast(update_interval=history):
            y = layer(x * size)
        y.sum().backward()

    live, dead = (linear(16, 16, BF16, device, bias=False) for _ in range(2))
    use(live, 1, 4)
    octavo.step()
    for _ in range(3):
        use(dead, 1, 16)
        octavo.step()
    use(dead, 1000, 16)
    del dead
    gc.collect()
    for _ in range(4):
        use(live, 1, 16)
        octavo.step()
        assert meta(live.weight).x_hist.max() == 1 and meta(live.weight).x_scale * 448 == 1


def test_the_state_of_slices_is_saved(device: torch.device) -> None:
    """Attention's in_proj_weight is used in three parts: the state comes back under its name, and training goes on."""
    torch.manual_seed(0)
    models = [torch.nn.MultiheadAttention(16, 2, device=device, dtype=BF16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    query, keys = (torch.randn(n, 3, 16, device=device, dtype=BF16) for n in (4, 6))

    def train(model: torch.nn.Module) -> torch.Tensor:
        with octavo.fp8_autocast():
            y, _ = model(query, keys, keys + 1)
        y.sum().backward()
        octavo.step()
        return y.detach()

    train(models[0])
    saved = octavo.state_dict(models[0])
    assert sum(name.startswith("in_proj_weight@") for name in saved["linears"]) >= 2
    octavo.load_state_dict(models[1], saved)
    with torch.no_grad(), octavo.fp8_autocast():
        evaluated = models[1](query, keys, keys + 1)[0]
    after = train(models[1])
    assert_bits(after, train(models[0]))
    assert_bits(after, evaluated)


def test_another_default_dtype(device: torch.device) -> None:
    """State is float32 whatever new tensors are."""
    layer, x = linear(24, 16, BF16, device), torch.randn(7, 24, device=device, dtype=BF16)
    torch.set_default_dtype(torch.float64)
    try:
        with octavo.fp8_autocast():
            layer(x).sum().backward()
        octavo.step()
        assert meta(layer.weight).x_hist.dtype == torch.float32
        octavo.load_state_dict(layer, octavo.state_dict(layer))
    finally:
        torch.set_default_dtype(torch.float32)
