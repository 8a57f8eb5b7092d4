# SPDX-License-Identifier: Apache-2.0
"""Saving and loading the scaling state, and checkpoints that know nothing of it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from checks import assert_bits, assert_untouched, snapshot
from runs import assert_same_states, batches, linears, network, states, train

import octavo

BF16 = torch.bfloat16
ERRORS = (RuntimeError, ValueError, KeyError, TypeError)


def through_a_file(thing: object) -> object:
    """torch.save and torch.load(weights_only=True): plain tensors, strings and numbers survive, nothing else does."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def flat(saved: dict, prefix: str = "") -> dict[str, object]:
    """The leaves of nested dicts, by their path."""
    leaves = {}
    for key, value in saved.items():
        assert isinstance(key, str)
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}/")
        else:
            leaves[prefix + key] = value
    return leaves


def assert_same_saved(actual: dict, expected: dict) -> None:
    actual, expected = flat(actual), flat(expected)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_bits(actual[key], value, key)
        else:
            assert actual[key] == value, key


def trained(device: torch.device, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, batches(steps, device), octavo.DelayedScaling(4))
    return model, optimizer


@pytest.mark.parametrize("pending", [False, True])
def test_resume_is_bitwise(device: torch.device, pending: bool) -> None:
    """T6 in one process: saved after a step or between backward and step, loaded into a new model: the next ten losses,
    weights and states are bit-equal to those of the run that went on."""
    model, optimizer = trained(device)
    recipe = octavo.DelayedScaling(4)

    def half_a_step(model: torch.nn.Module) -> None:
        with octavo.fp8_autocast(recipe=recipe):
            loss = model(half).float().square().mean()
        loss.backward()

    half, rest = batches(1, device)[0] * 3, batches(10, device)
    if pending:
        half_a_step(model)
    saved = through_a_file({"m": model.state_dict(), "o": optimizer.state_dict(), "s": octavo.state_dict(model)})
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    def finish(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        if pending:
            optimizer.step()
            optimizer.zero_grad()
        return train(model, optimizer, rest, recipe)

    losses = finish(model, optimizer)
    new = network(device)
    new_optimizer = torch.optim.AdamW(new.parameters(), lr=1e-2)
    new.load_state_dict(saved["m"])
    new_optimizer.load_state_dict(saved["o"])
    octavo.load_state_dict(new, saved["s"])
    for p, grad in zip(new.parameters(), grads, strict=True):
        p.grad = grad
    for a, b in zip(finish(new, new_optimizer), losses, strict=True):
        assert_bits(a, b)
    for a, b in zip(new.parameters(), model.parameters(), strict=True):
        assert_bits(a, b)
    assert_same_states(states(new), states(model))


def test_resume_without_the_state_is_finite_and_near(device: torch.device) -> None:
    """A model loaded without its scaling state starts from the tensors' own amaxes.

    Its next loss differs by one more FP8 rounding of each operand at most: two linears, each with a relative error of
    at most 0.0885 (see test_linear) in the forward that saved state uses, and the same in the one that does not, so the
    outputs are within 4 * 0.0885 of each other and the mean square within (1 + 0.354)^2 - 1.
    """
    model, _ = trained(device)
    new = network(device)
    new.load_state_dict(model.state_dict())
    x = batches(1, device, rows=64)[0]
    losses = []
    for m in (model, new):
        with octavo.fp8_autocast(recipe=octavo.DelayedScaling(4)):
            losses.append(m(x).float().square().mean().item())
    assert abs(losses[1] / losses[0] - 1) < 1.354**2 - 1


def test_loading_restores_the_state_itself(device: torch.device) -> None:
    """Rings, scales, flags and pending amaxes, before any forward of the new model."""
    model, _ = trained(device)
    with octavo.fp8_autocast(recipe=octavo.DelayedScaling(4)):
        model(batches(1, device)[0]).sum().backward()
    new = network(device)
    octavo.load_state_dict(new, through_a_file(octavo.state_dict(model)))
    assert_same_states(states(new), states(model))
    assert_same_saved(octavo.state_dict(new), octavo.state_dict(model))


def test_saved_state_is_a_copy(device: torch.device) -> None:
    """Training on after saving does not change what was saved."""
    model, optimizer = trained(device)
    saved = octavo.state_dict(model)
    before = copy.deepcopy(saved)
    train(model, optimizer, [x * 100 for x in batches(2, device)], octavo.DelayedScaling(4))
    assert_same_saved(saved, before)


def test_t7_plain_things_of_fixed_size(device: torch.device) -> None:
    """Tensors, strings and numbers only, named by parameter; the sizes do not change with the number of steps."""
    model, optimizer = trained(device, steps=1)

    def sizes() -> dict:
        leaves = flat(octavo.state_dict(model))
        for key, value in leaves.items():
            assert type(value) in (torch.Tensor, str, int, float, bool), (key, type(value))
        return {k: v.shape for k, v in leaves.items() if isinstance(v, torch.Tensor)}

    first = sizes()
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    assert all(any(name in key for key in first) for name in names)
    train(model, optimizer, batches(6, device), octavo.DelayedScaling(4))
    assert sizes() == first


def test_t7_plain_checkpoints_load_both_ways(device: torch.device) -> None:
    """A model trained in FP8 has the keys of any nn.Linear; strict loads work in both directions, and it pickles."""
    model, _ = trained(device)
    plain = network(device)
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(through_a_file(model.state_dict()), strict=True)
    model.load_state_dict(through_a_file(plain.state_dict()), strict=True)
    twin = pickle.loads(pickle.dumps(model))
    for a, b in zip(twin.parameters(), model.parameters(), strict=True):
        assert_bits(a, b)


def test_a_model_without_state_saves_and_loads(device: torch.device) -> None:
    """Nothing recorded: the dict can be saved, and loading it records nothing."""
    model, new = network(device), network(device)
    octavo.load_state_dict(new, through_a_file(octavo.state_dict(model)))
    for layer in linears(new):
        assert_untouched(layer.weight)


# Wrong entries --------------------------------------------------------------------------------------------------------


def owner(saved: dict, name: str) -> dict:
    """The dict, at whatever depth, that holds the entry of parameter `name`."""
    if name in saved:
        return saved
    return next(found for value in saved.values() if isinstance(value, dict) for found in [owner(value, name)] if found)


def wrong_shape(saved: dict) -> list[str]:
    entry = owner(saved, "0.weight")["0.weight"]
    key = max((k for k in entry if isinstance(entry[k], torch.Tensor)), key=lambda k: entry[k].numel())
    entry[key] = torch.zeros(3, 5, 7)
    return ["0.weight"]


def wrong_type(saved: dict) -> list[str]:
    owner(saved, "2.weight")["2.weight"] = "a string"
    return ["2.weight"]


def missing_tensor(saved: dict) -> list[str]:
    entry = owner(saved, "0.weight")["0.weight"]
    del entry[max((k for k in entry if isinstance(entry[k], torch.Tensor)), key=lambda k: entry[k].numel())]
    return ["0.weight"]


def bad_values(saved: dict) -> list[str]:
    """A scale that no step can be."""
    entry = owner(saved, "0.weight")["0.weight"]
    entry["scale"] = torch.full_like(entry["scale"], float("nan"))
    return ["0.weight"]


def unknown_parameter(saved: dict) -> list[str]:
    entries = owner(saved, "0.weight")
    entries["nowhere.weight"] = entries["0.weight"]
    return ["nowhere.weight"]


def two_at_once(saved: dict) -> list[str]:
    return wrong_shape(saved) + unknown_parameter(saved)


@pytest.mark.parametrize("spoil", [wrong_shape, wrong_type, missing_tensor, bad_values, unknown_parameter, two_at_once])
def test_wrong_entries_raise_once_and_change_nothing(device: torch.device, spoil) -> None:
    """One error that names every wrong entry; the model keeps the state it had, all of it."""
    model, _ = trained(device)
    saved = copy.deepcopy(octavo.state_dict(model))
    named = spoil(saved)
    for target in (network(device), trained(device)[0]):
        before = states(target)
        with pytest.raises(ERRORS) as caught:
            octavo.load_state_dict(target, saved)
        for name in named:
            assert name in str(caught.value)
        assert_same_states(states(target), before)
        assert [snapshot(layer.weight) is None for layer in linears(target)] == [s is None for s in before]
