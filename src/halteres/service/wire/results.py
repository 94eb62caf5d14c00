"""Results of passes and samples: protobuf messages, and JSON for clients that read JSON.

Source: tinker SDK 0.38.0, types/sample_request.py and proto/response_conv.py; for the JSON that
SDKs up to 0.24 read, 0.9.0 and 0.22.7, types/sample_response.py and
types/forward_backward_output.py; newer fields are named as the SDK's classes name them.

P tokens of the prompt, T sampled ones, K values at each position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import msgspec
import numpy as np

from halteres.engine.protocol import ExtraLogprobs, PassResult, SampleResult, TopK
from halteres.errors import InvalidData, size_text
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.bodies import Sample
from halteres.service.wire.training import Budget, Csr, Values, csr_of, tensor_of

OUTPUT_TYPE = "ArrayRecord"  # the type of what a pass returns per datum
# with token id 0: the log-probability of a top-k cell that was not computed
FILLER_LOGPROB = -99999.0

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def write_pass(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`: every datum's logprobs end to end, one record for each run of
    datums with equal K.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE, metrics=result.metrics)
    for trailing_shape, run in groupby(result.logprobs, lambda array: array.shape[1:]):
        arrays = list(run)
        record = message.loss_fn_outputs.add(num_datums=len(arrays))
        logprobs = record.fields["logprobs"]
        logprobs.data = b"".join(array.data for array in arrays)
        logprobs.offsets = np.cumsum(
            [0, *(len(array.data) for array in arrays)], dtype=np.int64
        ).tobytes()
        logprobs.dtype = pb.DTYPE_FLOAT32
        logprobs.trailing_shape.extend(trailing_shape)
    return message.SerializeToString()


@dataclass(frozen=True, slots=True)
class ExtraOutputs:
    """What a sample brings beside tokens: for the engine, and how the answer is laid out."""

    engine: ExtraLogprobs
    last_n: int | None = None  # only so many tokens of the prompt are scored
    csr: Csr | None = None  # the layout of sparse targets, which the answer shares


def extra_outputs_of(sample: Sample, prompt_length: int) -> ExtraOutputs:
    """Of a request."""
    last_n, tensor = sample.prompt_logprobs_last_n, sample.target_prompt_logprobs
    if last_n is not None and not (sample.prompt_logprobs and 1 <= last_n < max(prompt_length, 2)):
        raise InvalidData(
            f"prompt_logprobs_last_n is {last_n}.",
            f"It needs prompt_logprobs, and must be 1 to {max(prompt_length - 1, 1)} here: the "
            "first token has none.",
        )
    targets, csr, name = None, None, "target_prompt_logprobs"
    if tensor is not None:
        targets, csr = tensor_of(name, tensor, Budget(), pad=-1), csr_of(name, tensor)
        if targets.dtype == "int64" and (np.frombuffer(targets.data, np.int64) == -1).all():
            raise InvalidData(
                f"{name} names no token.", "All its cells are -1, which skips.", "Leave it out."
            )
    engine = ExtraLogprobs(
        prompt_logprobs=bool(sample.prompt_logprobs),
        topk_prompt=sample.topk_prompt_logprobs,
        topk_sampled=sample.topk_sample_logprobs,
        targets=targets,
        alternatives=sample.prompt_alt_tokens_k,
    )
    return ExtraOutputs(engine, last_n, csr)


def write_sample(result: SampleResult, extra: ExtraOutputs) -> bytes:
    """A `SampleResponse`."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens,
            logprobs=sequence.logprobs,
            topk_sampled_logprobs=None if sequence.top is None else _topk(sequence.top),
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _masked(result.prompt_logprobs, np.float32, np.nan, extra.last_n)
    if (top := result.topk_prompt) is not None:
        last = None if extra.last_n is None else extra.last_n * top.k
        message.topk_prompt_logprobs.CopyFrom(_topk(top))
        message.topk_prompt_logprobs.token_ids = _masked(top.ids, np.int32, 0, last)
        message.topk_prompt_logprobs.logprobs = _masked(
            top.logprobs, np.float32, FILLER_LOGPROB, last
        )
    # in the layout of the request; a cell that was skipped holds 0
    if (scores := result.target_logprobs) is not None:
        target, csr = message.target_prompt_logprobs, extra.csr
        target.dtype = pb.DTYPE_FLOAT32
        target.shape.extend(scores.shape)
        if csr is None:
            target.dense = scores.data
        else:
            values = np.frombuffer(scores.data, np.float32)[csr.places(scores.shape[1])].tobytes()
            crow, col = csr.crow.tobytes(), csr.col.tobytes()
            target.sparse_csr.CopyFrom(
                pb.SparseCsr(values=values, crow_indices=crow, col_indices=col)
            )
    if (drawn := result.alternatives) is not None:
        shape, tokens = (
            (drawn.length, drawn.k),
            np.frombuffer(drawn.ids, np.int32).astype(np.int64).tobytes(),
        )
        message.prompt_alt_tokens.tokens.CopyFrom(
            pb.Tensor(dense=tokens, dtype=pb.DTYPE_INT64, shape=shape)
        )
        message.prompt_alt_tokens.logprobs.CopyFrom(
            pb.Tensor(dense=drawn.logprobs, dtype=pb.DTYPE_FLOAT32, shape=shape)
        )
    return message.SerializeToString()


def _masked(data: bytes, dtype: type[np.generic], filler: float, last: int | None) -> bytes:
    """All but the last values replaced; None keeps all."""
    if last is None:
        return data
    values = np.frombuffer(data, dtype).copy()
    values[: len(values) - last] = filler
    return values.tobytes()


def _topk(top: TopK) -> pb.TopkLogprobs:
    return pb.TopkLogprobs(token_ids=top.ids, logprobs=top.logprobs, k=top.k, length=top.length)


# The JSON of SDKs up to 0.24


_PASS_HEAD = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE).SerializeToString()
"""How the bytes of every pass begin. Those of a sample begin with a sequence, which holds no such
text.
"""


MAX_JSON_SAMPLE = 2**24
"""Bytes of a sample that is written as JSON: two million likely tokens, which take 400 MB as
objects of Python.
"""


def as_json(body: bytes) -> bytes:
    """The JSON form of a stored result. What is NaN becomes null. InvalidData for a sample that is
    too large.
    """
    if body.startswith(_PASS_HEAD):
        return msgspec.json.encode(_json_pass(body))
    if len(body) > MAX_JSON_SAMPLE:
        raise InvalidData(
            "The sample is too large to be written as JSON.",
            f"It has {size_text(len(body))}; {size_text(MAX_JSON_SAMPLE)} are the limit.",
            "Ask for fewer samples or likely tokens, or use tinker 0.18 or newer, which reads "
            "protobuf.",
        )
    return msgspec.json.encode(_json_sample(body))


def _json_pass(body: bytes) -> dict[str, Any]:
    message, outputs = pb.ForwardBackwardOutput.FromString(body), list[Any]()
    for record in message.loss_fn_outputs:
        logprobs = record.fields["logprobs"]
        values, trailing = np.frombuffer(logprobs.data, np.float32), list(logprobs.trailing_shape)
        for start, end in pairwise(np.frombuffer(logprobs.offsets, np.int64) // values.itemsize):
            shape = [int(end - start) // math.prod(trailing), *trailing]
            outputs.append({"logprobs": _tensor(values[start:end], shape)})
    return {
        "type": "forward_backward",
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": {name: value for name, value in message.metrics.items() if math.isfinite(value)},
    }


def _json_sample(body: bytes) -> dict[str, Any]:
    message, sequences = pb.SampleResponse.FromString(body), list[Any]()
    for one in message.sequences:
        reason = "length" if one.stop_reason == pb.STOP_REASON_LENGTH else "stop"
        tokens = np.frombuffer(one.tokens, np.int32).tolist()
        top = (
            {"topk_logprobs": _rows(one.topk_sampled_logprobs)}
            if one.HasField("topk_sampled_logprobs")
            else {}
        )
        sequences.append(
            {"stop_reason": reason, "tokens": tokens, "logprobs": _floats(one.logprobs), **top}
        )
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": _floats(message.prompt_logprobs)
        if message.HasField("prompt_logprobs")
        else None,
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
    }
    if message.HasField("topk_prompt_logprobs"):
        found["topk_prompt_logprobs"] = _rows(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        found["target_prompt_logprobs"] = _array(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        drawn = message.prompt_alt_tokens
        found["prompt_alt_tokens"] = {
            "tokens": _array(drawn.tokens),
            "logprobs": _array(drawn.logprobs),
        }
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
