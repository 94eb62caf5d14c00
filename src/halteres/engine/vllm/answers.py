"""vLLM's answers, as it writes them, and what they are to us. Fields that nothing here reads are
left out.

Those of `/inference/v1/generate` are also what our own service writes at that path.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from halteres.engine.protocol import Piece, Sequence, TopK
from halteres.errors import ServerError

NOT_FINITE = -9999.0
"""The log-probability that vLLM writes for NaN and minus infinity."""


class Scored(msgspec.Struct, frozen=True):
    """One token of the likeliest at a position."""

    token_id: int
    logprob: float
    rank: int | None  # from 1 on, over the vocabulary; None: the log-probability is not finite


class Sampled(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sampled token; `top_logprobs` begins with it where it is not among them."""

    token_id: int
    logprob: float
    top_logprobs: tuple[Scored, ...] = ()
    token: str = ""  # `token_id:17`; clients of our service read the id there


class Logprobs(msgspec.Struct, frozen=True):
    """Of a choice."""

    content: tuple[Sampled, ...] | None = None


class Choice(msgspec.Struct, frozen=True):
    """A sequence, or in a stream its next tokens."""

    index: int
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    stop_reason: str | int | None = None  # the stop string, or the request's own stop token


class CachedTokens(msgspec.Struct, frozen=True):
    """Of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request took."""

    prompt_tokens_details: CachedTokens | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


class PromptScore(msgspec.Struct, frozen=True):
    """Of one token at a position of the prompt."""

    logprob: float
    rank: int | None


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed."""

    message: str = ""


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /inference/v1/generate: all of it, or one event of a stream; a stream that fails ends
    with an error.
    """

    choices: tuple[Choice, ...] = ()
    # by token id as text; None at position 0
    prompt_logprobs: tuple[dict[str, PromptScore] | None, ...] | None = None
    usage: Usage | None = None
    error: Failure | None = None
    request_id: str | None = None
    model: str | None = None
    # of our own service: the smallest and largest behind the tokens; how many tokens the context
    # had room for, where `max_tokens` did not fit
    policy_version: tuple[int, ...] | None = None
    truncated_max_tokens: int | None = None


class Version(msgspec.Struct, frozen=True):
    """GET /version."""

    version: str


class Card(msgspec.Struct, frozen=True):
    """A name that is served: the base model (no parent), or an adapter."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: tuple[Card, ...]


class Refusal(msgspec.Struct, frozen=True):
    """The body of an error."""

    error: Failure | str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        """What it says."""
        if isinstance(self.error, Failure):
            return self.error.message
        return self.error or self.detail


def refusal_text(body: bytes) -> str:
    """What the body of an error says; "" where it is not vLLM's."""
    try:
        return msgspec.json.decode(body, type=Refusal).text
    except msgspec.MsgspecError:
        return ""


def sampled_tokens(choice: Choice) -> tuple[Sampled, ...]:
    """The tokens of a choice; ServerError where they are not finite: vLLM's weights are."""
    content = ()
    if choice.logprobs is not None:
        content = choice.logprobs.content or ()
    if len(content) != len(choice.token_ids or ()):
        raise ServerError("vLLM gave tokens without log-probabilities.")
    if any(not one.logprob > NOT_FINITE for one in content):
        raise ServerError(
            "Sampling gave a log-probability that is not finite.",
            f"vLLM writes {NOT_FINITE:g} for it.",
            "The weights have diverged: sample from an earlier version.",
        )
    return content


def sequence_of(choice: Choice, k: int) -> Sequence:
    """A sequence, with the K likeliest tokens at each of its positions."""
    content = sampled_tokens(choice)
    reason: Literal["stop", "length"] = "length"
    if choice.finish_reason == "stop":
        reason = "stop"
    return Sequence(
        tokens=np.array([one.token_id for one in content], "<i4").tobytes(),
        logprobs=np.array([one.logprob for one in content], "<f4").tobytes(),
        stop_reason=reason,
        top=_topk_of_sampled(content, k),
    )


def piece_of(choice: Choice, begins: int, version: int, k: int) -> Piece:
    """Of a stream, whose sequences are counted from `begins` on."""
    piece = whole_piece(begins + choice.index, sequence_of(choice, k), version)
    if choice.finish_reason is None:
        return msgspec.structs.replace(piece, stop_reason=None)
    return piece


def whole_piece(sample: int, sequence: Sequence, version: int) -> Piece:
    """All of a sequence."""
    return Piece(
        sample=sample,
        tokens=sequence.tokens,
        logprobs=sequence.logprobs,
        version=version,
        top=sequence.top,
        stop_reason=sequence.stop_reason,
    )


def _topk_of_sampled(content: tuple[Sampled, ...], k: int) -> TopK | None:
    if not k:
        return None
    return _topk(
        [
            sorted((one.rank or 0, one.token_id, one.logprob) for one in position.top_logprobs)[:k]
            for position in content
        ],
        k,
    )


def topk_of_prompt(rows: tuple[dict[str, PromptScore] | None, ...], k: int) -> TopK:
    """The K likeliest tokens at each position of a prompt."""
    return _topk(
        [
            sorted((one.rank or 0, int(token), one.logprob) for token, one in (row or {}).items())[
                :k
            ]
            for row in rows
        ],
        k,
    )


def _topk(rows: list[list[tuple[int, int, float]]], k: int) -> TopK:
    """Rank, token and log-probability of the likeliest at each position; what is missing is
    filler.
    """
    ids = np.zeros((len(rows), k), "<i4")
    logprobs = np.full((len(rows), k), -99999.0, "<f4")
    for number, row in enumerate(rows):
        for column, (_, token, logprob) in enumerate(row):
            ids[number, column], logprobs[number, column] = token, logprob
    return TopK(k=k, length=len(rows), ids=ids.tobytes(), logprobs=logprobs.tobytes())


def own_logprobs(rows: tuple[dict[str, PromptScore] | None, ...], prompt: bytes) -> bytes:
    """Of the tokens of a prompt, NaN first; ServerError where one has none."""
    tokens = np.frombuffer(prompt, np.int32)
    found = [math.nan]
    for token, row in zip(tokens[1:], rows[1:], strict=True):
        one = (row or {}).get(str(token))
        if one is None or not one.logprob > NOT_FINITE:
            raise ServerError("vLLM gave a token of the prompt no finite log-probability.")
        found.append(one.logprob)
    return np.array(found, "<f4").tobytes()
