"""Graphs of custom losses: what a client may send.

Owns: the check of such a graph, node by node, before anybody runs it; its value, `CustomLoss`.
Never: computes, imports or evaluates anything that a graph names: names are looked up in a list of ours.

A graph is data: nodes in order, each naming an operation and its arguments.

Source: format 1 of tinker SDK 0.38.0, types/custom_loss_graph.py and lib/public_interfaces/custom_loss.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from halteres.engine.graphs.arguments import check_arguments, check_attribute, check_references
from halteres.engine.graphs.names import FUNCTIONS, METHODS
from halteres.engine.protocol import CustomLoss
from halteres.errors import InvalidData, nearest

MAX_NODES = 1000
MAX_INPUTS = 16
MAX_METRICS = 64

_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_OFTEN_TRIED = {
    "item": "Keep every value a tensor, metrics included.",
    "numpy": "Keep every value a tensor, metrics included.",
    "tolist": "Keep every value a tensor, metrics included.",
    "backward": "Return the loss; its gradient is computed here.",
    "einsum": "Write it with * and sum, or with matmul.",
}


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One operation."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class _Input(msgspec.Struct, frozen=True):
    name: str
    rank: Literal[0, 1, 2]


class _Graph(msgspec.Struct, frozen=True):
    nodes: list[dict[str, Any]]
    format: Literal[1] = 1


def checked(graph: object, inputs: object) -> CustomLoss:
    """The custom loss of a `create_custom_loss` request.

    Args:
        graph: its field `graph`: `{"format": 1, "nodes": [...]}`.
        inputs: its field `inputs`: `[{"name": ..., "rank": ...}, ...]`, `logprobs` first.

    Raises:
        InvalidData: the graph holds what is not allowed; the message names node and target.
    """
    try:
        found = msgspec.convert(graph, _Graph)
        named = msgspec.convert(inputs, list[_Input])
    except msgspec.ValidationError as error:
        raise InvalidData("This is no graph of a custom loss.", f"{error}.", "Send format 1 of the SDK.") from error
    custom = CustomLoss(inputs=tuple((one.name, one.rank) for one in named), nodes=tuple(found.nodes))
    check_custom(custom)
    return custom


def check_custom(custom: CustomLoss) -> tuple[Node, ...]:
    """The graph's nodes, in order.

    Raises:
        InvalidData: it holds what is not allowed; the message names node and target.
    """
    _check_inputs(custom.inputs)
    if len(custom.nodes) > MAX_NODES:
        raise InvalidData(
            f"The graph has {len(custom.nodes)} nodes.", f"It may have {MAX_NODES}.", "Simplify the loss."
        )
    nodes = tuple(_node(index, raw) for index, raw in enumerate(custom.nodes))
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != [name for name, _ in custom.inputs]:
        raise InvalidData(
            "The graph's placeholders are not its inputs.",
            f"They are {placeholders}; the inputs are {[name for name, _ in custom.inputs]}.",
            "Send both in the same order.",
        )
    if [node.op for node in nodes if node.op == "output"] != ["output"] or nodes[-1].op != "output":
        raise InvalidData("The graph must end with its one output node.")
    known: set[str] = set()
    for node in nodes:
        _check_node(node, known)
        known.add(node.name)
    return nodes


def returned(node: Node) -> tuple[str, dict[str, str]]:
    """The names of the nodes that are the loss, and the metrics by their keys.

    Raises:
        InvalidData: an output node that returns anything else.
    """
    what = f"Node '{node.name}' (output)"
    try:
        (pair,) = node.args
        loss, metrics = pair["tuple"] if isinstance(pair, dict) else pair
        keys = dict(metrics["dict"])
        refs = {key: one["ref"] for key, one in keys.items()}
        name = loss["ref"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(
            f"{what} is not a tuple of the loss and a dict of metrics.", next="Return (loss, {}), all of them tensors."
        ) from error
    if len(refs) > MAX_METRICS:
        raise InvalidData(f"{what} returns {len(refs)} metrics.", f"It may return {MAX_METRICS}.")
    for key in refs:
        if not _METRIC.fullmatch(key):
            raise InvalidData(
                f"{what} returns a metric '{key[:100]}'.",
                "Metrics are named custom/NAME:sum or custom/NAME:mean; NAME has 1 to 64 of a-z 0-9 _ . / -.",
            )
    return name, refs


def _check_inputs(inputs: Sequence[tuple[str, int]]) -> None:
    names = [name for name, _ in inputs]
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidData(f"The custom loss has {len(inputs)} inputs.", f"It may have 1 to {MAX_INPUTS}.")
    for name, rank in inputs:
        if not _INPUT.fullmatch(name) or names.count(name) > 1 or rank not in (0, 1, 2):
            raise InvalidData(
                f"The input '{name[:100]}' of rank {rank} cannot be used.",
                "Inputs have names of their own, 1 to 64 of a-z 0-9 _ with no digit first, and rank 0, 1 or 2.",
            )
    if names[0] != "logprobs" or inputs[0][1] == 0:
        raise InvalidData(
            "The first input must be logprobs, of rank 1 or 2.", f"It is {names[0]}, rank {inputs[0][1]}."
        )


def _node(index: int, raw: Mapping[str, Any]) -> Node:
    try:
        return msgspec.convert(raw, Node)
    except msgspec.ValidationError as error:
        name, target = str(raw.get("name", index))[:100], str(raw.get("target"))[:100]
        raise InvalidData(f"Node '{name}' ({target}) is not allowed.", f"{error}.") from error


def _check_node(node: Node, known: set[str]) -> None:
    where = f"Node '{node.name[:100]}' ({node.target[:100]})"
    if not _NODE.fullmatch(node.name) or node.name in known:
        raise InvalidData(f"{where}: each node needs a name of its own.", "It is taken, or holds other than A-Z 0-9 _.")
    if node.op == "placeholder":
        if node.args or node.kwargs:
            raise InvalidData(f"{where}: an input has no default.")
    elif node.op == "output":
        check_references([*returned(node)[1].values(), returned(node)[0]], known, where)
    else:
        _check_target(node, where)
        check_arguments(node.args, node.kwargs, known, where)
        if node.target == "getattr" and node.op == "call_function":
            check_attribute(node.args, node.kwargs, where)


def _check_target(node: Node, where: str) -> None:
    allowed, kind = (METHODS, "method") if node.op == "call_method" else (FUNCTIONS, "function")
    if node.target in allowed:
        return
    plain = node.target.rpartition(".")[2]
    if plain.endswith("_") and not plain.endswith("__") and plain.rstrip("_") in METHODS:
        hint = f"It changes its argument; use {plain.rstrip('_')}."
    else:
        guess = nearest(node.target, allowed)
        hint = _OFTEN_TRIED.get(plain) or (f"Did you mean '{guess}'?" if guess else "")
    raise InvalidData(
        f"{where}: a custom loss may not use this {kind}.", "It is not in the list of those that are.", hint
    )
