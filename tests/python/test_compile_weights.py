# SPDX-License-Identifier: Apache-2.0
"""Compiled linears whose weights are slices, computed, shared, frozen, or hooked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiling import (
    BF16,
    REGIONS,
    Block,
    K,
    assert_same_notes,
    assert_trains_alike,
    fresh,
    fresh_dynamo,
    graphs,
    inputs,
    reasons,
    three,
    trained,
)
from runs import linear
from torch import Tensor

import octavo

dynamo = pytest.fixture(autouse=True)(fresh_dynamo)
Call = Callable[[Tensor], Tensor]


def compiled(call: Call) -> Call:
    return torch.compile(call, backend="aot_eager")


# Weights --------------------------------------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3 * K, K, device=device).to(BF16) / 5)
        self.square = torch.nn.Parameter(torch.randn(K, K, device=device).to(BF16) / 5)
        self.bias = torch.nn.Parameter(torch.randn(K, device=device).to(BF16))
        self.register_buffer("kept", torch.randn(K, K, device=device).to(BF16))
        self.table = torch.nn.Embedding(9, K, device=device, dtype=BF16)
        self.head = linear(K, 9, BF16, device, bias=False)
        self.head.weight = self.table.weight


def slices(m: Weights, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, m.w[:K]), F.linear(x, m.w[K : 2 * K], m.bias), F.linear(x, m.w[2 * K :])
    return q * k + v + F.linear(x, m.w[::3])


def chunks(m: Weights, x: Tensor) -> Tensor:
    return sum(F.linear(x, part) for part in m.w.chunk(3)) + F.linear(x, m.w).sum(-1, keepdim=True)


def overlapping_slices(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.w[:K]) + F.linear(x, m.w[8 : K + 8]) + F.linear(x[:, :16], m.w[:K, :16])


def computed(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.square * 2, m.bias) + F.linear(x, m.square)


def merged(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.square + m.w[:K, :4] @ m.w[:4])


def transposed(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.square.t()) + F.linear(x, m.square.view(K, K))


def detached(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.square.detach()) + F.linear(x, m.square)


def a_buffer(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, m.kept)


def activations(m: Weights, x: Tensor) -> Tensor:
    return F.linear(x, F.linear(x, m.square)) @ x


def the_same_twice(m: Weights, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, m.square, m.bias), m.square) + F.linear(x * 8, m.square)


def tied(m: Weights, x: Tensor) -> Tensor:
    return m.head(x + m.table(torch.arange(x.shape[0], device=x.device) % 9))


WEIGHTS = [
    *(slices, chunks, overlapping_slices, computed, merged, transposed, a_buffer, activations),
    *(the_same_twice, tied),
]


def called(function: Callable, device: torch.device) -> torch.nn.Module:
    model = Weights(device)
    model.forward = function.__get__(model)
    return model


@pytest.mark.parametrize(
    ("backend", "function"),
    [*(("aot_eager", f) for f in WEIGHTS), *(("eager", f) for f in (slices, computed, the_same_twice))],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_weights(device: torch.device, function: Callable, backend: str) -> None:
    """Slices, tied, repeated and computed weights: the state and the reasons that they have uncompiled."""
    report = assert_trains_alike(lambda: called(function, device), inputs(device), options={"backend": backend})
    if function in (computed, merged, activations):
        assert any(reason.startswith("fp8, scaled by its own amax") for reason in reasons(report))


def test_a_detached_weight(device: torch.device) -> None:
    """Has nothing to keep a state with; the parameter beside it has."""
    assert_trains_alike(lambda: called(detached, device), inputs(device), same_report=False)


@pytest.mark.parametrize("region", ["dynamic", "custom"])
def test_slices_of_a_parameter(device: torch.device, region: str) -> None:
    """Under other recipes."""
    assert_trains_alike(
        lambda: called(slices, device), inputs(device), region=lambda: octavo.fp8_autocast(**REGIONS[region])
    )


@pytest.mark.parametrize("frozen", ["all", "q", "weights", "biases", "out"])
def test_frozen_parameters(device: torch.device, frozen: str) -> None:
    """Only what learns gets a gradient; the state is the uncompiled model's."""

    def make() -> torch.nn.Module:
        model = Block(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen == "all" or frozen in name or frozen[:-2] == name.split(".")[1][:4]))
        return model

    assert_trains_alike(make, inputs(device))


def test_weights_as_arguments(device: torch.device) -> None:
    """One function of x and w, called with several parameters: each has its own state."""
    runs = []
    for wrap in (lambda f: f, compiled):
        model = fresh(lambda: three(device))
        call = wrap(lambda x, w, b: F.linear(x, w, b))
        runs.append(
            trained(
                model,
                lambda x, m=model, call=call: [x := call(x, layer.weight, layer.bias) for layer in (*m, m[0])][-1],
                inputs(device),
            )
        )
    assert_same_notes(runs[1], runs[0])
    assert octavo.report().fp8_calls == 12 and graphs() == 1


def test_attention(device: torch.device) -> None:
    """nn.MultiheadAttention: its in_proj and out_proj run in FP8."""

    def program(model: torch.nn.Module) -> Call:
        return lambda x: model(x[None], x[None], x[None], need_weights=False)[0][0]

    assert_trains_alike(
        lambda: torch.nn.MultiheadAttention(K, 4, device=device, dtype=BF16, batch_first=True), inputs(device), program
    )


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_weights(device: torch.device, when: str) -> None:
    """A gradient hook of the user's is called and changes the gradient; the state stays."""
    runs = []
    for wrap in (lambda m: m, compiled):
        model = fresh(lambda: Block(device))
        call, notes = wrap(model), []
        if when == "after":
            notes += trained(model, call, inputs(device))
        model.q.weight.register_hook(lambda g: g * 2)
        notes += trained(model, call, inputs(device))
        runs.append(notes)
    assert_same_notes(runs[1], runs[0])
