# SPDX-License-Identifier: Apache-2.0
"""Recipes of one's own, slot by slot and batched, and what counts as the same policy."""

from __future__ import annotations

import warnings
from typing import ClassVar

import oracle
import pytest
import torch
from checks import assert_bits, assert_same_state, differ, meta
from runs import batches, both, linear, network, run_beside_oracle, states, train

import octavo

BF16 = torch.bfloat16


class Percentile(octavo.FP8Recipe):
    """The 90th percentile of the window, asked for slot by slot."""

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return torch.quantile(amax, 0.9) / octavo.FP8_MAX[fmt]


class BatchedPercentile(octavo.FP8Recipe):
    """The same for all slots at once."""

    batched = True

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return torch.quantile(amax, 0.9, dim=1) / octavo.FP8_MAX[fmt]


def sequence_run(device: torch.device, make) -> tuple[list, list, list]:
    torch.manual_seed(5)
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches(5, device):
        losses += train(model, optimizer, [x], make())
    return losses, list(model.parameters()), states(model)


def assert_same_runs(a: tuple, b: tuple) -> None:
    for kind in (0, 1):
        for x, y in zip(a[kind], b[kind], strict=True):
            assert_bits(x, y)
    for x, y in zip(a[2], b[2], strict=True):
        assert_same_state(x, y)


def test_a_custom_recipe_per_slot_and_batched(device: torch.device) -> None:
    """One policy in two forms: the same bits; and not those of the maximum."""
    one, many = sequence_run(device, lambda: Percentile(5)), sequence_run(device, lambda: BatchedPercentile(5))
    assert_same_runs(one, many)
    maximum = sequence_run(device, lambda: octavo.DelayedScaling(5))
    assert any(differ(a, b) for a, b in zip(one[1], maximum[1], strict=True))


def test_a_custom_recipe_decides_the_scale(device: torch.device) -> None:
    """The scale of each slot is what scale_from_history returned for its ring, oldest first, with the slot's format."""
    layer = linear(24, 16, BF16, device)
    recipe = Percentile(3)
    for x in batches(4, device):
        with octavo.fp8_autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.randn_like(y))
        octavo.step()
        state = meta(layer.weight)
        for slot in "xwg":
            fmt = octavo.FP8Format.E5M2 if slot == "g" else octavo.FP8Format.E4M3
            want = recipe.scale_from_history(getattr(state, f"{slot}_hist").to(device), fmt)
            assert_bits(getattr(state, f"{slot}_scale").reshape(()).cpu(), want.cpu(), slot)


class Witness(octavo.FP8Recipe):
    """Keeps the windows it is shown."""

    windows: ClassVar[list[tuple[list[float], octavo.FP8Format]]] = []

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        assert amax.dtype == torch.float32 and amax.dim() == 1
        self.windows.append((amax.tolist(), fmt))
        return amax.max() / octavo.FP8_MAX[fmt]


def test_windows_are_full_and_oldest_first(device: torch.device) -> None:
    """The first amax fills the window, later ones enter at the end; fmt is the slot's own format."""
    layer = linear(24, 16, BF16, device)
    Witness.windows.clear()
    for amax in (1.0, 3.0, 2.0, 0.5):
        x = torch.full((7, 24), amax, device=device, dtype=BF16)
        with octavo.fp8_autocast(recipe=Witness(3)):
            y = layer(x)
        y.backward(torch.full_like(y, amax * 10))
        octavo.step()
    e4m3, e5m2 = octavo.FP8Format.E4M3, octavo.FP8Format.E5M2
    for window in ([1.0, 1.0, 1.0], [1.0, 1.0, 3.0], [1.0, 3.0, 2.0], [3.0, 2.0, 0.5]):
        assert (window, e4m3) in Witness.windows
        assert ([10 * amax for amax in window], e5m2) in Witness.windows


class Stubborn(octavo.FP8Recipe):
    """No usable answer for large amaxes."""

    answer = float("nan")

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        plain = amax[-1] / octavo.FP8_MAX[fmt]
        return torch.where(amax[-1] > 100, torch.full_like(plain, self.answer), plain)


class BatchedStubborn(octavo.FP8Recipe):
    batched = True
    answer = float("nan")

    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        plain = amax[:, -1] / octavo.FP8_MAX[fmt]
        return torch.where(amax[:, -1] > 100, torch.full_like(plain, self.answer), plain)


@pytest.mark.parametrize("answer", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("recipe", [Stubborn, BatchedStubborn])
def test_an_unusable_step_keeps_the_old_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, recipe: type, answer: float
) -> None:
    """NaN, Inf, zero or negative: the slot keeps its scale, its ring still takes the amax, the others are not touched,
    and the next usable answer is used."""
    monkeypatch.setattr(recipe, "answer", answer)
    layer = linear(24, 16, BF16, device)
    scales = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report of it
        for amax in (1.0, 200.0, 2.0):
            x = torch.full((7, 24), amax, device=device, dtype=BF16)
            with octavo.fp8_autocast(recipe=recipe(3)):
                y = layer(x)
            assert y.isfinite().all()
            y.backward(torch.ones_like(y))
            octavo.step()
            scales.append(meta(layer.weight).x_scale.item())
            assert meta(layer.weight).x_hist[-1].item() == amax
            assert meta(layer.weight).g_scale.item() == float(oracle.step_from_amax(1.0, oracle.E5M2))
    assert scales == [float(oracle.step_from_amax(a, oracle.E4M3)) for a in (1.0, 1.0, 2.0)]


class Extreme(octavo.FP8Recipe):
    def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> torch.Tensor:
        return torch.where(amax[-1] > 1, torch.full_like(amax[-1], 3e38), torch.full_like(amax[-1], 1e-40))


def test_a_custom_step_is_only_clamped(device: torch.device) -> None:
    """Into [2^-126, 2^126]; margin and powers of two are the recipe's own affair."""
    layer = linear(24, 16, BF16, device)
    x = torch.full((7, 24), 5.0, device=device, dtype=BF16)
    with octavo.fp8_autocast(recipe=Extreme(2, 3, power_of_two=True)):
        y = layer(x)
    y.backward(torch.full_like(y, 0.5))
    octavo.step()
    assert meta(layer.weight).x_scale.item() == 2.0**126
    assert meta(layer.weight).g_scale.item() == 2.0**-126
    with octavo.fp8_autocast(recipe=Percentile(2, 3, power_of_two=True)):
        y = layer(x)
    y.backward(torch.ones_like(y))
    octavo.step()
    assert_bits(meta(layer.weight).x_scale.reshape(()).cpu(), torch.tensor(5.0) / 448)


def test_a_custom_recipe_may_return_a_number(device: torch.device) -> None:
    """A step given as a Python float is as good as a tensor."""

    class Fixed(octavo.FP8Recipe):
        def scale_from_history(self, amax: torch.Tensor, fmt: octavo.FP8Format) -> float:
            return 0.25

    layer = linear(24, 16, BF16, device)
    with octavo.fp8_autocast(recipe=Fixed()):
        layer(batches(1, device)[0]).sum().backward()
    octavo.step()
    assert meta(layer.weight).x_scale.item() == meta(layer.weight).g_scale.item() == 0.25


@pytest.mark.parametrize(
    "make",
    [lambda: octavo.DelayedScaling(3), lambda: Percentile(3), lambda: BatchedPercentile(3, 1)],
    ids=["delayed", "custom", "batched"],
)
def test_equal_recipes_made_anew_are_one_policy(device: torch.device, make) -> None:
    """A recipe made in the training loop keeps the history: same bits as one made once."""
    once = make()
    assert make() == once and hash(make()) == hash(once)
    assert_same_runs(sequence_run(device, make), sequence_run(device, lambda: once))


def test_precision_of_products_is_no_policy(device: torch.device) -> None:
    """A policy is the scaling part of a recipe: another accumulation keeps the history."""
    layer = linear(24, 16, BF16, device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    data = batches(3, device)
    for x, wgrad in zip(data, ("accurate", "fast", "high"), strict=True):
        train(layer, optimizer, [x], octavo.DelayedScaling(3, wgrad=wgrad))
    assert meta(layer.weight).x_hist.tolist() == [x.abs().max().item() for x in data]


def test_most_recent(device: torch.device) -> None:
    """The step follows the last entry of the ring, not the largest."""
    xs = [torch.randn(7, 24, device=device, dtype=BF16) * size for size in (5.0, 1.0, 3.0, 0.1)]
    recipe, policy = both(history_len=4, algorithm="most_recent")
    run_beside_oracle(linear(24, 16, BF16, device), xs, recipe, policy)
