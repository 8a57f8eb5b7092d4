# SPDX-License-Identifier: Apache-2.0
"""Recipes and regions: values that cannot change, arguments that are checked."""

from __future__ import annotations

import pytest
import torch

import octavo

BF16 = torch.bfloat16
RECIPES = [octavo.DelayedScaling, octavo.DynamicScaling]


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_immutable(recipe: type) -> None:
    """A recipe cannot change under a running model, neither its own attributes nor new ones."""
    made = recipe(margin=1)
    for name in ("margin", "history_len", "power_of_two", "forward", "something_new"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(made, name, 3)
    with pytest.raises((AttributeError, TypeError)):
        del made.margin
    assert made.margin == 1 and made == recipe(margin=1)


@pytest.mark.parametrize(
    "arguments",
    [{"margin": 2}, {"power_of_two": True}, {"forward": "high"}, {"dgrad": "fast"}, {"wgrad": "high"}],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_equal_by_value(recipe: type, arguments: dict) -> None:
    """Same arguments: equal, one hash. Any other argument, or another class: different."""
    assert recipe(**arguments) == recipe(**arguments)
    assert hash(recipe(**arguments)) == hash(recipe(**arguments))
    assert recipe(**arguments) != recipe()
    assert octavo.DelayedScaling() != octavo.DynamicScaling()
    assert len({recipe(), recipe(), recipe(**arguments)}) == 2


def test_signatures() -> None:
    """history_len and margin by position, the rest by keyword only; the defaults of the predecessor."""
    assert octavo.DelayedScaling() == octavo.DelayedScaling(16, 0)
    made = octavo.DelayedScaling(4, 2)
    assert (made.history_len, made.margin) == (4, 2)
    assert octavo.DelayedScaling(4) != octavo.DelayedScaling(5)
    assert octavo.DynamicScaling(3).margin == 3
    assert octavo.DelayedScaling(algorithm="most_recent") != octavo.DelayedScaling()
    with pytest.raises(TypeError):
        octavo.DelayedScaling(4, 2, "max")
    with pytest.raises(TypeError):
        octavo.DynamicScaling(3, True)
    for made in (octavo.DelayedScaling(), octavo.DynamicScaling()):
        assert isinstance(made, octavo.FP8Recipe)
        assert (made.forward, made.dgrad, made.wgrad) == ("fast", "accurate", "accurate")


def test_formats() -> None:
    """The three formats, their string values and the two directions."""
    e4m3, e5m2, hybrid = octavo.FP8Format.E4M3, octavo.FP8Format.E5M2, octavo.FP8Format.HYBRID
    assert [f.value for f in (e4m3, e5m2, hybrid)] == ["e4m3", "e5m2", "hybrid"]
    assert [f.fwd() for f in (e4m3, e5m2, hybrid)] == [e4m3, e5m2, e4m3]
    assert [f.bwd() for f in (e4m3, e5m2, hybrid)] == [e4m3, e5m2, e5m2]
    assert octavo.FP8_MAX[e4m3] == 448.0 and octavo.FP8_MAX["e5m2"] == 57344.0


WRONG = [
    ("history_len", 0),
    ("history_len", -1),
    ("history_len", 1.5),
    ("history_len", "16"),
    ("history_len", True),
    ("history_len", None),
    ("margin", float("nan")),
    ("margin", float("inf")),
    ("margin", "2"),
    ("margin", None),
    ("algorithm", "mean"),
    ("algorithm", None),
    ("power_of_two", "yes"),
    ("power_of_two", 1),
    ("forward", "slow"),
    ("dgrad", True),
    ("wgrad", None),
]


@pytest.mark.parametrize("argument", WRONG, ids=str)
def test_t14_wrong_arguments_raise_at_construction(argument: tuple[str, object]) -> None:
    """One clear error that names the argument and the value."""
    name, value = argument
    recipes = RECIPES if name not in ("history_len", "algorithm") else [octavo.DelayedScaling]
    for recipe in recipes:
        with pytest.raises((TypeError, ValueError)) as caught:
            recipe(**{name: value})
        assert name in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize("name", ["amax_history_len", "interval", "fp8_format", "reduce_amax"])
def test_t14_unknown_arguments_raise(name: str) -> None:
    """Nothing is accepted and ignored."""
    for recipe in RECIPES:
        with pytest.raises(TypeError, match=name):
            recipe(**{name: 16})
    with pytest.raises(TypeError):
        octavo.DynamicScaling(history_len=16)


# The region's arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("delayed", octavo.DelayedScaling()),
        ("current", octavo.DynamicScaling()),
        ("dynamic", octavo.DynamicScaling()),
        ("tensorwise", octavo.DynamicScaling()),
    ],
)
def test_recipes_by_name(name: str, recipe: octavo.FP8Recipe) -> None:
    """Each name gives its recipe with default arguments."""
    with octavo.fp8_autocast(recipe=name):
        assert octavo.fp8_state().recipe == recipe


def test_old_arguments_make_the_recipe() -> None:
    """update_interval is the window's length; it and margin apply where no recipe is given."""
    with octavo.fp8_autocast():
        assert octavo.fp8_state().recipe == octavo.DelayedScaling(16, 0)
    with octavo.fp8_autocast(True, 4):
        assert octavo.fp8_state().recipe == octavo.DelayedScaling(4, 0)
    with octavo.fp8_autocast(update_interval=8, margin=2):
        assert octavo.fp8_state().recipe == octavo.DelayedScaling(8, 2)
    with octavo.fp8_autocast(fp8_format=octavo.FP8Format.E4M3):
        assert octavo.fp8_state().fp8_format == octavo.FP8Format.E4M3


@pytest.mark.parametrize("arguments", [{"update_interval": 4}, {"margin": 1}, {"update_interval": 4, "margin": 1}])
def test_old_arguments_raise_beside_a_recipe(arguments: dict) -> None:
    """Two answers to one question are an error that names the argument."""
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        octavo.fp8_autocast(recipe=octavo.DelayedScaling(), **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"recipe": "bogus"},
        {"recipe": 3},
        {"recipe": octavo.DelayedScaling},
        {"fp8_format": "e3m4"},
        {"fp8_format": 8},
        {"update_interval": 0},
        {"update_interval": 2.5},
        {"margin": "2"},
        {"exclude": 3},
        {"exclude": ["lm_head"]},
        {"include_float32": "yes"},
        {"bogus": 1},
    ],
    ids=str,
)
def test_wrong_arguments_of_the_region_raise(arguments: dict) -> None:
    """At the call, not at the first linear, and nothing is left on."""
    with pytest.raises((TypeError, ValueError)) as caught:
        octavo.fp8_autocast(**arguments)
    assert next(iter(arguments)) in str(caught.value)
    assert not octavo.fp8_state().enabled


def test_transformer_engine_argument_order() -> None:
    """fp8_autocast(True, False) is another library's (enabled, calibrating): one clear error, not a window of 0."""
    with pytest.raises(TypeError, match="update_interval") as caught:
        octavo.fp8_autocast(True, False)
    assert "TransformerEngine" in str(caught.value)
    with pytest.raises(TypeError, match="update_interval"):
        octavo.fp8_autocast(True, True)


def test_transformer_engine_recipe() -> None:
    """A recipe object of the other library gives one error that says what to use instead."""
    theirs = type("DelayedScaling", (), {"__module__": "transformer_engine.common.recipe", "margin": 0})
    with pytest.raises(TypeError, match=r"octavo\.DelayedScaling"):
        octavo.fp8_autocast(recipe=theirs())
    with pytest.raises(TypeError, match=r"octavo\.DelayedScaling"):
        octavo.fp8_autocast(True, recipe=theirs())
