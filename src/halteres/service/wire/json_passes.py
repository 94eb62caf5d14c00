"""Passes as JSON, which SDKs up to 0.24 send.

Owns: those bodies, and their datums as the engine's values.
Never: knows protobuf, beyond what `passes` makes of both.
Source: tinker SDK 0.9.0, 0.18.2 and 0.22.7, types/ and resources/training.py. Up to 0.14 a chunk has no type, and what
the user did not set is null.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from halteres.engine.protocol import Array, Datum
from halteres.errors import InvalidData
from halteres.losses import STABLE_REINFORCE
from halteres.service.wire.arrays import Budget, Csr, dense, numbers, written_out
from halteres.service.wire.bodies import Counter, Prompt, Tensor, read
from halteres.service.wire.passes import PassRequest, Span, datums_of, no_text, sequences_of


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
    data, flaw = datums_of(wanted.data, lambda index, datum, budget: _datum(index, datum, budget, loss))
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


def _datum(index: int, found: JsonDatum, budget: Budget, loss: str) -> Datum:
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


def tensor_of(what: str, tensor: Tensor, budget: Budget, pad: int = 0) -> Array:
    """An array as JSON writes it; of a sparse one, cells that are not listed hold `pad`.

    Raises:
        InvalidData: it is broken, or too large.
    """
    values = numbers(what, tensor.data, tensor.dtype)
    csr = csr_of(what, tensor)
    if csr is None:
        return dense(what, values, tensor.shape)
    return written_out(what, values, tensor.shape or (), csr, budget, pad)


def csr_of(what: str, tensor: Tensor) -> Csr | None:
    """Where a sparse array's values lie; None for a dense one.

    Raises:
        InvalidData: half of it is missing.
    """
    crow, col = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if crow is None and col is None:
        return None
    if crow is None or col is None or tensor.shape is None:
        raise InvalidData(f"{what} is sparse without its shape, rows or columns.", next="Send all of them, or none.")
    return Csr(numbers(what, crow, "int64"), numbers(what, col, "int64"))
