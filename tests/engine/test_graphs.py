"""Graphs of custom losses: what is accepted, and what is refused before anything runs."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from contract.requirements import proves

from halteres.engine.loss_graphs import (
    FUNCTIONS,
    MAX_INPUTS,
    MAX_METRICS,
    MAX_NODES,
    MAX_VALUES,
    METHODS,
    check_custom,
    checked,
)
from halteres.engine.protocol import CustomLoss, LossSpec
from halteres.engine.torch import graph_operations
from halteres.errors import InvalidData

from .custom_losses import LOGPROBS, handmade_wire, node, wire

GRAPH, INPUTS = handmade_wire(node("sum", LOGPROBS, op="call_method", name="total"))
"""The smallest loss."""


def policy_gradient(logprobs: torch.Tensor, advantages: torch.Tensor) -> Any:
    loss = -(logprobs * advantages).sum()
    return loss, {"custom/pg-loss:sum": loss, "custom/advantage:mean": advantages.mean()}


def refused(graph: Any, inputs: Any = None) -> str:
    with pytest.raises(InvalidData) as caught:
        checked(graph, INPUTS if inputs is None else inputs)
    return caught.value.sentence


def test_what_the_sdk_sends_is_accepted_and_keeps_its_order() -> None:
    inputs, graph = wire(policy_gradient, logprobs=1, advantages=1)
    loss = checked(graph, inputs)
    assert loss.inputs == (("logprobs", 1), ("advantages", 1))
    assert [one.target for one in check_custom(loss)] == [one["target"] for one in graph["nodes"]]


def test_it_crosses_the_engine_link_unchanged() -> None:
    inputs, graph = wire(policy_gradient, logprobs=2, advantages=2)
    spec = LossSpec(name="custom", custom=checked(graph, inputs))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=LossSpec)
    assert again == spec
    assert check_custom(again.custom or CustomLoss(inputs=(), nodes=()))


def test_every_name_has_a_function_and_every_function_a_name() -> None:
    assert set(graph_operations.FUNCTIONS) == FUNCTIONS
    assert set(graph_operations.METHODS) == METHODS


def test_names_are_those_of_torch() -> None:
    for name in FUNCTIONS:
        if name.startswith("torch."):
            assert callable(operator.attrgetter(name.removeprefix("torch."))(torch)), name
    assert all(callable(getattr(torch.Tensor, name)) for name in METHODS)


@proves("custom:whitelist")
def test_nothing_that_changes_its_argument_leaves_torch_or_reads_elsewhere_is_among_them() -> None:
    last = {name.rpartition(".")[2] for name in FUNCTIONS} | METHODS
    assert {name for name in last if name.endswith("_")} == {"and_", "or_"}
    assert not last & {
        "backward", "item", "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "as_strided", "set", "resize",
        "register_hook", "apply", "map", "empty", "empty_like", "new_empty", "new_tensor", "from_file", "load", "save",
        "rand", "randn", "bernoulli", "multinomial", "nonzero", "unique", "bincount", "one_hot", "svd", "inverse",
        "grad", "requires_grad", "cuda", "share_memory", "pin_memory", "eval", "exec", "compile", "jit", "call_method",
        "methodcaller", "attrgetter", "setitem", "delitem", "import",
    }  # fmt: skip


BAD_NODES: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown function": (node("torch.load", "/etc/passwd"), r"Node 'x' \(torch\.load\).*function"),
    "a function of another module": (node("os.system", "true"), r"\(os\.system\)"),
    "a builtin": (node("builtins.eval", "1"), r"\(builtins\.eval\)"),
    "a method in place": (node("add_", LOGPROBS, 1, op="call_method"), "It changes its argument; use add"),
    "item": (node("item", LOGPROBS, op="call_method"), "Keep every value a tensor"),
    "backward": (node("backward", LOGPROBS, op="call_method"), "its gradient is computed here"),
    "a dunder method": (node("__reduce_ex__", LOGPROBS, 2, op="call_method"), "__reduce_ex__"),
    "einsum": (node("torch.functional.einsum", "i,i->", LOGPROBS, LOGPROBS), "matmul"),
    "a function as a method": (node("torch.exp", LOGPROBS, op="call_method"), "method"),
    "__class__": (node("getattr", LOGPROBS, "__class__"), "only the attributes.*'__class__'"),
    "data": (node("getattr", LOGPROBS, "data"), "'data'"),
    "grad": (node("getattr", LOGPROBS, "grad"), "'grad'"),
    "getattr with a default": (node("getattr", LOGPROBS, "shape", None), "only the attributes"),
    "getattr of a text": (node("getattr", "x", "shape"), "only the attributes"),
    "getattr by a list": (node("getattr", LOGPROBS, ["shape"]), "only the attributes"),
    "getattr by a node": (node("getattr", LOGPROBS, LOGPROBS), "only the attributes"),
    "out": (node("torch.exp", LOGPROBS, out=LOGPROBS), "'out'"),
    "inplace": (node("torch.nn.functional.relu", LOGPROBS, inplace=True), "'inplace'"),
    "an unknown argument": (node("torch.div", LOGPROBS, 2, rounding_mode="trunc"), "'rounding_mode'"),
    "a later node": (node("torch.exp", {"ref": "total"}), "refers to 'total'"),
    "itself": (node("torch.exp", {"ref": "x"}), "refers to 'x'"),
    "no node": (node("torch.exp", {"ref": "nowhere"}), "refers to 'nowhere'"),
    "within a list": (node("torch.cat", [LOGPROBS, {"tuple": [{"ref": "nowhere"}]}]), "refers to 'nowhere'"),
    "a name taken": (node("torch.exp", LOGPROBS, name="logprobs"), "name of its own"),
    "a name of other signs": (node("torch.exp", LOGPROBS, name="a b"), "name of its own"),
    "a long name": (node("torch.exp", LOGPROBS, name="a" * 200), "name of its own"),
    "an object of two keys": (node("torch.exp", {"ref": "logprobs", "dtype": "int64"}), "'ref', 'dtype'"),
    "an unknown object": (node("torch.exp", {"pickle": "gAR9"}), "'pickle'"),
    "an object of none": (node("torch.exp", {}), "no key"),
    "a dict": (node("torch.exp", {"dict": {"a": 1}}), "'dict'"),
    "an unknown dtype": (node("float", LOGPROBS, {"dtype": "complex64"}, op="call_method"), "'dtype'"),
    "an unknown float": (node("torch.exp", {"float": "1e5"}), "'float'"),
    "a short slice": (node("operator.getitem", LOGPROBS, {"slice": [1, 2]}), "'slice'"),
    "a wide integer": (node("torch.zeros", 2**63), "int out of range"),
    "a long text": (node("torch.exp", "x" * 100_000), "not allowed as an argument"),
    "deep nesting": (node("torch.exp", [[[[[[[[[[1]]]]]]]]]]), "nested more than"),
    "many values": (node("torch.cat", [LOGPROBS] * MAX_VALUES), f"{MAX_VALUES + 1} values"),
    "call_module": (node("linear", LOGPROBS, op="call_module"), "call_module"),
    "get_attr": (node("weight", op="get_attr"), "get_attr"),
    "no name": ({"op": "call_function", "target": "torch.exp"}, "name"),
}


@pytest.mark.parametrize("case", BAD_NODES)
@proves("custom:whitelist")
def test_a_node_that_is_not_allowed_is_named_with_its_target(case: str) -> None:
    bad, says = BAD_NODES[case]
    nodes = GRAPH["nodes"]
    said = refused({**GRAPH, "nodes": [nodes[0], bad, *nodes[1:]]})
    assert len(said) < 1000
    with pytest.raises(InvalidData, match=says):
        raise InvalidData(said)
    assert f"'{str(bad.get('name', 1))[:100]}'" in said


def output(returned: Any) -> dict[str, Any]:
    return {**GRAPH, "nodes": [*GRAPH["nodes"][:-1], node("output", returned, name="output", op="output")]}


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ({"ref": "total"}, "tuple of the loss"),
        ({"tuple": [{"ref": "total"}]}, "tuple of the loss"),
        ({"tuple": [1.0, {"dict": {}}]}, "tuple of the loss"),
        ({"tuple": [{"ref": "total"}, {}]}, "tuple of the loss"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/a:sum": 1}}]}, "tuple of the loss"),
        ({"tuple": [{"ref": "elsewhere"}, {"dict": {}}]}, "refers to 'elsewhere'"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/a:sum": {"ref": "elsewhere"}}}]}, "refers to 'elsewhere'"),
        ({"tuple": [{"ref": "total"}, {"dict": {"loss:sum": {"ref": "total"}}}]}, "metric 'loss:sum'"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/a:max": {"ref": "total"}}}]}, "metric 'custom/a:max'"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/a:b:sum": {"ref": "total"}}}]}, "metric 'custom/a:b:sum'"),
        ({"tuple": [{"ref": "total"}, {"dict": {"custom/A:sum": {"ref": "total"}}}]}, "metric 'custom/A:sum'"),
        ({"tuple": [{"ref": "total"}, {"dict": {f"custom/{'a' * 65}:sum": {"ref": "total"}}}]}, "1 to 64"),
        (
            {
                "tuple": [
                    {"ref": "total"},
                    {"dict": {f"custom/{i}:sum": {"ref": "total"} for i in range(MAX_METRICS + 1)}},
                ]
            },
            f"returns {MAX_METRICS + 1} metrics",
        ),
    ],
)
def test_a_graph_returns_a_loss_and_named_metrics(returned: Any, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        checked(output(returned), INPUTS)


def test_a_list_of_loss_and_metrics_will_do() -> None:
    """The SDK lets a function return a list."""
    assert checked(output([{"ref": "total"}, {"dict": {"custom/a-b.c/d_1:mean": {"ref": "total"}}}]), INPUTS)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([], "0 inputs"),
        ([{"name": "logprobs", "rank": 1}] * 2, "'logprobs' of rank 1 cannot be used"),
        ([{"name": "weights", "rank": 1}], "first input must be logprobs"),
        ([{"name": "logprobs", "rank": 0}], "first input must be logprobs"),
        ([{"name": "logprobs", "rank": 3}], "no graph"),
        ([{"name": "logprobs", "rank": 1}, {"name": "Weights", "rank": 1}], "'Weights'"),
        ([{"name": "logprobs", "rank": 1}, {"name": "9w", "rank": 1}], "'9w'"),
        ([{"name": "logprobs", "rank": 1}, {"name": "a" * 65, "rank": 1}], "1 to 64"),
        ([{"name": "logprobs", "rank": 1}, {"name": "w", "rank": 1}], "placeholders are not its inputs"),
        ([{"name": "logprobs", "rank": 1}] + [{"name": f"i{i}", "rank": 1} for i in range(MAX_INPUTS)], "17 inputs"),
        ("logprobs", "no graph"),
    ],
)
def test_inputs_are_named_and_ranked(inputs: Any, says: str) -> None:
    assert says in refused(GRAPH, inputs)


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        ({"format": 2, "nodes": GRAPH["nodes"]}, "Invalid enum value 2"),
        ({"format": 1}, "nodes"),
        ([], "no graph"),
        ({"format": 1, "nodes": []}, "placeholders"),
        ({"format": 1, "nodes": GRAPH["nodes"][:-1]}, "one output node"),
        ({"format": 1, "nodes": [*GRAPH["nodes"], GRAPH["nodes"][-1]]}, "one output node"),
        ({"format": 1, "nodes": [*GRAPH["nodes"], node("torch.exp", LOGPROBS)]}, "one output node"),
        ({"format": 1, "nodes": [GRAPH["nodes"][0]] * 100_000}, f"100000 nodes. It may have {MAX_NODES}"),
        ({"format": 1, "nodes": [{**GRAPH["nodes"][0], "args": [1]}, *GRAPH["nodes"][1:]]}, "no default"),
    ],
)
def test_a_graph_has_a_form(graph: Any, says: str) -> None:
    assert says in refused(graph)


@proves("custom:server-side")
def test_the_captured_request_of_the_sdk_is_accepted() -> None:
    """Field for field what tinker 0.38.0 sent for -(logprobs * weights).sum()."""
    body = json.loads((Path(__file__).parent / "custom_loss_0_38_0.json").read_text())
    assert [one["op"] for one in checked(body["graph"], body["inputs"]).nodes][-1] == "output"
