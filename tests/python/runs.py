# SPDX-License-Identifier: Apache-2.0
"""One linear layer run beside its oracle, step by step."""

from __future__ import annotations

import itertools

import oracle
import torch
from checks import assert_column_sum, assert_product, assert_same_state, assert_state, snapshot

import octavo

HYBRID = (oracle.E4M3, oracle.E5M2)
FORMATS = {"hybrid": HYBRID, "e4m3": (oracle.E4M3, oracle.E4M3), "e5m2": (oracle.E5M2, oracle.E5M2)}


def both(kind: str = "delayed", fp8_format: str = "hybrid", **arguments) -> tuple[octavo.FP8Recipe, oracle.Policy]:
    """The library's recipe and the oracle's policy for the same arguments."""
    operand, gradient = FORMATS[fp8_format]
    made = {"delayed": octavo.DelayedScaling, "dynamic": octavo.DynamicScaling}[kind](**arguments)
    return made, oracle.Policy(**arguments, dynamic=kind == "dynamic", operand=operand, gradient=gradient)


def linear(k: int, n: int, dtype: torch.dtype, device: torch.device, bias: bool = True) -> torch.nn.Linear:
    return torch.nn.Linear(k, n, bias=bias, device=device, dtype=dtype)


def check_gradients(
    layer: torch.nn.Linear, x: torch.Tensor, dy: torch.Tensor, want: oracle.Gradients, what: str = ""
) -> None:
    """What backward left in .grad against the oracle; on a CPU all three bit for bit."""
    if x.requires_grad:
        assert_product(x.grad.reshape(want.x.exact.shape), reshaped(want.x), what=f"{what} dx")
    if layer.weight.requires_grad:
        assert_product(layer.weight.grad, want.w, what=f"{what} dw")
    if layer.bias is not None and layer.bias.requires_grad:
        assert layer.bias.grad.dtype == layer.bias.dtype
        assert_column_sum(layer.bias.grad, dy, f"{what} db")


def reshaped(p: oracle.Product) -> oracle.Product:
    return oracle.Product(p.value.reshape(p.exact.shape), p.exact, p.magnitude, p.k)


def run_beside_oracle(
    layer: torch.nn.Linear,
    xs: list[torch.Tensor],
    recipe: octavo.FP8Recipe,
    policy: oracle.Policy,
    fp8_format: str = "hybrid",
    lr: float = 0.1,
    autocast: torch.dtype | None = None,
) -> oracle.Linear:
    """Train the layer on each x in turn; y, gradients and state must equal the oracle's at every step."""
    model = oracle.Linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=lr)
    for number, data in enumerate(xs):
        x = data.detach().clone().requires_grad_()
        want, saved = model.forward(policy, x, layer.weight, layer.bias, autocast)
        with octavo.fp8_autocast(recipe=recipe, fp8_format=fp8_format):
            if autocast is None:
                y = layer(x)
            else:
                with torch.autocast(x.device.type, dtype=autocast):
                    y = layer(x)
        assert y.shape == want.value.shape and y.dtype == want.value.dtype
        assert_product(y.reshape(want.exact.shape), reshaped(want), "fast", f"step {number} y")
        dy = torch.randn(y.shape, device=y.device).to(y.dtype) * 10.0**-number
        y.backward(dy)
        check_gradients(layer, x, dy, model.backward(saved, dy), f"step {number}")
        if not policy.dynamic:
            assert_state(layer.weight, model)
        optimizer.step()
        optimizer.zero_grad()
        model.step()
        if not policy.dynamic:
            assert_state(layer.weight, model)
    return model


# Small networks -----------------------------------------------------------------------------------------------------


def network(device: torch.device, sizes: tuple[int, ...] = (24, 33, 17)) -> torch.nn.Sequential:
    layers = []
    for k, n in itertools.pairwise(sizes):
        layers += [linear(k, n, torch.bfloat16, device), torch.nn.GELU()]
    return torch.nn.Sequential(*layers[:-1])


def linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear)]


def states(model: torch.nn.Module) -> list[dict | None]:
    return [snapshot(layer.weight) for layer in linears(model)]


def assert_same_states(actual: list, expected: list) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_same_state(a, b)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], recipe=None) -> list:
    losses = []
    for x in batches:
        with octavo.fp8_autocast(recipe=recipe):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def batches(count: int, device: torch.device, k: int = 24, rows: int = 7) -> list[torch.Tensor]:
    return [torch.randn(rows, k, device=device, dtype=torch.bfloat16) * (1 + number % 3) for number in range(count)]
