"""Graphs of custom losses: what a client may send.

Owns: the check of such a graph, node by node, before anybody runs it; the forms that arguments may have; its value,
`CustomLoss`.
Never: computes, imports or evaluates anything that a graph names: names are looked up in a list of ours.

A graph is data: nodes in order, each naming an operation and its arguments.

Source: format 1 of tinker SDK 0.38.0, types/custom_loss_graph.py and lib/public_interfaces/custom_loss.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from halteres.engine.loss_graphs.names import ATTRIBUTES, DTYPES, FUNCTIONS, KEYWORDS, METHODS, OFF, PLACEMENT
from halteres.engine.protocol import CustomLoss
from halteres.errors import InvalidData, nearest

MAX_VALUES = 1024  # in one node's arguments
MAX_DEPTH = 8  # of lists within lists
MAX_TEXT = 64


def check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse arguments that are not of the forms above, or refer to a node that is not among the known ones.

    Raises:
        InvalidData: as said; its sentence begins with `where`.
    """
    leaves = [leaf for value in (*args, *kwargs.values()) for leaf in _leaves(value, where, 0)]
    if len(leaves) > MAX_VALUES:
        raise InvalidData(f"{where} has {len(leaves)} values in its arguments.", f"It may have {MAX_VALUES}.")
    check_references([name for kind, name in leaves if kind == "ref"], known, where)
    for key, value in kwargs.items():
        if key not in KEYWORDS | PLACEMENT | OFF or (key in OFF and value not in (None, False)):
            raise InvalidData(f"{where}: the argument '{key[:100]}' is not allowed here.")


def check_attribute(args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse an attribute that a graph may not read.

    Raises:
        InvalidData: it names those that it may.
    """
    kinds = [kind for value in args for kind, _ in _leaves(value, where, 0)]
    if kinds != ["ref", "plain"] or kwargs or args[1] not in ATTRIBUTES:
        wanted = _told(args[1]) if len(args) > 1 else "nothing"
        raise InvalidData(
            f"{where}: only the attributes {', '.join(sorted(ATTRIBUTES))} can be read.", f"This one reads {wanted}."
        )


def check_references(names: Sequence[Any], known: Collection[str], where: str) -> None:
    """Refuse names that no node before this one has.

    Raises:
        InvalidData: it names the first of them.
    """
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InvalidData(f"{where} refers to '{str(name)[:100]}'.", "No node before it has that name.")


def _leaves(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The values within an argument, each with its kind."""
    if depth > MAX_DEPTH:
        raise InvalidData(f"{where}: an argument is nested more than {MAX_DEPTH} deep.")
    kind, held = "plain", value
    if isinstance(value, list):
        kind = "list"
    elif isinstance(value, dict):
        kind, held = _object(value, where)
    elif not _is_plain(value):
        raise InvalidData(f"{where}: {_told(value)} is not allowed as an argument.")
    yield kind, held
    for one in held if kind in ("list", "tuple", "slice") else ():
        yield from _leaves(one, where, depth + 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _object(value: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The one key of an object, and what it holds."""
    (kind, held), *others = [*value.items()] or [("", None)]
    sound = {
        "ref": isinstance(held, str),
        "tuple": isinstance(held, list),
        "slice": isinstance(held, list) and len(held) == 3,
        "ellipsis": held is True,
        "float": held in ("inf", "-inf", "nan"),
        "dtype": isinstance(held, str) and held in DTYPES,
        "device": isinstance(held, str) and len(held) <= MAX_TEXT,
        "layout": held == "strided",
        "memory_format": isinstance(held, str) and len(held) <= MAX_TEXT,
    }
    if others or not sound.get(kind, False):
        raise InvalidData(
            f"{where}: {_told(value)} is not allowed as an argument.", f"Objects have one key, of {', '.join(sound)}."
        )
    return kind, held


def _told(value: Any) -> str:
    """A value as a sentence names it; nothing of it is trusted to be short."""
    if isinstance(value, str):
        return f"'{value[:100]}'"
    if isinstance(value, dict):
        return "an object of " + (", ".join(f"'{str(key)[:30]}'" for key in [*value][:3]) or "no key")
    return f"a {type(value).__name__}" + (" out of range" if isinstance(value, int | float) else "")


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
