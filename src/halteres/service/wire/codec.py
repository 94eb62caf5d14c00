"""Binary bodies of the Tinker API to the engine's values, and back.

Owns: protobuf parsing and writing, zstd with a cap on what it may grow to, the byte layouts of tokens and arrays.
Never: looks at values (an engine refuses a token outside the vocabulary), knows routes or promises.
Source: tinker SDK 0.38.0, proto/request_conv.py and proto/response_conv.py; older SDKs add JSON forms here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from halteres.engine.protocol import Array, Datum, DType, PassResult, SampleResult
from halteres.errors import HalteresError, InvalidData
from halteres.service.wire import tinker_public_pb2 as pb

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
MAX_BODY_BYTES = 256 * 2**20
"""What a body may have after decompression; the SDK keeps a chunk of datums under 5 MB."""

_DTYPES: dict[int, DType] = {pb.DTYPE_FLOAT32: "float32", pb.DTYPE_INT64: "int64"}
_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """A forward or forward-backward pass as its client asked for it."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    forward_only: bool
    flaw: HalteresError | None  # why its data cannot be used: the promise's failure, not the request's


def decompressed(body: bytes, content_encoding: str | None) -> bytes:
    """A request body as its client wrote it.

    Raises:
        InvalidData: not zstd, broken, or larger than MAX_BODY_BYTES.
    """
    if content_encoding in (None, "", "identity"):
        return body
    if content_encoding != "zstd":
        raise InvalidData(f"Content-Encoding '{content_encoding}' is not understood.", next="Use zstd or none.")
    try:
        with zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body) as reader:
            data = reader.read(MAX_BODY_BYTES + 1)
    except zstandard.ZstdError as error:
        raise InvalidData("The body is not valid zstd.", f"{error}.") from error
    if len(data) > MAX_BODY_BYTES:
        raise InvalidData(
            "The body is too large.",
            f"It grows beyond {MAX_BODY_BYTES // 2**20} MiB when decompressed.",
            "Send the datums in several requests.",
        )
    return data


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
    data: tuple[Datum, ...] = ()
    flaw: HalteresError | None = None
    try:
        data = tuple(_datum(index, datum) for index, datum in enumerate(message.data))
    except InvalidData as error:
        flaw = error
    return PassRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=data,
        loss=message.loss_fn,
        forward_only=message.forward_only,
        flaw=flaw,
    )


def address_of(body: bytes) -> tuple[str, int] | None:
    """Model and sequence number of a request whose rest is broken, where they can still be read: they come first."""
    message = pb.ForwardBackwardRequest()
    for end in range(4, min(len(body), 512)):
        try:
            message.ParseFromString(body[:end])
        except DecodeError:
            continue
        if message.model_id and message.seq_id:
            return message.model_id, message.seq_id
    return None


def write_pass(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput` with one record: every datum's logprobs end to end."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    record = message.loss_fn_outputs.add(num_datums=len(result.logprobs))
    sizes = [0, *map(len, result.logprobs)]
    logprobs = record.fields["logprobs"]
    logprobs.data = b"".join(result.logprobs)
    logprobs.offsets = np.cumsum(sizes, dtype=np.int64).tobytes()
    logprobs.dtype = pb.DTYPE_FLOAT32
    return message.SerializeToString()


def write_sample(result: SampleResult, *, last_n: int | None = None) -> bytes:
    """A `SampleResponse`; with `last_n` only the last n prompt tokens keep their logprob, the others become NaN."""
    message = pb.SampleResponse()
    for sequence in result.sequences:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason], tokens=sequence.tokens, logprobs=sequence.logprobs
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _masked(result.prompt_logprobs, last_n)
    return message.SerializeToString()


def _masked(logprobs: bytes, last_n: int | None) -> bytes:
    if last_n is None:
        return logprobs
    values = np.frombuffer(logprobs, np.float32).copy()
    values[: len(values) - last_n] = np.nan
    return values.tobytes()


def _datum(index: int, message: pb.Datum) -> Datum:
    chunks = message.model_input
    if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in chunks):
        raise InvalidData(f"Datum {index} holds an image or audio chunk.", "The model reads text tokens only.")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(tokens) % 4:
        raise InvalidData(f"Datum {index}: the tokens are not int32.", f"They have {len(tokens)} bytes.")
    inputs = {name: _array(f"Datum {index}: '{name}'", tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Datum(tokens=tokens, inputs=inputs)


def _array(what: str, tensor: pb.Tensor) -> Array:
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        raise InvalidData(
            f"{what} is sparse or has several values per token.",
            "One dense value per token is read so far; [N, K] and CSR targets come later.",
            "Send a dense array of shape [N].",
        )
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidData(f"{what} has an unknown dtype.", next="Send float32 or int64.")
    length, rest = divmod(len(tensor.dense), np.dtype(dtype).itemsize)
    if rest or (tensor.shape and tensor.shape[0] != length):
        raise InvalidData(f"{what} has {len(tensor.dense)} bytes, not its shape {list(tensor.shape)} of {dtype}.")
    return Array(dtype=dtype, shape=(length,), data=tensor.dense)
