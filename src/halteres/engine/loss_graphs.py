"""Graphs of custom losses: what a client may send.

A graph is data: nodes in order, each naming an operation and its arguments. It is checked, node by node, before anybody
runs it; nothing that it names is imported or evaluated: names are looked up in the lists below, and
`engine/torch/graph_operations.py` has the functions behind them. What is not allowed is an InvalidData that names node
and target.

The lists leave out what changes its arguments, makes random numbers, leaves torch, or reads memory that nobody wrote;
what has a result whose size nobody can tell beforehand; what needs a matrix decomposition. Names are those of torch 2:
`_get_qualified_name` of what torch.fx records.

Source: format 1 of tinker SDK 0.38.0, types/custom_loss_graph.py and lib/public_interfaces/custom_loss.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from halteres.engine.protocol import CustomLoss
from halteres.errors import InvalidData, nearest

MAX_NODES = 1000
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_VALUES = 1024  # in one node's arguments
MAX_DEPTH = 8  # of lists within lists
MAX_TEXT = 64


def _names(prefix: str, names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names.split())


_ELEMENTWISE = """
    abs acos acosh asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min clip cos cosh erf erfc exp exp2 expm1
    floor frac lgamma log log10 log1p log2 logaddexp logaddexp2 logit neg negative pow reciprocal relu round rsqrt
    sigmoid sign sin sinh sqrt square tan tanh trunc nan_to_num
    add sub subtract mul multiply div divide true_divide floor_divide remainder fmod maximum minimum fmax fmin hypot
    xlogy lerp
    eq ne gt ge lt le isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_xor bitwise_not
"""

_REDUCTIONS = """
    sum mean prod amax amin max min std var logsumexp norm any all argmax argmin nansum nanmean count_nonzero median
    nanmedian quantile softmax log_softmax cumsum cumprod cummax cummin logcumsumexp
"""

_CHOICE = """
    where gather index_select masked_fill masked_select scatter scatter_add index_add take topk sort argsort narrow
    select diagonal
"""

_SHAPE = """
    reshape flatten unflatten squeeze unsqueeze transpose permute movedim flip roll diff tril triu broadcast_to tile t
    chunk split unbind detach clone numel
"""

_BOTH = " ".join((_ELEMENTWISE, _REDUCTIONS, _CHOICE, _SHAPE, "matmul mm mv bmm dot outer"))

ELEMENTWISE = _names("", _ELEMENTWISE) | _names("", "truediv floordiv mod pos and_ or_ xor invert log_sigmoid")
"""Last parts of names: one result, as large as all arguments together when widened to one shape."""

FACTORIES = _names("torch.", "zeros ones full arange linspace eye")

FUNCTIONS = (
    FACTORIES
    | _names("torch.", _BOTH)
    | _names("torch.", "cat concat stack cosine_similarity zeros_like ones_like full_like")
    | _names("torch.functional.", "norm split")
    | _names(
        "torch.nn.functional.",
        "softmax log_softmax relu silu elu leaky_relu softsign pad normalize mse_loss l1_loss smooth_l1_loss "
        "huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits",
    )
    | _names("torch._C._nn.", "log_sigmoid softplus gelu")
    | _names("torch._C._special.special_", "expit expm1 log1p xlogy")
    | _names("torch._C._linalg.linalg_", "norm vector_norm")
    | _names(
        "operator.",
        "add sub mul truediv floordiv mod pow neg pos abs matmul eq ne lt le gt ge and_ or_ xor invert getitem",
    )
    | _names("math.", "sqrt exp expm1 log log1p log2 log10 pow floor ceil trunc fabs sin cos tan tanh")
    | {"getattr"}
)

METHODS = _names("", _BOTH) | _names(
    "",
    "view view_as reshape_as expand expand_as repeat to type type_as float double half bfloat16 int long bool cpu "
    "contiguous new_zeros new_ones new_full size dim",
)

ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T"})

KEYWORDS = _names(
    "",
    "alpha append approximate atol beta correction decimals delta descending diagonal dim dim0 dim1 dims end "
    "end_dim eps equal_nan exponent fill_value index input k keepdim largest length log_target mask max min mode n nan "
    "neginf negative_slope offset ord other p pad pos_weight posinf prepend q reduction repeats rtol self shape shifts "
    "size sizes sorted split_size_or_sections chunks src stable start start_dim step steps target tensor tensors "
    "threshold unbiased value vec2 mat2 weight x1 x2 x y condition interpolation source sections dtype",
)
"""Keyword arguments that are handed on."""

PLACEMENT = _names("", "device layout memory_format non_blocking copy _stacklevel")
"""Keyword arguments that are dropped, whatever they say: a graph runs where the engine runs it."""

OFF = _names("", "out inplace size_average reduce requires_grad pin_memory")
"""Keyword arguments that torch.fx records unasked; they must be null or false."""

DTYPES = _names("", "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64 bool")

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
    """
    try:
        nodes = msgspec.convert(graph, _Graph).nodes
        declared = msgspec.convert(inputs, list[_Input])
    except msgspec.ValidationError as error:
        raise InvalidData("This is no graph of a custom loss.", f"{error}.", "Send format 1 of the SDK.") from error
    custom = CustomLoss(inputs=tuple((one.name, one.rank) for one in declared), nodes=tuple(nodes))
    check_custom(custom)
    return custom


def check_custom(custom: CustomLoss) -> tuple[Node, ...]:
    """The graph's nodes, in order."""
    _check_inputs(custom.inputs)
    if len(custom.nodes) > MAX_NODES:
        raise InvalidData(
            f"The graph has {len(custom.nodes)} nodes.", f"It may have {MAX_NODES}.", "Simplify the loss."
        )
    nodes: list[Node] = []
    for index, raw in enumerate(custom.nodes):
        try:
            nodes.append(msgspec.convert(raw, Node))
        except msgspec.ValidationError as error:
            name, target = str(raw.get("name", index))[:100], str(raw.get("target"))[:100]
            raise InvalidData(f"Node '{name}' ({target}) is not allowed.", f"{error}.") from error
    placeholders, inputs = [node.target for node in nodes if node.op == "placeholder"], [n for n, _ in custom.inputs]
    if placeholders != inputs:
        raise InvalidData(
            "The graph's placeholders are not its inputs.",
            f"They are {placeholders}; the inputs are {inputs}.",
            "Send both in the same order.",
        )
    if [node.op for node in nodes if node.op == "output"] != ["output"] or nodes[-1].op != "output":
        raise InvalidData("The graph must end with its one output node.")
    known: set[str] = set()
    for node in nodes:
        _check_node(node, known)
        known.add(node.name)
    return tuple(nodes)


def returned(node: Node) -> tuple[str, dict[str, str]]:
    """The names of the nodes that are the loss, and the metrics by their keys."""
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


def _check_node(node: Node, known: Collection[str]) -> None:
    where = f"Node '{node.name[:100]}' ({node.target[:100]})"
    if not _NODE.fullmatch(node.name) or node.name in known:
        raise InvalidData(f"{where}: each node needs a name of its own.", "It is taken, or holds other than A-Z 0-9 _.")
    if node.op == "placeholder":
        if node.args or node.kwargs:
            raise InvalidData(f"{where}: an input has no default.")
    elif node.op == "output":
        loss, metrics = returned(node)
        _check_references([*metrics.values(), loss], known, where)
    else:
        _check_target(node, where)
        _check_arguments(node, known, where)


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


def _check_arguments(node: Node, known: Collection[str], where: str) -> None:
    leaves = [leaf for value in (*node.args, *node.kwargs.values()) for leaf in _leaves(value, where, 0)]
    if len(leaves) > MAX_VALUES:
        raise InvalidData(f"{where} has {len(leaves)} values in its arguments.", f"It may have {MAX_VALUES}.")
    _check_references([name for kind, name in leaves if kind == "ref"], known, where)
    for key, value in node.kwargs.items():
        if key not in KEYWORDS | PLACEMENT | OFF or (key in OFF and value not in (None, False)):
            raise InvalidData(f"{where}: the argument '{key[:100]}' is not allowed here.")
    if node.target == "getattr" and node.op == "call_function":
        reads_attribute = [kind for kind, _ in leaves] == ["ref", "plain"] and not node.kwargs
        if not reads_attribute or node.args[1] not in ATTRIBUTES:
            attribute = _described(node.args[1]) if len(node.args) > 1 else "nothing"
            raise InvalidData(
                f"{where}: only the attributes {', '.join(sorted(ATTRIBUTES))} can be read.",
                f"This one reads {attribute}.",
            )


def _check_references(names: Sequence[Any], known: Collection[str], where: str) -> None:
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise InvalidData(f"{where} refers to '{str(name)[:100]}'.", "No node before it has that name.")


def _leaves(value: Any, where: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise InvalidData(f"{where}: an argument is nested more than {MAX_DEPTH} deep.")
    kind, content = "plain", value
    match value:
        case list():
            kind = "list"
        case dict():
            kind, content = _object(value, where)
        case str() if len(value) <= MAX_TEXT:
            pass
        case int() if abs(value) < 2**63:
            pass
        case float() if math.isfinite(value):
            pass
        case None:
            pass
        case _:
            raise InvalidData(f"{where}: {_described(value)} is not allowed as an argument.")
    yield kind, content
    for one in content if kind in ("list", "tuple", "slice") else ():
        yield from _leaves(one, where, depth + 1)


def _object(value: Mapping[str, Any], where: str) -> tuple[str, Any]:
    (kind, content), *others = [*value.items()] or [("", None)]
    sound = {
        "ref": isinstance(content, str),
        "tuple": isinstance(content, list),
        "slice": isinstance(content, list) and len(content) == 3,
        "ellipsis": content is True,
        "float": content in ("inf", "-inf", "nan"),
        "dtype": isinstance(content, str) and content in DTYPES,
        "device": isinstance(content, str) and len(content) <= MAX_TEXT,
        "layout": content == "strided",
        "memory_format": isinstance(content, str) and len(content) <= MAX_TEXT,
    }
    if others or not sound.get(kind, False):
        raise InvalidData(
            f"{where}: {_described(value)} is not allowed as an argument.",
            f"Objects have one key, of {', '.join(sound)}.",
        )
    return kind, content


def _described(value: Any) -> str:
    """A value as a sentence names it; nothing of it is trusted to be short."""
    if isinstance(value, str):
        return f"'{value[:100]}'"
    if isinstance(value, dict):
        return "an object of " + (", ".join(f"'{str(key)[:30]}'" for key in [*value][:3]) or "no key")
    return f"a {type(value).__name__}" + (" out of range" if isinstance(value, int | float) else "")
