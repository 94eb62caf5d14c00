"""Bodies of the Tinker API: their compression, and the JSON ones as structs, with the SDK's
defaults.

null means absent (not in AdamParams), unknown fields are ignored.
Source: tinker SDK 0.38.0, types/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from io import BytesIO
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import zstandard

from halteres.engine.vllm.requests import MOST_STOPS as MOST_STOPS
from halteres.errors import InvalidData
from halteres.service.wire.parts import check_json

T = TypeVar("T")


PROTOBUF = "application/x-protobuf"
JSON = "application/json"
# what a body may have after decompression; the SDK keeps a chunk of datums under 5 MB
MAX_BODY_BYTES = 256 * 2**20

# ... and datums as JSON, of SDKs before 0.25: whoever reads them holds Python's lock
MAX_JSON_BYTES = 32 * 2**20
# of a body that carries neither datums nor prompts; a session's metadata are in one
SMALL_BYTES = 2**16
PROMPT_BYTES = 2**24  # of a body with prompts
HEAD_BYTES = 512  # of a broken body: enough for the fields that come first
PIECE_BYTES = 1024  # compressed bytes that are unpacked at a time: they become 32 MiB at most


def decompressed(body: bytes, content_encoding: str | None, most: int = MAX_BODY_BYTES) -> bytes:
    """A request body as its client wrote it, of at most so many bytes."""
    data, whole = body, True
    if content_encoding == "zstd":
        try:
            data, whole = _unpacked(body, most + 1)
        except zstandard.ZstdError as error:
            raise InvalidData("The body is not valid zstd.", f"{error}.") from error
    elif content_encoding not in (None, "", "identity"):
        raise InvalidData(
            f"Content-Encoding '{content_encoding[:50]}' is not understood.",
            next="Use zstd or none.",
        )
    if len(data) > most:
        why = f"{most // 2**10} KiB are the limit of what it holds."
        raise InvalidData("The body is too large.", why, "Send less, datums in several requests.")
    if not whole:
        raise InvalidData(
            "The body is not valid zstd.", "Its end is missing, or something follows it."
        )
    return data


def head_of(body: bytes, content_encoding: str | None) -> bytes:
    """The start of a body, as much of it as can be read whatever is wrong with the rest."""
    if content_encoding != "zstd":
        return body[:HEAD_BYTES]
    try:
        return _unpacked(body, HEAD_BYTES)[0]
    except zstandard.ZstdError:
        return b""


def _unpacked(body: bytes, size: int) -> tuple[bytes, bool]:
    """Up to `size` bytes, and whether the body is one whole frame, as the SDK sends it."""
    reading = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    data, at = BytesIO(), 0  # it gives its bytes away without a copy
    while at < len(body) and data.tell() < size and not reading.eof:
        data.write(reading.decompress(body[at : at + PIECE_BYTES]))
        at += PIECE_BYTES
    data.truncate(size)
    return data.getvalue(), reading.eof and at >= len(body) and not reading.unused_data


_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,200})"')
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,18})\s*[,}]')

Metadata = dict[str, Any]
Drawn = Mapping[str, int]  # what the service drew by lot for a request, or read off its client

# of a client; unpickled sampling clients reach 1e18
Counter = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# whoever counts says which numbers make sense
Small = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Large = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class CreateSession(msgspec.Struct, kw_only=True):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: Metadata = {}
    project_id: str | None = None
    display_name: str | None = None


class Reason(msgspec.Struct, kw_only=True):
    """How a session ended."""

    type: Literal["success", "errored", "interrupted"] = "success"


class Finish(msgspec.Struct, kw_only=True):
    """POST sessions/{id}/finish."""

    reason: Reason = msgspec.field(default_factory=Reason)


class Lora(msgspec.Struct, kw_only=True):
    """Of create_model."""

    rank: Small = 32
    seed: Large | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(msgspec.Struct, kw_only=True):
    """Which optimiser a model is trained with for life."""

    type: str = "adamw"


class CreateModel(msgspec.Struct, kw_only=True):
    """POST create_model."""

    session_id: str
    model_seq_id: Counter
    base_model: str
    lora_config: Lora = msgspec.field(default_factory=Lora)
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)
    user_metadata: Metadata = {}


class AdamParams(msgspec.Struct, kw_only=True):
    """Of optim_step; checked when the step is taken, so that its future can say what is wrong. Here
    null is not absent: newer SDKs send it for NaN and infinity, none for a number that was not set.
    """

    learning_rate: float | None = 1e-4
    beta1: float | None = 0.9
    beta2: float | None = 0.95
    eps: float | None = 1e-12
    weight_decay: float | None = 0.0
    grad_clip_norm: float | None = 0.0


class OptimStep(msgspec.Struct, kw_only=True):
    """POST optim_step."""

    model_id: str
    seq_id: Counter
    adam_params: AdamParams | None = None
    optimizer_params: Metadata | None = None


class SaveWeights(msgspec.Struct, kw_only=True):
    """POST save_weights, save_weights_for_sampler, save_weights_external."""

    model_id: str
    seq_id: Counter
    path: str | None = None
    sampling_session_seq_id: Counter | None = None
    kind: str = "snapshot"
    ttl_seconds: Large | None = None
    overwrite: bool = False
    user_metadata: Metadata = {}
    age_encryption_recipients: list[str] | None = None  # of save_weights_external


class LoadWeights(msgspec.Struct, kw_only=True):
    """POST load_weights: into a model (model_id, seq_id), or making one (session_id,
    model_seq_id).
    """

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: Counter | None = None
    session_id: str | None = None
    model_seq_id: Counter | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig = msgspec.field(default_factory=OptimizerConfig)
    weights_access_token: str | None = None
    user_metadata: Metadata = {}


class CreateSamplingSession(msgspec.Struct, kw_only=True):
    """POST create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Counter
    base_model: str | None = None
    model_path: str | None = None


class Chunk(msgspec.Struct, kw_only=True, gc=False):
    """A piece of a prompt; one without a type is text (SDK <= 0.14)."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Tensor(msgspec.Struct, kw_only=True):
    """An array; with row pointers and columns it is sparse (CSR), and `data` holds the listed
    cells.
    """

    data: list[int | float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Prompt(msgspec.Struct, kw_only=True):
    """A prompt in chunks."""

    chunks: list[Chunk] = []


class Sampling(msgspec.Struct, kw_only=True):
    """How to sample."""

    max_tokens: Small | None = None
    seed: int | None = None  # one out of range fails the future
    stop: str | int | list[str | int] | None = None
    temperature: float = 1.0
    top_k: Small = -1
    top_p: float = 1.0


class Sample(msgspec.Struct, kw_only=True):
    """POST asample."""

    sampling_session_id: str
    seq_id: Counter
    prompt: Prompt
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    num_samples: Small = 1
    prompt_logprobs: bool | None = False
    prompt_logprobs_last_n: Small | None = None
    topk_prompt_logprobs: Small = 0
    topk_sample_logprobs: Small = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Small = 0


class Ttl(msgspec.Struct, kw_only=True):
    """PUT …/ttl. Null is for ever; a body without the field says nothing."""

    ttl_seconds: int | None | msgspec.UnsetType = msgspec.UNSET


class CopyWeights(msgspec.Struct, kw_only=True):
    """POST copy_weights: into a project, or into a session's training run."""

    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Counter | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class Retrieve(msgspec.Struct, kw_only=True):
    """POST retrieve_future, and cancel_future."""

    request_id: str
    allow_metadata_only: bool = False


class Owner(msgspec.Struct, kw_only=True):
    """Whose sessions are searched."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class StatusQuery(msgspec.Struct, kw_only=True):
    """Which sessions are searched, by how they stand."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None  # of client_finished; None matches every reason


class SearchCursor(msgspec.Struct, kw_only=True):
    """The last session of the page before."""

    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str


class Search(msgspec.Struct, kw_only=True):
    """POST sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: Owner = msgspec.field(default_factory=Owner)
    statuses: list[StatusQuery] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


def read(body: bytes, kind: type[T], *, deep: bool = True) -> T:
    """Parse a body, in which a null means that the field is absent: at every depth, and NaN and
    Infinity are numbers, as SDKs write them; or not `deep`, since a null in a message or a tool's
    schema is the client's own word.
    """
    check_json(body)
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError:
            found = _decoded(body) if deep else msgspec.json.decode(body)
            return msgspec.convert(_without_nulls(found, deep=deep), type=kind)
    except msgspec.ValidationError as error:
        raise InvalidData("The body does not fit.", f"{error}.") from error
    except ValueError as error:
        raise InvalidData("The body is not JSON.", f"{error}.") from error
    except RecursionError as error:
        raise InvalidData("The body is nested too deeply to be read.") from error


def read_field(body: bytes, name: str) -> str:
    """The one text that a body has to have."""
    found = read(body, dict[str, Any]).get(name)
    if not isinstance(found, str):
        raise InvalidData("The body does not fit.", f"`{name}` has to be a text.")
    return found


def _decoded(body: bytes) -> Any:
    """Any JSON, and NaN and Infinity too, which httpx before 0.28 writes for older SDKs."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        if b"NaN" not in body and b"Infinity" not in body:
            raise
    found = json.loads(body)
    msgspec.json.encode(found)  # refuses half a surrogate pair, which the journal cannot hold
    return found


def _without_nulls(value: Any, *, deep: bool) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_nulls(item, deep=deep) if deep or name == "sampling_params" else item
            for name, item in value.items()
            if item is not None
        }
    return (
        [_without_nulls(item, deep=deep) for item in value]
        if deep and isinstance(value, list)
        else value
    )


def address_of(body: bytes) -> tuple[str, int] | None:
    """Model and sequence number of a body whose other fields are broken, where they can still be
    read.
    """
    try:
        check_json(body)
        found = _decoded(body)
        return msgspec.convert(found["model_id"], str), msgspec.convert(found["seq_id"], Counter)
    except (
        InvalidData,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
    ):  # it may be cut off: both stand at its beginning
        model, seq = _MODEL_ID.search(body[:HEAD_BYTES]), _SEQ_ID.search(body[:HEAD_BYTES])
        return (model[1].decode(errors="replace"), int(seq[1])) if model and seq else None
