# SPDX-License-Identifier: Apache-2.0
"""Graphs of Dynamo: our op in the place of every linear that is in a region."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from octavo import _opaque_calls
from octavo._settings import settings_of

_LINEARS = (F.linear, torch.ops.aten.linear, torch.ops.aten.linear.default)
_EXCLUDED, _SUBCLASS, _TRANSFORM = "excluded", "tensor subclass", "functorch transform"  # as the report has them


class Region:
    """A region as graphs have it: a text, "" outside of all, and the weights that it leaves alone, by identity."""

    def __init__(self, text: str, excluded: list[torch.Tensor]) -> None:
        self.text = text
        self._excluded = {id(weight): weakref.ref(weight) for weight in excluded}

    def excludes(self, weight: torch.Tensor) -> bool:
        known = self._excluded.get(id(weight))
        if known is not None and known() is weight:
            return True
        return weight._is_view() and self.excludes(weight._base)

    @property
    def excludes_something(self) -> bool:
        return bool(self._excluded)

    def is_alive(self) -> bool:
        return all(weight() is not None for weight in self._excluded.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region):
            return NotImplemented
        same = self.text == other.text and self._excluded.keys() == other._excluded.keys()
        return same and self.is_alive() and other.is_alive()


OUTSIDE = Region("", [])


def put_in_linears(graph: GraphModule, region: Region) -> None:
    """In place. `region` is what surrounds the graph; regions that begin in it are marked in it."""
    _Pass(graph).run(graph, region)


class _Pass:
    def __init__(self, graph: GraphModule) -> None:
        # A tensor of the tracer is one object wherever it goes, also in the graphs of checkpoints.
        self._inputs = _inputs_of(graph)
        self._done: dict[GraphModule, Region] = {}

    def run(self, graph: GraphModule, region: Region) -> None:
        if self._done.setdefault(graph, region) is not region:
            raise NotImplementedError("octavo: a piece of a compiled function is used in two regions; compile it apart")
        regions = [region]
        inputs = _inputs_of(graph)
        transforms = 0
        for node in list(graph.graph.nodes):
            name = _name_of(node)
            if node.target is torch.ops.octavo._begin_region:
                regions.append(_region_of(*node.args))
                graph.graph.erase_node(node)
            elif node.target is torch.ops.octavo._end_region:
                regions.pop()
                graph.graph.erase_node(node)
            elif name.endswith("_increment_nesting"):
                transforms += 1
            elif name.endswith("_decrement_nesting"):
                transforms -= 1
            elif node.op == "call_function" and node.target in _LINEARS:
                operands = _operands_of(node)
                here = regions[-1]
                if here.text and self._is_left_alone(here, operands, inputs, transforms > 0):
                    here = OUTSIDE
                # In a transform a linear that is left alone stays what it is, for functorch to know.
                if here.text or ((len(regions) > 1 or region.text) and transforms == 0):
                    _replace(graph, node, operands, here, inputs)
            elif node.op == "call_function" and regions[-1].text and _opaque_calls.is_opaque(node.target):
                self._replace_inside(node, regions[-1], inputs)
            for inner in _graphs_of(graph, node):
                self.run(inner, regions[-1])
        graph.recompile()

    def _is_left_alone(self, region: Region, operands: list[Any], inputs: dict[int, Node], in_transform: bool) -> bool:
        """Whether it is what it would be outside; then it is counted."""
        values = [_value_of(operand) for operand in operands if isinstance(operand, Node)]
        if region.excludes_something and self._is_excluded(region, operands[1]):
            reason = _EXCLUDED
        elif any(map(is_traceable_wrapper_subclass, values)):
            reason = _SUBCLASS
        elif in_transform:
            reason = _TRANSFORM
        else:
            return False
        computed = _owner(operands[1], inputs)[0] is None and not in_transform
        torch.ops.octavo._left_alone(region.text, reason, values[1].dtype, computed, _compute_type(values[0]))
        return True

    def _replace_inside(self, node: Node, region: Region, inputs: dict[int, Node]) -> None:
        arguments = {**dict(enumerate(node.args)), **node.kwargs}
        leaves = {
            place: region.excludes_something and self._is_excluded(region, argument)
            for place, argument in arguments.items()
            if isinstance(argument, Node) and id(_value_of(argument)) in inputs
        }
        function = node.target

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(enumerate(args)), **kwargs}
            owners = [(given[place], excluded) for place, excluded in leaves.items()]
            linear = functools.partial(_linear_of, owners, region.text)
            return _opaque_calls.with_linear(function, linear)(*args, **kwargs)

        call.__module__ = __name__  # or the graph's code would call the original by its name
        node.target = call

    def _is_excluded(self, region: Region, weight: Node) -> bool:
        """Whether it is, for this call of the graph; others, with other weights, are told apart by a guard."""
        owner, _ = _owner(weight, self._inputs)
        argument = owner.meta.get("grapharg") if owner is not None else None
        if argument is None:
            return False
        excluded = region.excludes(argument.example)
        _guard(argument.source, lambda weight: region.excludes(weight) is excluded)
        return excluded


def _name_of(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _operands_of(node: Node) -> list[Any]:
    """Input, weight and bias of a linear."""
    names = ("input", "weight", "bias")
    return [dict(zip(names, node.args, strict=False), **node.kwargs).get(name) for name in names]


def _replace(graph: GraphModule, node: Node, operands: list[Any], region: Region, inputs: dict[int, Node]) -> None:
    leaf, part = _owner(operands[1], inputs)
    with graph.graph.inserting_before(node):
        made = graph.graph.call_function(torch.ops.octavo._linear.default, (*operands, region.text, leaf, part))
    made.meta = node.meta
    node.replace_all_uses_with(made)
    graph.graph.erase_node(node)


def _compute_type(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.is_floating_point()
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def _linear_of(owners: list[Any], region: str, input: Any, weight: Any, bias: Any = None) -> Any:
    """A linear inside a call whose arguments are known to be inputs of the graph."""
    base = weight._base if weight._is_view() else None
    for owner, excluded in owners:
        if owner is weight or owner is base:
            place = [] if owner is weight else _place_of(weight)
            return torch.ops.octavo._linear(input, weight, bias, OUTSIDE.text if excluded else region, owner, place)
    return torch.ops.octavo._linear(input, weight, bias, region, None, [])


def _place_of(part: torch.Tensor) -> list[int]:
    return [part.storage_offset(), *part.size(), *part.stride()]


def _guard(source: Any, holds: Callable[[torch.Tensor], bool]) -> None:
    def OCTAVO_EXCLUDES(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(holds, ["octavo: excluded or not, as before"], None)

    context = torch._guards.TracingContext.get()
    context.guards_context.dynamo_guards.add(source.make_guard(OCTAVO_EXCLUDES))


def _region_of(number: int) -> Region:
    settings = settings_of(number)
    return Region(settings.region().text(), settings.excluded) if settings.enabled else OUTSIDE


def _value_of(node: Node) -> Any:
    """The tracer's tensor."""
    return node.meta.get("example_value")


def _inputs_of(graph: GraphModule) -> dict[int, Node]:
    inputs = (node for node in graph.graph.nodes if node.op == "placeholder")
    return {id(_value_of(node)): node for node in inputs if isinstance(_value_of(node), torch.Tensor)}


def _graphs_of(graph: GraphModule, node: Node) -> Iterator[GraphModule]:
    """The graphs that a node's operation is given, as checkpoints are."""
    if node.op == "call_function":
        for argument in node.all_input_nodes:
            value = getattr(graph, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(value, GraphModule):
                yield value


def _owner(weight: Any, inputs: dict[int, Node]) -> tuple[Node | None, list[int]]:
    """The input of the graph that a weight is or is a slice of, and which slice: offset, sizes, strides."""
    value = _value_of(weight)
    if not isinstance(value, torch.Tensor):
        return None, []
    if id(value) in inputs:
        return inputs[id(value)], []
    base = value._base if value._is_view() else None
    place = _place_of(value)
    if base is None or id(base) not in inputs or not base.is_leaf or not all(type(n) is int for n in place):
        return None, []
    return inputs[id(base)], place
