"""Custom losses as clients make them: Python functions, traced by the real SDK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from halteres.engine.loss_graphs import checked
from halteres.engine.protocol import CustomLoss, LossSpec

Wire = tuple[list[dict[str, Any]], dict[str, Any]]
"""The fields `inputs` and `graph` of a request."""


def wire(function: Callable[..., Any], **ranks: Any) -> Wire:
    """What the SDK sends for this function."""
    handle = trace_loss(function, ranks, "session")
    inputs = [one.model_dump(mode="json") for one in handle.inputs]
    return inputs, encode_graph(handle).model_dump(mode="json")


def traced(function: Callable[..., Any], **ranks: Any) -> CustomLoss:
    inputs, graph = wire(function, **(ranks or {"logprobs": 1}))
    return checked(graph, inputs)


def custom(function: Callable[..., Any], **ranks: Any) -> LossSpec:
    return LossSpec(name="custom", custom=traced(function, **ranks))


def node(target: str, *args: Any, name: str = "x", op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LOGPROBS = {"ref": "logprobs"}


def handmade(*nodes: dict[str, Any], loss: str = "loss") -> CustomLoss:
    """A graph that no SDK would send; its loss is the last node's sum."""
    last = nodes[-1]["name"]
    return checked(*handmade_wire(*nodes, node("sum", {"ref": last}, name=loss, op="call_method")))


def handmade_wire(*nodes: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A graph over logprobs alone that returns its last node."""
    first = node("logprobs", name="logprobs", op="placeholder")
    last = node("output", {"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {}}]}, name="output", op="output")
    return {"format": 1, "nodes": [first, *nodes, last]}, [{"name": "logprobs", "rank": 1}]
