"""Results as JSON, for clients that read JSON: SDKs up to 0.24, and whoever writes requests by hand.

Owns: the JSON forms of `SampleResponse` and `ForwardBackwardOutput`, made from the bytes that were stored.
Never: decides who gets which form.
Source: tinker SDK 0.9.0 and 0.22.7, types/sample_response.py and types/forward_backward_output.py; fields that are
newer than JSON results are named as the SDK's classes name them.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.arrays import Values
from halteres.service.wire.passes import OUTPUT_TYPE
from halteres.service.wire.samples import FILLER_LOGPROB

_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}

_PASS_HEAD = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE).SerializeToString()
"""How the bytes of every pass begin. Those of a sample begin with a sequence, which holds no such text."""

_encode = msgspec.json.Encoder().encode


def as_json(body: bytes) -> bytes:
    """The JSON form of a stored result. What is NaN becomes null."""
    return _encode(_pass(body) if body.startswith(_PASS_HEAD) else _sample(body))


def _pass(body: bytes) -> dict[str, Any]:
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(body)
    return {
        "type": "forward_backward",
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [output for record in message.loss_fn_outputs for output in _outputs(record)],
        "metrics": {name: value for name, value in message.metrics.items() if math.isfinite(value)},
    }


def _outputs(record: pb.ArrayRecord) -> list[dict[str, Any]]:
    logprobs = record.fields["logprobs"]
    values, trailing = np.frombuffer(logprobs.data, np.float32), list(logprobs.trailing_shape)
    ends = np.frombuffer(logprobs.offsets, np.int64) // values.itemsize
    parts = [values[start:end] for start, end in pairwise(ends)]
    return [{"logprobs": _tensor(part, [len(part) // math.prod(trailing or [1]), *trailing])} for part in parts]


def _sample(body: bytes) -> dict[str, Any]:
    message = pb.SampleResponse()
    message.ParseFromString(body)
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence(sequence) for sequence in message.sequences],
        "prompt_logprobs": _floats(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("topk_prompt_logprobs"):
        found["topk_prompt_logprobs"] = _rows(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        found["target_prompt_logprobs"] = _array(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        drawn = message.prompt_alt_tokens
        found["prompt_alt_tokens"] = {"tokens": _array(drawn.tokens), "logprobs": _array(drawn.logprobs)}
    return found


def _sequence(message: pb.SampledSequence) -> dict[str, Any]:
    found: dict[str, Any] = {
        "stop_reason": _REASONS[message.stop_reason],
        "tokens": np.frombuffer(message.tokens, np.int32).tolist(),
        "logprobs": _floats(message.logprobs),
    }
    if message.HasField("topk_sampled_logprobs"):
        found["topk_logprobs"] = _rows(message.topk_sampled_logprobs)
    return found


def _floats(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()


def _rows(top: pb.TopkLogprobs) -> list[list[tuple[int, float]] | None]:
    """A list of (token, logprob) for each position; None where nothing was computed."""
    ids = np.frombuffer(top.token_ids, np.int32).reshape(top.length, top.k).tolist()
    logprobs = np.frombuffer(top.logprobs, np.float32).reshape(top.length, top.k).tolist()
    rows = [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]
    return [None if not row or row[0] == (0, FILLER_LOGPROB) else row for row in rows]


def _array(message: pb.Tensor) -> dict[str, Any]:
    dtype = np.dtype(np.int64 if message.dtype == pb.DTYPE_INT64 else np.float32)
    sparse, shape = message.sparse_csr, list(message.shape)
    if message.WhichOneof("encoding") == "dense":
        return _tensor(np.frombuffer(message.dense, dtype), shape)
    return {
        **_tensor(np.frombuffer(sparse.values, dtype), shape),
        "sparse_crow_indices": np.frombuffer(sparse.crow_indices, np.int64).tolist(),
        "sparse_col_indices": np.frombuffer(sparse.col_indices, np.int64).tolist(),
    }


def _tensor(values: Values, shape: list[int]) -> dict[str, Any]:
    return {"data": values.tolist(), "dtype": values.dtype.name, "shape": shape}
