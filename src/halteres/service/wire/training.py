"""Requests of a training sequence and the arrays in them, as their clients wrote them and as they
are executed.

Arrays are dense or sparse (CSR: N rows of K cells). Up to SDK 0.14 a chunk has no type, and what
the user did not set is null. Source: tinker SDK 0.38.0, proto/request_conv.py; 0.9.0, 0.18.2 and
0.22.7, types/ and resources/training.py.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from halteres.engine.protocol import Array, Datum
from halteres.errors import HalteresError, InvalidData
from halteres.losses import STABLE_REINFORCE
from halteres.service.wire import bodies
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.bodies import HEAD_BYTES, PROTOBUF, Counter, Drawn, Prompt, Tensor
from halteres.service.wire.parts import check_protobuf

T = TypeVar("T")


MAX_CELLS = 2**25
"""Cells of all sparse arrays of one request, written out: 256 MiB of token ids, as much as a dense
body may hold.
"""

Values = npt.NDArray[Any]


class Budget:
    """How many cells the sparse arrays of one request may still have."""

    def __init__(self, cells: int = MAX_CELLS) -> None:
        self._left = cells

    def take(self, what: str, cells: int) -> None:
        """Use some of it."""
        self._left -= cells
        if self._left < 0:
            raise InvalidData(
                f"{what} has {cells} cells when it is written out.",
                f"The sparse arrays of one request may have {MAX_CELLS} together.",
                "Send fewer columns, or the datums in several requests.",
            )


@dataclass(frozen=True, slots=True)
class Csr:
    """Where the values of a sparse array lie: `crow` has N + 1 row pointers, `col` a column per
    value.
    """

    crow: Values  # int64
    col: Values  # int64

    def places(self, columns: int) -> Values:
        """The place of each value in the array written out row by row; the pointers fit it."""
        return np.repeat(np.arange(len(self.crow) - 1), np.diff(self.crow)) * columns + self.col


def array_of(
    what: str,
    values: Values,
    shape: Sequence[int] | None,
    csr: Csr | None,
    budget: Budget,
    pad: int = 0,
) -> Array:
    """An array of float32 or int64 values, without a shape of one dimension; of a sparse one, cells
    that are not listed hold `pad`. InvalidData where the shape does not fit, or it is broken or too
    large.
    """
    shape = (len(values),) if shape is None else tuple(shape)
    shown = f"[{', '.join(map(str, shape[:4]))}{', …' if len(shape) > 4 else ''}]"
    if csr is not None:
        if len(shape) != 2 or min(shape) < 0:
            raise InvalidData(
                f"{what} is sparse, of shape {shown}.", "A sparse array has the shape [N, K]."
            )
        budget.take(what, math.prod(shape))
        places = _places(what, len(values), *shape, csr)
        full = np.full(math.prod(shape), pad, values.dtype)
        full[places] = values
        values = full
    if len(shape) > 2 or any(size < 0 for size in shape) or math.prod(shape) != len(values):
        raise InvalidData(
            f"{what} has {len(values)} values, not the shape {shown}.",
            next="Send shape [N] or [N, K], and as many values.",
        )
    return Array(
        dtype="int64" if values.dtype.kind == "i" else "float32", shape=shape, data=values.tobytes()
    )


def _places(what: str, count: int, rows: int, columns: int, csr: Csr) -> Values:
    crow, col = csr.crow, csr.col
    inside = ((crow >= 0) & (crow <= count)).all() and (np.diff(crow) >= 0).all()
    if len(crow) != rows + 1 or not inside or (crow[0], crow[-1]) != (0, count):
        raise InvalidData(
            f"{what}: its row pointers do not fit.",
            f"They must be {rows + 1} numbers, from 0 up to the number of its values, {count}.",
        )
    if len(col) != count or ((col < 0) | (col >= columns)).any():
        raise InvalidData(
            f"{what}: its columns do not fit.", f"Each of {count} values needs one of {columns}."
        )
    places = csr.places(columns)
    if len(np.unique(places)) != count:
        raise InvalidData(f"{what} lists a cell twice.", next="List each cell once.")
    return places


def unknown_dtype(what: str, dtype: str) -> InvalidData:
    """The refusal of a dtype."""
    return InvalidData(
        f"{what} has the dtype '{dtype[:50]}'.", "Arrays are float32 or int64.", "Convert it."
    )


def tensor_of(what: str, tensor: Tensor, budget: Budget, pad: int = 0) -> Array:
    """As `array_of`, of an array as JSON writes it."""
    values = _numbers(what, tensor.data, tensor.dtype)
    return array_of(what, values, tensor.shape, csr_of(what, tensor), budget, pad)


def csr_of(what: str, tensor: Tensor) -> Csr | None:
    """Where a sparse array's values lie; None for a dense one."""
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is None and col is None:
        return None
    if crow is None or col is None or tensor.shape is None:
        raise InvalidData(
            f"{what} is sparse without its shape, rows or columns.",
            next="Send all of them, or none.",
        )
    return Csr(_numbers(what, crow, "int64"), _numbers(what, col, "int64"))


def _numbers(what: str, data: Sequence[float], dtype: str) -> Values:
    if dtype not in ("float32", "int64"):
        raise unknown_dtype(what, dtype)
    try:
        with np.errstate(over="ignore"):  # infinite then, which every loss refuses
            values = np.asarray(data, np.float32 if dtype == "float32" else None)
    except OverflowError as error:
        raise InvalidData(f"{what} holds a number that {dtype} cannot hold.") from error
    if dtype == "float32":
        return values
    whole = (
        values.dtype.kind == "f"
        and (values == np.floor(values)).all()
        and (np.abs(values) < 2**53).all()
    )
    if not whole and values.dtype.kind != "i":
        raise InvalidData(
            f"{what} holds a number that is no int64.", next="Send whole numbers, or dtype float32."
        )
    return values.astype(np.int64)


PASSES = ("forward_backward", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A forward or forward-backward pass as its client asked for it."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float]
    forward_only: bool
    # why its data cannot be used: the future's failure, not the request's
    flaw: HalteresError | None


TrainingBody = (
    bodies.CreateModel | bodies.LoadWeights | bodies.OptimStep | bodies.SaveWeights | PassRequest
)

_BODIES: Mapping[str, type[TrainingBody]] = {
    "create_model": bodies.CreateModel,
    "load_weights": bodies.LoadWeights,
    "optim_step": bodies.OptimStep,
    "save_weights": bodies.SaveWeights,
    "save_weights_for_sampler": bodies.SaveWeights,
    "save_weights_external": bodies.SaveWeights,
}

SEQUENCED = (*PASSES, *_BODIES)
"""Requests that are executed in their model's order; create_model and a load that makes a model are
number 0.
"""


TAKES_FAMILIES = "takes_families"
"""Of `drawn`: the client of a load cannot say which families of weights are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a training run's sequence."""

    id: str  # of its future
    kind: str
    seq: int
    body: TrainingBody
    drawn: Drawn = field(default_factory=dict[str, int])

    @classmethod
    def read(
        cls, id: str, kind: str, seq: int, content_type: str, body: bytes, drawn: Drawn | None
    ) -> Request:
        """A request as the journal has it; raises as `read_request`."""
        return cls(
            id=id,
            kind=kind,
            seq=seq,
            body=read_request(kind, content_type, body),
            drawn=drawn or {},
        )

    def of(self, kind: type[T]) -> T:
        """The body, as the request's kind has it."""
        assert isinstance(self.body, kind)  # noqa: S101 - for the type checker
        return self.body


def read_request(kind: str, content_type: str, body: bytes) -> TrainingBody:
    """Parse the body of a request of this kind; InvalidData where it does not fit, or has no number
    in its sequence.
    """
    if kind not in PASSES:
        found = bodies.read(body, _BODIES[kind])
    elif content_type == PROTOBUF:
        found = read_pass(body)
    else:
        found = read_json_pass(body, forward_only=kind == "forward")
    # Number 0 is the model's creation: a request that took it would be given that one's future.
    if not isinstance(found, bodies.CreateModel) and found.seq_id is not None and found.seq_id < 1:
        raise InvalidData(
            f"seq_id is {found.seq_id}.",
            "The requests of a model are numbered from 1.",
            "Send its number.",
        )
    return found


def address_of(kind: str, content_type: str, body: bytes) -> tuple[str, int] | None:
    """Model and number of a request whose other fields are broken, where they can still be read."""
    if kind not in PASSES or (content_type != PROTOBUF and body.lstrip().startswith(b"{")):
        found = bodies.address_of(body)
        return found if found is not None and found[1] >= 1 else None
    message = pb.ForwardBackwardRequest()
    for end in range(4, min(len(body), HEAD_BYTES)):  # both come first
        with suppress(DecodeError):
            message.ParseFromString(body[:end])
            if message.model_id and message.seq_id >= 1:
                return message.model_id, message.seq_id
    return None


# Passes as protobuf


def read_pass(body: bytes) -> PassRequest:
    """Parse a `ForwardBackwardRequest`. Unusable datums do not raise: see `PassRequest.flaw`."""
    message = pb.ForwardBackwardRequest()
    check_protobuf(body, cast(Descriptor, message.DESCRIPTOR))
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidData(
            "The body is not a ForwardBackwardRequest.",
            f"{error}.",
            "Send the protobuf message of SDK 0.25 or newer.",
        ) from error
    data, flaw = _collected(_datums_in(message))
    newer = {name: value for name, value in message.loss_fn_config_v2.items() if name != "loss_id"}
    for name, value in newer.items():
        if value.WhichOneof("value") != "number":
            flaw = flaw or InvalidData(
                f"The loss setting '{name[:100]}' is no number.", next="Send a number."
            )
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        config={**message.loss_fn_config, **{name: value.number for name, value in newer.items()}},
        forward_only=message.forward_only,
        flaw=flaw,
    )


def _collected(datums: Iterator[Datum]) -> tuple[tuple[Datum, ...], HalteresError | None]:
    try:
        return tuple(datums), None
    except InvalidData as error:
        return (), error


def _datums_in(message: pb.ForwardBackwardRequest) -> Iterator[Datum]:
    budget = Budget()
    for index, datum in enumerate(message.data):
        if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
            raise _no_text(index, "image or audio")
        tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
        if len(tokens) % 4:
            raise InvalidData(
                f"Datum {index}: the tokens are not int32.", f"They have {len(tokens)} bytes."
            )
        inputs = {
            name: _array(f"Datum {index}: '{name[:100]}'", tensor, budget)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        spans = [
            (span.sampled_tokens.sequence_id, span.sampled_tokens.length)
            if span.WhichOneof("span") == "sampled_tokens"
            else (None, span.prompt_tokens.length)
            for span in datum.loss_fn_input_spans
        ]
        sequences = _sequences_of(index, spans, len(tokens) // 4, message.loss_fn)
        yield Datum(tokens=tokens, inputs=inputs, sequences=sequences)


def _no_text(index: int, kind: str) -> InvalidData:
    return InvalidData(
        f"Datum {index} holds a chunk of type {kind}.",
        "The model reads text tokens only.",
        "Leave it out.",
    )


def _sequences_of(
    index: int, spans: Iterable[tuple[str | None, int]], num_targets: int, loss: str
) -> bytes | None:
    """`Datum.sequences` of a datum's provenance; None where it has none, or the loss reads none.
    The spans lie end to end: which sampled sequence (None: a prompt) so many targets come from.
    """
    if loss != STABLE_REINFORCE or not (found := list(spans)):
        return None
    names, lengths = [name for name, _ in found], [length for _, length in found]
    if min(lengths) < 0 or sum(lengths) != num_targets:
        raise InvalidData(
            f"Datum {index}: the provenance spans of its loss_fn_inputs cover {sum(lengths)} "
            "positions.",
            f"It has {num_targets} targets, and spans lie end to end.",
            "Make them with Datum.with_provenance.",
        )
    if "" in names:
        raise InvalidData(
            f"Datum {index}: a sampled span names no sequence.", next="Send its sequence_id."
        )
    sampled = dict.fromkeys(name for name in names if name is not None)
    numbers: dict[str | None, int] = {
        None: 0,
        **{name: number for number, name in enumerate(sampled, 1)},
    }
    return np.repeat(np.array([numbers[name] for name in names], np.int32), lengths).tobytes()


def _array(what: str, tensor: pb.Tensor, budget: Budget) -> Array:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        csr = Csr(
            *(
                _numbers_in(what, data, np.int64)
                for data in (sparse.crow_indices, sparse.col_indices)
            )
        )
        return array_of(what, _values(what, sparse.values, tensor.dtype), tensor.shape, csr, budget)
    values = _values(what, tensor.dense, tensor.dtype)
    return array_of(what, values, tensor.shape or None, None, budget)


def _values(what: str, data: bytes, dtype: int) -> Values:
    if dtype == pb.DTYPE_FLOAT32:
        return _numbers_in(what, data, np.float32)
    if dtype == pb.DTYPE_INT64:
        return _numbers_in(what, data, np.int64)
    if dtype == pb.DTYPE_INT32:
        return _numbers_in(what, data, np.int32).astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        return (_numbers_in(what, data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise unknown_dtype(what, f"number {dtype}")


def _numbers_in(what: str, data: bytes, dtype: npt.DTypeLike) -> Values:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidData(
            f"{what} has {len(data)} bytes.", f"They are no whole number of values of {size} bytes."
        )
    return np.frombuffer(data, dtype)


# Passes as JSON, of SDKs before 0.25


class JsonDatum(msgspec.Struct, kw_only=True):
    """One training example."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor] = {}
    loss_fn_input_spans: list[dict[str, JsonRun]] = []  # of prompt_tokens or sampled_tokens


class JsonRun(msgspec.Struct, kw_only=True):
    """A run of targets; where in its sequence they stood is not read."""

    sequence_id: str = ""
    length: int = 0


class PassInput(msgspec.Struct, kw_only=True):
    """What a pass computes."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str | None] | None = None


class JsonPass(msgspec.Struct, kw_only=True):
    """POST forward_backward, or forward."""

    model_id: str
    seq_id: Counter
    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None


def read_json_pass(body: bytes, *, forward_only: bool) -> PassRequest:
    """Parse the body of forward_backward, or of forward. Unusable datums do not raise: see
    `PassRequest.flaw`.
    """
    request = bodies.read(body, JsonPass)
    found = request.forward_input if forward_only else request.forward_backward_input
    if found is None:
        name = "forward_input" if forward_only else "forward_backward_input"
        raise InvalidData(f"The body has no {name}.", next="Send {model_id, seq_id, " + name + "}.")
    data, flaw = _collected(_datums_in_json(found))
    config = found.loss_fn_config or {}
    return PassRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=data,
        loss=found.loss_fn,
        config={name: value for name, value in config.items() if isinstance(value, float)},
        forward_only=forward_only,
        flaw=flaw,
    )


def _datums_in_json(found: PassInput) -> Iterator[Datum]:
    budget = Budget()
    for index, datum in enumerate(found.data):
        for chunk in datum.model_input.chunks:
            if chunk.type != "encoded_text":
                raise _no_text(index, f"'{chunk.type[:50]}'")
        tokens = [token for chunk in datum.model_input.chunks for token in chunk.tokens]
        inputs = {
            name: tensor_of(f"Datum {index}: '{name[:100]}'", tensor, budget)
            for name, tensor in datum.loss_fn_inputs.items()
        }
        spans = [
            (sampled.sequence_id, sampled.length)
            if (sampled := span.get("sampled_tokens"))
            else (None, span.get("prompt_tokens", JsonRun()).length)
            for span in datum.loss_fn_input_spans
        ]
        sequences = _sequences_of(index, spans, len(tokens), found.loss_fn)
        try:
            packed = array("i", tokens).tobytes()
        except OverflowError as error:
            raise InvalidData(
                f"Datum {index} holds something that is no token id.", f"{error}."
            ) from error
        yield Datum(tokens=packed, inputs=inputs, sequences=sequences)
