"""Passes: forward_backward and forward, from both generations of bodies, and their results.

Owns: `PassRequest`, the same whatever its body was; the protobuf messages of passes.
Never: looks at values (an engine refuses a token outside the vocabulary), knows routes or promises.
Source: tinker SDK 0.38.0, proto/request_conv.py and proto/response_conv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from halteres.engine.protocol import Array, Datum, PassResult
from halteres.errors import HalteresError, InvalidData
from halteres.losses import STABLE_REINFORCE
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.arrays import Budget, Csr, Values, dense, unknown_dtype, written_out
from halteres.service.wire.codec import HEAD_BYTES

OUTPUT_TYPE = "ArrayRecord"
"""The type of what a pass returns per datum."""

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
    flaw: HalteresError | None  # why its data cannot be used: the promise's failure, not the request's


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
    data, flaw = datums_of(message.data, lambda index, datum, budget: _datum(index, datum, budget, loss))
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


def address_of(body: bytes) -> tuple[str, int] | None:
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


def write_pass(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`: every datum's logprobs end to end, one record for each run of datums with equal K."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=result.metrics)
    for trailing_shape, run in groupby(result.logprobs, lambda array: array.shape[1:]):
        arrays = list(run)
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        logprobs = record.fields["logprobs"]
        logprobs.data = b"".join(array.data for array in arrays)
        logprobs.offsets = np.cumsum([0, *(len(array.data) for array in arrays)], dtype=np.int64).tobytes()
        logprobs.dtype = pb.DTYPE_FLOAT32
        logprobs.trailing_shape.extend(trailing_shape)
    return message.SerializeToString()


def _config(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The numbers of both generations; the newer field wins.

    Raises:
        InvalidData: a setting is a text; `loss_id` alone is one.
    """
    newer = {name: value for name, value in message.loss_fn_config_v2.items() if name != "loss_id"}
    for name, value in newer.items():
        if value.WhichOneof("value") != "number":
            raise InvalidData(f"The loss setting '{name[:100]}' is no number.", next="Send a number.")
    return {**message.loss_fn_config, **{name: value.number for name, value in newer.items()}}


def _datum(index: int, message: pb.Datum, budget: Budget, loss: str) -> Datum:
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
    """`Datum.sequences` of a datum's spans, which lie end to end; None where it has none, or the loss reads none.

    Raises:
        InvalidData: they do not cover the targets, or one names no sequence.
    """
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
        csr = Csr(*(_read(what, data, np.int64) for data in (sparse.crow_indices, sparse.col_indices)))
        return written_out(what, _values(what, sparse.values, tensor.dtype), tensor.shape, csr, budget)
    values = _values(what, tensor.dense, tensor.dtype)
    return dense(what, values, tensor.shape or (() if scalars and len(values) == 1 else None))


def _values(what: str, data: bytes, dtype: int) -> Values:
    """Widened to float32 or int64, which are all that an engine reads."""
    if dtype == pb.DTYPE_FLOAT32:
        return _read(what, data, np.float32)
    if dtype == pb.DTYPE_INT64:
        return _read(what, data, np.int64)
    if dtype == pb.DTYPE_INT32:
        return _read(what, data, np.int32).astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        return (_read(what, data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise unknown_dtype(what, f"number {dtype}")


def _read(what: str, data: bytes, dtype: npt.DTypeLike) -> Values:
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise InvalidData(f"{what} has {len(data)} bytes.", f"They are no whole number of values of {size} bytes.")
    return np.frombuffer(data, dtype)
