# SPDX-License-Identifier: Apache-2.0
"""on_fallback: what should have run in FP8 and could not is counted, warned about, or an error; a choice never is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import assert_bits
from torch import Tensor

import octavo

BF16 = torch.bfloat16
Linear = Callable[[Tensor, Tensor], Tensor]


class Wrapped(Tensor):
    """A subclass that Octavo knows nothing of; __torch_function__ is off, so that the kernel itself meets it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.as_subclass(Tensor) if isinstance(value, Wrapped) else value

        with torch._C._DisableTorchDispatch():
            return func(*torch.utils._pytree.tree_map(plain, args), **(kwargs or {}))


def subclass(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.detach().as_subclass(Wrapped))


def vmap(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.vmap(F.linear, in_dims=(0, None))(x, w)


def func_grad(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.linear(x, w).float().sum())(w)


def forward_ad(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        y = F.linear(torch.autograd.forward_ad.make_dual(x, x), w)
        return torch.autograd.forward_ad.unpack_dual(y).primal


def vector(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w[0])


def broadcast_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, x.new_ones(7, 16))


FALLBACKS = {
    "tensor subclass": subclass,
    "functorch transform": vmap,
    "forward-mode AD": forward_ad,
    "1-D weight": vector,
    "broadcast bias": broadcast_bias,
}


@pytest.fixture
def operands(device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(7, 24, device=device, dtype=BF16)
    return x, torch.nn.Parameter(torch.randn(16, 24, device=device, dtype=BF16))


@contextlib.contextmanager
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("reason", FALLBACKS)
def test_allow_warn_and_error(operands: tuple[Tensor, Tensor], reason: str) -> None:
    """One reason for all three; the bits of "allow" and "warn" are those outside; an error leaves the region."""
    run = FALLBACKS[reason]
    outside = run(*operands)
    with without_warnings(), octavo.fp8_autocast():
        assert_bits(run(*operands), outside)
    with (
        pytest.warns(UserWarning, match=f"octavo: .*{reason}.*runs as outside"),
        octavo.fp8_autocast(on_fallback="warn"),
    ):
        assert_bits(run(*operands), outside)
    says = f"octavo: .*BFloat16 weights.*{reason}.*enabled=False"
    with pytest.raises(RuntimeError, match=says), octavo.fp8_autocast(on_fallback="error"):
        run(*operands)
    assert not octavo.fp8_state().enabled
    (row,) = octavo.report().rows
    assert (row.reason, row.calls) == (reason, 3)


def test_the_way_out_that_the_error_names_works(operands: tuple[Tensor, Tensor]) -> None:
    """Also under func.grad; inside enabled=False the same call runs; plain linears beside it run in FP8."""
    outside = func_grad(*operands)
    with octavo.fp8_autocast(on_fallback="error"):
        F.linear(*operands)
        with pytest.raises(RuntimeError, match="functorch transform"):
            func_grad(*operands)
        with octavo.fp8_autocast(enabled=False):
            assert_bits(func_grad(*operands), outside)
        F.linear(*operands)
    assert octavo.report().fp8_calls == 2


def test_float32_parameters_under_autocast_were_to_run_in_fp8(device: torch.device) -> None:
    """By torch.autocast's type, not the tensors' own: without it float32 is left alone, which is a choice."""
    x, w = torch.randn(7, 24, device=device), torch.randn(16, 24, device=device)
    with octavo.fp8_autocast(on_fallback="error"), without_warnings():
        vmap(x, w)
        with torch.autocast(device.type, dtype=BF16), pytest.raises(RuntimeError, match="functorch transform"):
            vmap(x, w)
    with octavo.fp8_autocast(on_fallback="error", include_float32=True), pytest.raises(RuntimeError, match="functorch"):
        vmap(x, w)


HIGH = octavo.DelayedScaling(forward="high", dgrad="high", wgrad="high", small=None)
CHOICES: dict[str, tuple[dict, Linear]] = {
    "float64": ({}, lambda x, w: F.linear(x.double(), w.double())),
    "float32": ({}, lambda x, w: F.linear(x.float(), w.detach().float())),
    "small": ({"recipe": octavo.DelayedScaling(small="h200")}, F.linear),
    "the recipe": ({"recipe": HIGH}, F.linear),
    "the recipe, of a subclass": ({"recipe": HIGH}, subclass),
    "empty": ({}, lambda x, w: F.linear(x[:0], w)),
    "two activations": ({}, lambda x, w: F.linear(x, (w * 2)[0])),
    "no parameter, but FP8": ({}, lambda x, w: F.linear(x, w * 2)),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_no_fallback(operands: tuple[Tensor, Tensor], choice: str) -> None:
    arguments, run = CHOICES[choice]
    with without_warnings():
        for on_fallback in ("warn", "error"):
            with octavo.fp8_autocast(on_fallback=on_fallback, **arguments):
                run(*operands)


@pytest.mark.parametrize("run", [forward_ad, vector, broadcast_bias, vmap])
def test_an_excluded_weight_is_no_fallback(operands: tuple[Tensor, Tensor], run: Linear) -> None:
    with octavo.fp8_autocast(on_fallback="error", exclude=operands[1]):
        run(*operands)


@pytest.mark.parametrize("value", ["Error", "raise", None, True, ["allow"]])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"on_fallback must be one of allow, warn, error, not "):
        octavo.fp8_autocast(on_fallback=value)


def test_a_checkpoint_recomputes_under_the_same_answer(operands: tuple[Tensor, Tensor]) -> None:
    """Backward outside of the region meets the linear again, in the region that its forward ran in."""
    calls = 0

    def block(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.linear(x, w) if calls == 1 else F.linear(x, w, x.new_ones(7, 16))

    x, w = operands
    with octavo.fp8_autocast(on_fallback="error"):
        y = torch.utils.checkpoint.checkpoint(block, x, w, use_reentrant=False)
    with pytest.raises(RuntimeError, match="broadcast bias"):
        y.sum().backward()


TRANSFORMS: dict[str, Linear] = {
    "vmap": vmap,
    "vmap, weights in batches": lambda x, w: torch.func.vmap(F.linear)(x, torch.stack([w] * 7)),
    "grad": func_grad,
    "vmap of grad": lambda x, w: torch.func.vmap(
        torch.func.grad(lambda w, x: F.linear(x, w).float().sum()), in_dims=(None, 0)
    )(w, x),
    "jvp": lambda x, w: torch.func.jvp(lambda x: F.linear(x, w), (x,), (x,))[1],
    "with a bias": lambda x, w: torch.func.vmap(lambda x: F.linear(x, w, w[:, 0]))(x),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functorch_is_counted_and_runs_as_outside(
    operands: tuple[Tensor, Tensor], transform: str, autocast: bool
) -> None:
    """Once a linear, whatever it is taken apart into, and none of the parts runs in FP8."""
    run, (x, w) = TRANSFORMS[transform], operands
    if autocast:
        x, w = x.float(), w.detach().float()
    with torch.autocast(x.device.type, dtype=BF16, enabled=autocast):
        outside = run(x, w)
        with octavo.fp8_autocast():
            assert_bits(run(x, w), outside)
    (row,) = octavo.report().rows
    assert (row.reason, row.calls) == ("functorch transform", 1)


def test_functorch_on_other_devices_is_none_of_ours() -> None:
    x, w = torch.empty(7, 24, device="meta"), torch.empty(16, 24, device="meta")
    with octavo.fp8_autocast(on_fallback="error", include_float32=True):
        assert vmap(x, w).shape == (7, 16)
    assert octavo.report().other_calls == 0
