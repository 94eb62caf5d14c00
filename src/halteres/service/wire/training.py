"""Requests of a training sequence, as their clients wrote them and as they are executed.

Source: tinker SDK 0.38.0, proto/request_conv.py; 0.9.0, 0.18.2 and 0.22.7, types/ and resources/training.py. Up to 0.14
a chunk has no type, and what the user did not set is null.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
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
from halteres.service.wire.arrays import Budget, Csr, Values, dense, tensor_of, unknown_dtype, written_out
from halteres.service.wire.bodies import Counter, Prompt, Tensor, read
from halteres.service.wire.codec import HEAD_BYTES, PROTOBUF

T = TypeVar("T")


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


def datums_of(
    messages: Iterable[T], datum_of: Callable[[int, T, Budget], Datum]
) -> tuple[tuple[Datum, ...], HalteresError | None]:
    """The datums of a request; or none, and why they cannot be used."""
    budget = Budget()
    try:
        return tuple(datum_of(index, message, budget) for index, message in enumerate(messages)), None
    except InvalidData as error:
        return (), error


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
    loss = message.loss_fn
    data, flaw = datums_of(message.data, lambda index, datum, budget: _datum_of_message(index, datum, budget, loss))
    config: dict[str, float] = {}
    try:
        config = _config(message)
    except InvalidData as error:
        flaw = flaw or error
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        config=config,
        loss_id=message.loss_fn_config_v2["loss_id"].text if "loss_id" in message.loss_fn_config_v2 else None,
        forward_only=message.forward_only,
        flaw=flaw,
    )


def _address_of_pass(body: bytes) -> tuple[str, int] | None:
    """Model and sequence number of a request whose rest is broken, where they can still be read: they come first."""
    message = pb.ForwardBackwardRequest()
    for end in range(4, min(len(body), HEAD_BYTES)):
        try:
            message.ParseFromString(body[:end])
        except DecodeError:
            continue
        if message.model_id and message.seq_id:
            return message.model_id, message.seq_id
    return None


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The numbers of both generations; the newer field wins."""
    newer = {name: value for name, value in message.loss_fn_config_v2.items() if name != "loss_id"}
    for name, value in newer.items():
        if value.WhichOneof("value") != "number":
            raise InvalidData(f"The loss setting '{name[:100]}' is no number.", next="Send a number.")
    return {**message.loss_fn_config, **{name: value.number for name, value in newer.items()}}


def _datum_of_message(index: int, message: pb.Datum, budget: Budget, loss: str) -> Datum:
    chunks = message.model_input
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in chunks):
        raise no_text(index, "image or audio")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(tokens) % 4:
        raise InvalidData(f"Datum {index}: the tokens are not int32.", f"They have {len(tokens)} bytes.")
    inputs = {
        name: _array(
            f"Datum {index}: '{name[:100]}'", tensor, budget, scalars=loss == "custom" and name != "target_tokens"
        )
        for name, tensor in message.loss_fn_inputs.items()
    }
    sequences = sequences_of(index, map(_span, message.loss_fn_input_spans), len(tokens) // 4, loss)
    return Datum(tokens=tokens, inputs=inputs, sequences=sequences)


@dataclass(frozen=True, slots=True)
class Span:
    """A run of targets, in order: which sampled sequence they come from."""

    sequence_id: str | None  # None: a prompt's
    length: int


def _span(message: pb.ProvenanceSpan) -> Span:
    if message.WhichOneof("span") == "sampled_tokens":
        return Span(message.sampled_tokens.sequence_id, message.sampled_tokens.length)
    return Span(None, message.prompt_tokens.length)


def sequences_of(index: int, spans: Iterable[Span], num_targets: int, loss: str) -> bytes | None:
    """`Datum.sequences` of a datum's spans, which lie end to end; None where it has none, or the loss reads none."""
    if loss != STABLE_REINFORCE or not (found := list(spans)):
        return None
    lengths = [span.length for span in found]
    if min(lengths) < 0 or sum(lengths) != num_targets:
        raise InvalidData(
            f"Datum {index}: the provenance spans of its loss_fn_inputs cover {sum(lengths)} positions.",
            f"It has {num_targets} targets, and spans lie end to end.",
            "Make them with Datum.with_provenance.",
        )
    if any(span.sequence_id == "" for span in found):
        raise InvalidData(f"Datum {index}: a sampled span names no sequence.", next="Send its sequence_id.")
    ids = dict.fromkeys(span.sequence_id for span in found if span.sequence_id is not None)
    numbers: dict[str | None, int] = {None: 0, **{one: number for number, one in enumerate(ids, 1)}}
    return np.repeat(np.array([numbers[span.sequence_id] for span in found], np.int32), lengths).tobytes()


def no_text(index: int, kind: str) -> InvalidData:
    """The refusal of a chunk."""
    return InvalidData(
        f"Datum {index} holds a chunk of type {kind}.", "The model reads text tokens only.", "Leave it out."
    )


def _array(what: str, tensor: pb.Tensor, budget: Budget, *, scalars: bool) -> Array:
    """`scalars`: one value without a shape is a scalar, as a custom loss's inputs of rank 0 are sent."""
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        csr = Csr(*(_numbers_in(what, data, np.int64) for data in (sparse.crow_indices, sparse.col_indices)))
        return written_out(what, _values(what, sparse.values, tensor.dtype), tensor.shape, csr, budget)
    values = _values(what, tensor.dense, tensor.dtype)
    return dense(what, values, tensor.shape or (() if scalars and len(values) == 1 else None))


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


class JsonDatum(msgspec.Struct, kw_only=True):
    """One training example."""

    model_input: Prompt
    loss_fn_inputs: dict[str, Tensor] = {}
    loss_fn_input_spans: Any = None  # [JsonSpan], read for the one loss that they matter to


class JsonRun(msgspec.Struct, kw_only=True):
    """A run of targets; where in its sequence they stood is not read."""

    sequence_id: str = ""
    length: int = 0


class JsonSpan(msgspec.Struct, kw_only=True):
    """One of both, as protobuf's JSON writes them."""

    prompt_tokens: JsonRun | None = None
    sampled_tokens: JsonRun | None = None


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
    asked = read(body, JsonPass)
    wanted = asked.forward_input if forward_only else asked.forward_backward_input
    if wanted is None:
        name = "forward_input" if forward_only else "forward_backward_input"
        raise InvalidData(f"The body has no {name}.", next="Send {model_id, seq_id, " + name + "}.")
    loss = wanted.loss_fn
    data, flaw = datums_of(wanted.data, lambda index, datum, budget: _datum_of_json(index, datum, budget, loss))
    config = wanted.loss_fn_config or {}
    loss_id = config.get("loss_id")
    return PassRequest(
        model_id=asked.model_id,
        seq_id=asked.seq_id,
        data=data,
        loss=loss,
        config={name: value for name, value in config.items() if isinstance(value, float)},
        loss_id=loss_id if isinstance(loss_id, str) else None,
        forward_only=forward_only,
        flaw=flaw,
    )


def _datum_of_json(index: int, found: JsonDatum, budget: Budget, loss: str) -> Datum:
    for chunk in found.model_input.chunks:
        if chunk.type != "encoded_text":
            raise no_text(index, f"'{chunk.type[:50]}'")
    tokens = [token for chunk in found.model_input.chunks for token in chunk.tokens]
    inputs = {
        name: tensor_of(f"Datum {index}: '{name[:100]}'", tensor, budget)
        for name, tensor in found.loss_fn_inputs.items()
    }
    spans = _spans(index, found.loss_fn_input_spans) if loss == STABLE_REINFORCE else ()
    sequences = sequences_of(index, spans, len(tokens), loss)
    return Datum(tokens=_packed(index, tokens), inputs=inputs, sequences=sequences)


def _spans(index: int, spans: Any) -> list[Span]:
    try:
        found = msgspec.convert(spans or [], list[JsonSpan])
    except msgspec.ValidationError as error:
        raise InvalidData(f"Datum {index}: its loss_fn_input_spans cannot be read.", f"{error}.") from error
    return [
        Span(None, span.prompt_tokens.length if span.prompt_tokens else 0)
        if span.sampled_tokens is None
        else Span(span.sampled_tokens.sequence_id, span.sampled_tokens.length)
        for span in found
    ]


def _packed(index: int, tokens: list[int]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except OverflowError as error:
        raise InvalidData(f"Datum {index} holds something that is no token id.", f"{error}.") from error


Asked = bodies.CreateModel | bodies.LoadWeights | bodies.OptimStep | bodies.SaveWeights | PassRequest

PASSES = ("forward_backward", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a training run's sequence."""

    id: str  # of its future
    kind: str
    seq: int
    asked: Asked
    drawn: Mapping[str, int | list[int]] = field(default_factory=dict[str, "int | list[int]"])

    def of(self, kind: type[T]) -> T:
        """What is asked, as the request's kind has it."""
        assert isinstance(self.asked, kind)  # noqa: S101 - for the type checker
        return self.asked


def _reader(kind: type[Asked]) -> Callable[[bytes], Asked]:
    return lambda body: bodies.read(body, kind)


_JSON: Mapping[str, Callable[[bytes], Asked]] = {
    "create_model": _reader(bodies.CreateModel),
    "load_weights": _reader(bodies.LoadWeights),
    "optim_step": _reader(bodies.OptimStep),
    "save_weights": _reader(bodies.SaveWeights),
    "save_weights_for_sampler": _reader(bodies.SaveWeights),
    "save_weights_external": _reader(bodies.SaveWeights),
}


def read_request(kind: str, content_type: str, body: bytes) -> Asked:
    """Parse the body of a request of this kind.

    Raises:
        InvalidData: it does not fit, or has no number in its model's sequence.
    """
    asked = _read(kind, content_type, body)
    if isinstance(asked, PassRequest | bodies.OptimStep | bodies.SaveWeights | bodies.LoadWeights):
        _check_number(asked.seq_id)
    return asked


def _read(kind: str, content_type: str, body: bytes) -> Asked:
    if kind not in PASSES:
        return _JSON[kind](body)
    if content_type == PROTOBUF:
        return read_pass(body)
    return read_json_pass(body, forward_only=kind == "forward")


def _check_number(seq: int | None) -> None:
    """Number 0 is the model's creation: a request that took it would be given that one's future."""
    if seq is not None and seq < 1:
        raise InvalidData(f"seq_id is {seq}.", "The requests of a model are numbered from 1.", "Send its number.")


def address_of(kind: str, content_type: str, body: bytes) -> tuple[str, int] | None:
    """Model and number of a request whose other fields are broken, where they can still be read."""
    binary = kind in PASSES and (content_type == PROTOBUF or not body.lstrip().startswith(b"{"))
    found = _address_of_pass(body) if binary else bodies.address_of(body)
    return found if found is not None and found[1] >= 1 else None
