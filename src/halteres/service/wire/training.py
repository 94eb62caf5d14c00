"""Requests of a training sequence, as their clients wrote them and as they are executed.

Source: tinker SDK 0.38.0, proto/request_conv.py; 0.9.0, 0.18.2 and 0.22.7, types/ and resources/training.py. Up to 0.14
a chunk has no type, and what the user did not set is null.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from halteres.engine.protocol import Array, Datum
from halteres.errors import HalteresError, InvalidData
from halteres.losses import STABLE_REINFORCE
from halteres.service.wire import bodies
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.arrays import Budget, Csr, Values, array_of, tensor_of, unknown_dtype
from halteres.service.wire.bodies import Counter, Prompt, Tensor
from halteres.service.wire.codec import HEAD_BYTES, PROTOBUF

T = TypeVar("T")

PASSES = ("forward_backward", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A forward or forward-backward pass as its client asked for it."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float]
    loss_id: str | None  # of the loss named "custom"
    forward_only: bool
    flaw: HalteresError | None  # why its data cannot be used: the future's failure, not the request's


TrainingBody = bodies.CreateModel | bodies.LoadWeights | bodies.OptimStep | bodies.SaveWeights | PassRequest

_BODIES: Mapping[str, type[TrainingBody]] = {
    "create_model": bodies.CreateModel,
    "load_weights": bodies.LoadWeights,
    "optim_step": bodies.OptimStep,
    "save_weights": bodies.SaveWeights,
    "save_weights_for_sampler": bodies.SaveWeights,
    "save_weights_external": bodies.SaveWeights,
}

SEQUENCED = (*PASSES, *_BODIES)
"""Requests that are executed in their model's order; create_model and a load that makes a model are number 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a training run's sequence."""

    id: str  # of its future
    kind: str
    seq: int
    body: TrainingBody
    drawn: Mapping[str, int | list[int]] = field(default_factory=dict[str, "int | list[int]"])

    def of(self, kind: type[T]) -> T:
        """The body, as the request's kind has it."""
        assert isinstance(self.body, kind)  # noqa: S101 - for the type checker
        return self.body


def read_request(kind: str, content_type: str, body: bytes) -> TrainingBody:
    """Parse the body of a request of this kind.

    Raises:
        InvalidData: it does not fit, or has no number in its model's sequence.
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
            f"seq_id is {found.seq_id}.", "The requests of a model are numbered from 1.", "Send its number."
        )
    return found


def address_of(kind: str, content_type: str, body: bytes) -> tuple[str, int] | None:
    """Model and number of a request whose other fields are broken, where they can still be read."""
    binary = kind in PASSES and (content_type == PROTOBUF or not body.lstrip().startswith(b"{"))
    found = _address_in_message(body) if binary else bodies.address_of(body)
    return found if found is not None and found[1] >= 1 else None


def _address_in_message(body: bytes) -> tuple[str, int] | None:
    message = pb.ForwardBackwardRequest()
    for end in range(4, min(len(body), HEAD_BYTES)):  # both come first
        try:
            message.ParseFromString(body[:end])
        except DecodeError:
            continue
        if message.model_id and message.seq_id:
            return message.model_id, message.seq_id
    return None


# Passes as protobuf


def read_pass(body: bytes) -> PassRequest:
    """Parse a `ForwardBackwardRequest`.

    Raises:
        InvalidData: the body is no such message. Unusable datums do not raise: see `PassRequest.flaw`.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidData(
            "The body is not a ForwardBackwardRequest.", f"{error}.", "Send the protobuf message of SDK 0.25 or newer."
        ) from error
    data, flaw = _collected(_datums_in(message))
    newer = {name: value for name, value in message.loss_fn_config_v2.items() if name != "loss_id"}
    for name, value in newer.items():
        if value.WhichOneof("value") != "number":
            flaw = flaw or InvalidData(f"The loss setting '{name[:100]}' is no number.", next="Send a number.")
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        config={**message.loss_fn_config, **{name: value.number for name, value in newer.items()}},
        loss_id=message.loss_fn_config_v2["loss_id"].text if "loss_id" in message.loss_fn_config_v2 else None,
        forward_only=message.forward_only,
        flaw=flaw,
    )


def _collected(datums: Iterator[Datum]) -> tuple[tuple[Datum, ...], HalteresError | None]:
    """The datums of a request; or none, and why they cannot be used."""
    try:
        return tuple(datums), None
    except InvalidData as error:
        return (), error


def _datums_in(message: pb.ForwardBackwardRequest) -> Iterator[Datum]:
    budget, custom = Budget(), message.loss_fn == "custom"
    for index, datum in enumerate(message.data):
        if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
            raise _no_text(index, "image or audio")
        tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
        if len(tokens) % 4:
            raise InvalidData(f"Datum {index}: the tokens are not int32.", f"They have {len(tokens)} bytes.")
        inputs = {
            name: _array(f"Datum {index}: '{name[:100]}'", tensor, budget, scalars=custom and name != "target_tokens")
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
        f"Datum {index} holds a chunk of type {kind}.", "The model reads text tokens only.", "Leave it out."
    )


def _sequences_of(index: int, spans: Iterable[tuple[str | None, int]], num_targets: int, loss: str) -> bytes | None:
    """`Datum.sequences` of a datum's provenance; None where it has none, or the loss reads none.

    Args:
        spans: end to end, which sampled sequence (None: a prompt) so many targets come from.
    """
    if loss != STABLE_REINFORCE or not (found := list(spans)):
        return None
    names, lengths = [name for name, _ in found], [length for _, length in found]
    if min(lengths) < 0 or sum(lengths) != num_targets:
        raise InvalidData(
            f"Datum {index}: the provenance spans of its loss_fn_inputs cover {sum(lengths)} positions.",
            f"It has {num_targets} targets, and spans lie end to end.",
            "Make them with Datum.with_provenance.",
        )
    if "" in names:
        raise InvalidData(f"Datum {index}: a sampled span names no sequence.", next="Send its sequence_id.")
    sampled = dict.fromkeys(name for name in names if name is not None)
    numbers: dict[str | None, int] = {None: 0, **{name: number for number, name in enumerate(sampled, 1)}}
    return np.repeat(np.array([numbers[name] for name in names], np.int32), lengths).tobytes()


def _array(what: str, tensor: pb.Tensor, budget: Budget, *, scalars: bool) -> Array:
    """`scalars`: one value without a shape is a scalar, as a custom loss's inputs of rank 0 are sent."""
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        csr = Csr(*(_numbers_in(what, data, np.int64) for data in (sparse.crow_indices, sparse.col_indices)))
        return array_of(what, _values(what, sparse.values, tensor.dtype), tensor.shape, csr, budget)
    values = _values(what, tensor.dense, tensor.dtype)
    return array_of(what, values, tensor.shape or (() if scalars and len(values) == 1 else None), None, budget)


def _values(what: str, data: bytes, dtype: int) -> Values:
    """Widened to float32 or int64, which are all that an engine reads."""
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
        raise InvalidData(f"{what} has {len(data)} bytes.", f"They are no whole number of values of {size} bytes.")
    return np.frombuffer(data, dtype)


# Passes as JSON, of SDKs before 0.25


class JsonDatum(msgspec.Struct, kw_only=True):
    """One training example."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor] = {}
    loss_fn_input_spans: Any = (
        None  # [{prompt_tokens or sampled_tokens: JsonRun}], read for the one loss that they matter to
    )


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
    """Parse the body of forward_backward, or of forward.

    Raises:
        InvalidData: the body is no such request. Unusable datums do not raise: see `PassRequest.flaw`.
    """
    request = bodies.read(body, JsonPass)
    found = request.forward_input if forward_only else request.forward_backward_input
    if found is None:
        name = "forward_input" if forward_only else "forward_backward_input"
        raise InvalidData(f"The body has no {name}.", next="Send {model_id, seq_id, " + name + "}.")
    data, flaw = _collected(_datums_in_json(found))
    config = found.loss_fn_config or {}
    loss_id = config.get("loss_id")
    return PassRequest(
        model_id=request.model_id,
        seq_id=request.seq_id,
        data=data,
        loss=found.loss_fn,
        config={name: value for name, value in config.items() if isinstance(value, float)},
        loss_id=loss_id if isinstance(loss_id, str) else None,
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
        spans = _spans(index, datum.loss_fn_input_spans) if found.loss_fn == STABLE_REINFORCE else ()
        sequences = _sequences_of(index, spans, len(tokens), found.loss_fn)
        try:
            packed = array("i", tokens).tobytes()
        except OverflowError as error:
            raise InvalidData(f"Datum {index} holds something that is no token id.", f"{error}.") from error
        yield Datum(tokens=packed, inputs=inputs, sequences=sequences)


def _spans(index: int, spans: Any) -> list[tuple[str | None, int]]:
    try:
        found = msgspec.convert(spans or [], list[dict[str, JsonRun | None]])
    except msgspec.ValidationError as error:
        raise InvalidData(f"Datum {index}: its loss_fn_input_spans cannot be read.", f"{error}.") from error
    return [
        (sampled.sequence_id, sampled.length)
        if (sampled := span.get("sampled_tokens"))
        else (None, prompt.length if (prompt := span.get("prompt_tokens")) else 0)
        for span in found
    ]
