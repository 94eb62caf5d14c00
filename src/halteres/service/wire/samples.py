"""Sampling: what a request wants beside tokens, and the protobuf message of the result.

Owns: that translation, both ways.
Never: samples, knows promises.
Source: tinker SDK 0.38.0, types/sample_request.py and proto/response_conv.py.

P tokens of the prompt, T sampled ones, K values at each position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halteres.engine.protocol import Array, SampleResult, TopK, Wanted
from halteres.errors import InvalidData
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.arrays import Budget, Csr
from halteres.service.wire.bodies import Sample, Tensor
from halteres.service.wire.json_passes import csr_of, tensor_of

FILLER_LOGPROB = -99999.0
"""With token id 0: the log-probability of a top-k cell that was not computed."""

_TARGETS = "target_prompt_logprobs"
_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client wants of a sample, as the engine is asked for it and as the answer is laid out."""

    wanted: Wanted
    last_n: int | None = None  # only so many tokens of the prompt are scored
    csr: Csr | None = None  # the layout of sparse targets, which the answer shares


def wish_of(asked: Sample, prompt_length: int) -> Wish:
    """What a request wants beside tokens.

    Raises:
        InvalidData: it cannot be had; the message names the field.
    """
    last_n = asked.prompt_logprobs_last_n
    if last_n is not None and not (asked.prompt_logprobs and 1 <= last_n < max(prompt_length, 2)):
        raise InvalidData(
            f"prompt_logprobs_last_n is {last_n}.",
            f"It needs prompt_logprobs, and must be 1 to {max(prompt_length - 1, 1)} here: the first token has none.",
        )
    targets, csr = _targets(asked.target_prompt_logprobs)
    wanted = Wanted(
        prompt_logprobs=bool(asked.prompt_logprobs),
        topk_prompt=asked.topk_prompt_logprobs,
        topk_sampled=asked.topk_sample_logprobs,
        targets=targets,
        alternatives=asked.prompt_alt_tokens_k,
    )
    return Wish(wanted, last_n, csr)


def _targets(tensor: Tensor | None) -> tuple[Array | None, Csr | None]:
    if tensor is None:
        return None, None
    targets = tensor_of(_TARGETS, tensor, Budget(), pad=-1)
    if targets.dtype == "int64" and (np.frombuffer(targets.data, np.int64) == -1).all():
        raise InvalidData(f"{_TARGETS} names no token.", "All its cells are -1, which skips.", "Leave it out.")
    return targets, csr_of(_TARGETS, tensor)


def write_sample(result: SampleResult, wish: Wish) -> bytes:
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
        message.prompt_logprobs = _masked(result.prompt_logprobs, wish.last_n)
    if result.topk_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(_masked_rows(result.topk_prompt, wish.last_n)))
    if result.target_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_scored(result.target_logprobs, wish))
    if result.alternatives is not None:
        message.prompt_alt_tokens.CopyFrom(_drawn(result.alternatives))
    return message.SerializeToString()


def _masked(logprobs: bytes, last_n: int | None) -> bytes:
    if last_n is None:
        return logprobs
    values = np.frombuffer(logprobs, np.float32).copy()
    values[: len(values) - last_n] = np.nan
    return values.tobytes()


def _masked_rows(top: TopK, last_n: int | None) -> TopK:
    if last_n is None:
        return top
    before = (top.length - last_n) * top.k
    ids, logprobs = np.frombuffer(top.ids, np.int32).copy(), np.frombuffer(top.logprobs, np.float32).copy()
    ids[:before], logprobs[:before] = 0, FILLER_LOGPROB
    return TopK(k=top.k, length=top.length, ids=ids.tobytes(), logprobs=logprobs.tobytes())


def _topk(top: TopK) -> pb.TopkLogprobs:
    return pb.TopkLogprobs(token_ids=top.ids, logprobs=top.logprobs, k=top.k, length=top.length)


def _scored(scores: Array, wish: Wish) -> pb.Tensor:
    """In the layout of the request; a cell that was skipped holds 0."""
    message = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=scores.shape)
    if wish.csr is None:
        message.dense = scores.data
        return message
    places = wish.csr.places(scores.shape[1])
    message.sparse_csr.values = np.frombuffer(scores.data, np.float32)[places].tobytes()
    message.sparse_csr.crow_indices = wish.csr.crow.tobytes()
    message.sparse_csr.col_indices = wish.csr.col.tobytes()
    return message


def _drawn(drawn: TopK) -> pb.PromptAltTokens:
    shape = (drawn.length, drawn.k)
    tokens = np.frombuffer(drawn.ids, np.int32).astype(np.int64).tobytes()
    return pb.PromptAltTokens(
        tokens=pb.Tensor(dense=tokens, dtype=pb.DTYPE_INT64, shape=shape),
        logprobs=pb.Tensor(dense=drawn.logprobs, dtype=pb.DTYPE_FLOAT32, shape=shape),
    )
