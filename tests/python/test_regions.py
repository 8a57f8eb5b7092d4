# SPDX-License-Identifier: Apache-2.0
"""Regions: nesting, exceptions, the process-wide switch, and what is left out."""

from __future__ import annotations

import oracle
import pytest
import torch
from checks import (
    assert_bits,
    assert_product,
    assert_untouched,
    meta,
)
from runs import assert_same_states, batches, linear, linears, network, states, train

import octavo

BF16 = torch.bfloat16
KINDS = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}


def test_t11_regions_restore_what_was_there(device: torch.device) -> None:
    """Nesting, exceptions, inner enabled=False; a nested region inherits nothing."""
    state = octavo.fp8_state()
    outer, inner = octavo.DelayedScaling(3), octavo.DynamicScaling()
    assert not state.enabled
    with pytest.raises(KeyError), octavo.fp8_autocast(recipe=outer, fp8_format="e4m3"):
        assert state.enabled and state.recipe == outer and state.fp8_format == octavo.FP8Format.E4M3
        with pytest.raises(ZeroDivisionError), octavo.fp8_autocast(recipe=inner):
            assert state.recipe == inner and state.fp8_format == octavo.FP8Format.HYBRID
            raise ZeroDivisionError
        assert state.enabled and state.recipe == outer and state.fp8_format == octavo.FP8Format.E4M3
        with octavo.fp8_autocast():
            assert state.recipe == octavo.DelayedScaling() and state.fp8_format == octavo.FP8Format.HYBRID
        with octavo.fp8_autocast(False):
            assert not state.enabled
            with octavo.fp8_autocast(recipe=inner):
                assert state.enabled
            assert not state.enabled
        assert state.recipe == outer
        raise KeyError
    assert not state.enabled


def test_t11_inner_disabled_is_bf16(device: torch.device) -> None:
    """Inside enabled=False the bits are those outside any region, forward and backward, and nothing is recorded."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    y = layer(x)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, layer.weight, dy)[0]
    with octavo.fp8_autocast(), octavo.fp8_autocast(enabled=False):
        inside = layer(x)
    assert_bits(inside, y)
    with octavo.fp8_autocast():  # where backward is called makes no difference either
        assert_bits(torch.autograd.grad(inside, layer.weight, dy)[0], expected)
    assert_untouched(layer.weight)


def test_the_region_as_a_decorator(device: torch.device) -> None:
    """A decorated function runs in the region each time, and leaves it."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]

    @octavo.fp8_autocast(recipe=octavo.DynamicScaling())
    def forward(x: torch.Tensor) -> torch.Tensor:
        assert octavo.fp8_state().enabled
        return layer(x)

    want, _ = oracle.Linear().forward(oracle.Policy(dynamic=True), x, layer.weight, layer.bias)
    for _ in range(2):
        assert_product(forward(x), want, "fast")
        assert not octavo.fp8_state().enabled


def test_the_process_wide_switch(device: torch.device) -> None:
    """fp8_linear_enable for code that cannot use a with block; a region overrides it."""
    layer, x = linear(24, 16, BF16, device), batches(1, device)[0]
    outside = layer(x)
    assert not octavo.fp8_linear_enabled()
    octavo.fp8_linear_enable()
    try:
        assert octavo.fp8_linear_enabled() and octavo.fp8_state().enabled
        want, _ = oracle.Linear().forward(oracle.Policy(), x, layer.weight, layer.bias)
        assert_product(layer(x), want, "fast")
        with octavo.fp8_autocast(False):
            assert_bits(layer(x), outside)
    finally:
        octavo.fp8_linear_enable(False)
    assert not octavo.fp8_linear_enabled()
    assert_bits(layer(x), outside)


def test_exclude_modules_and_parameters(device: torch.device) -> None:
    """What is excluded runs as outside the region, bit for bit, keeps no state, and the rest is FP8 as ever."""
    model, x = network(device), batches(1, device)[0]
    first, last = linears(model)
    hidden = first(x)
    for exclude in ([first], first, [first.weight], first.weight, torch.nn.ModuleList([first])):
        octavo.fp8_state().reset()
        with octavo.fp8_autocast(exclude=exclude):
            assert_bits(first(x), hidden)
            y = model(x)
        want, _ = oracle.Linear().forward(oracle.Policy(), model[1](hidden), last.weight, last.bias)
        assert_product(y, want, "fast")
        y.sum().backward()
        octavo.step()
        assert_untouched(first.weight)
        assert meta(last.weight).x_init
        model.zero_grad()


def test_exclude_takes_whole_trees(device: torch.device) -> None:
    """Excluding a module excludes every linear below it."""
    model, x = network(device), batches(1, device)[0]
    outside = model(x)
    with octavo.fp8_autocast(exclude=[model]):
        assert_bits(model(x), outside)


def test_u3_float32_operands_stay_as_they_are(device: torch.device) -> None:
    """A router given fp32 operands: bits as outside the region, counted; include_float32=True quantises them."""
    router = torch.nn.Linear(24, 8, device=device)
    x = torch.randn(7, 24, device=device, requires_grad=True)
    outside = router(x)
    dy = torch.randn_like(outside)
    expected = torch.autograd.grad(outside, (x, router.weight, router.bias), dy)
    with octavo.fp8_autocast():
        inside = router(x)
    assert_bits(inside, outside)
    for a, b in zip(torch.autograd.grad(inside, (x, router.weight, router.bias), dy), expected, strict=True):
        assert_bits(a, b)
    assert torch.equal(inside.topk(2).indices, outside.topk(2).indices)
    report = octavo.report(reset=True)
    assert report.fp8_calls == 0 and [row.reason for row in report.rows] == ["float32"]
    assert_untouched(router.weight)
    model = oracle.Linear()
    want, saved = model.forward(oracle.Policy(), x, router.weight, router.bias)
    with octavo.fp8_autocast(include_float32=True):
        y = router(x)
    assert_product(y, want, "fast")
    gradients = model.backward(saved, dy)
    dx, dw = torch.autograd.grad(y, (x, router.weight), dy)
    assert_product(dx, gradients.x)
    assert_product(dw, gradients.w)
    assert octavo.report().fp8_calls == 1


def test_u21_deterministic_mode(device: torch.device) -> None:
    """Deterministic mode fills fresh memory with NaN: the same bits, on shapes that need padding."""
    results = []
    for deterministic in (False, True):
        torch.manual_seed(5)
        model, data = network(device, (33, 17, 7)), batches(3, device, 33)
        before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(deterministic, warn_only=device.type == "cuda")
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]
        results.append((losses, list(model.parameters()), states(model)))
    for kind in (0, 1):
        for a, b in zip(results[0][kind], results[1][kind], strict=True):
            assert_bits(b, a)
    assert_same_states(results[1][2], results[0][2])
