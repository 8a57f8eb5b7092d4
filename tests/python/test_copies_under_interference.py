# SPDX-License-Identifier: Apache-2.0
"""What is made once, where something gets in between: code that runs inside of an op, a backward that fails, a weight
that changes while it is quantised. A dispatch mode stands in for other threads and for a GPU without memory left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from torch.utils._python_dispatch import TorchDispatchMode

import octavo


class After(TorchDispatchMode):
    """Calls something after each op of a name."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        super().__init__()
        self.name, self.call = name, call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == f"octavo::{self.name}":
            self.call()
        return result


def weights(device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.nn.Parameter(torch.randn(32, 48, device=device, generator=generator)) for _ in range(2)]


def region(**arguments: Any) -> octavo.fp8_autocast:
    return octavo.fp8_autocast(include_float32=True, **arguments)


def test_a_region_entered_inside_of_a_linear(device: torch.device) -> None:
    """It makes the thread forget the input that k shares with q: k's gradient must be there all the same."""
    q, k = weights(device)
    x = torch.randn(16, 48, device=device)

    calls = []

    def enter() -> None:
        calls.append(None)
        if len(calls) == 2:  # in k's op, which has found what q has made
            with region(enabled=False):
                pass

    for number in range(3):
        q.grad = k.grad = None
        with region():
            if number < 2:
                ys = [F.linear(x, q), F.linear(x, k)]
            else:
                with After("_linear_forward", enter):
                    ys = [F.linear(x, q), F.linear(x, k)]
        sum(y.square().sum() for y in ys).backward()
        octavo.step()
        assert q.grad is not None and k.grad is not None
    assert len(calls) == 2


def test_a_backward_that_fails_after_its_record(device: torch.device) -> None:
    """The slot has met an input that the host would not know of: q and k are equal no more."""

    def run(share_inputs: bool) -> list[torch.Tensor]:
        q, k = weights(device)
        generator = torch.Generator(device).manual_seed(1)

        def draw(size: float) -> torch.Tensor:
            return torch.randn(16, 48, device=device, generator=generator) * size

        def fail() -> None:
            raise torch.OutOfMemoryError("no memory left")

        results = []
        for number in range(4):
            x = draw(1.0)
            with region(share_inputs=share_inputs):
                ys = [F.linear(x, q), F.linear(x, k)]
            results += [y.detach() for y in ys]
            if number == 1:
                with region(share_inputs=share_inputs):
                    y = F.linear(draw(30.0), q)
                with pytest.raises(torch.OutOfMemoryError), After("_linear_backward", fail):
                    y.sum().backward()
            sum(y.square().sum() for y in ys).backward()
            octavo.step()
        return results

    for shared, alone in zip(run(True), run(False), strict=True):
        assert_bits(shared, alone)


def test_a_weight_that_changes_while_it_is_quantised(device: torch.device) -> None:
    """Its copy is of the values before: it may not be filed as one of those after."""
    w, _ = weights(device)
    x = torch.randn(16, 48, device=device)

    def zero() -> None:
        with torch.no_grad():
            w.zero_()

    def change() -> None:
        other = threading.Thread(target=zero)
        other.start()
        other.join()

    with octavo.unchanged_weights(), region():
        with After("_linear_forward", change):
            first = F.linear(x, w)
        second = F.linear(x, w)
    assert first.any() and not second.any()
