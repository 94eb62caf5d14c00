"""Log-probabilities in the shapes of OpenAI's completions and chats, vLLM and sglang.

Owns: these shapes.
Never: computes a log-probability.
Source: OpenAI's API reference; vLLM 0.11 and sglang 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halteres.service.inference.written import Row, Scores
from halteres.text import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"

Name = Callable[[int], str]
"""The text by which a token is called."""


def names(tokenizer: Tokenizer, *, as_ids: bool = False) -> Name:
    """Tokens by their text, special ones by name; or as `token_id:17`, which tells apart tokens of equal text."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.token


def completion_logprobs(
    name: Name,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    top: Sequence[Row] | None,
    offset: int = 0,
) -> dict[str, Any]:
    """Of /v1/completions; `offset` is where the first token's text begins."""
    texts = [name(token) for token in tokens]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    chosen = (
        None if top is None else [_by_name(name, *position) for position in zip(tokens, logprobs, top, strict=True)]
    )
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": chosen, "text_offset": offsets}


def _by_name(name: Name, token: int, logprob: float | None, top: Row) -> dict[str, float] | None:
    """The most likely tokens and the one that stands there; of tokens with equal text the likeliest."""
    if logprob is None:
        return None
    named: dict[str, float] = {}
    for one, value in [*top, (token, logprob)]:
        named.setdefault(name(one), value)
    return named


def chat_logprobs(
    name: Name, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[Row]
) -> list[dict[str, Any]]:
    """Of /v1/chat/completions."""
    rows = top or [[] for _ in tokens]
    return [
        {**_entry(name(token), logprob), "top_logprobs": [_entry(name(one), value) for one, value in row]}
        for token, logprob, row in zip(tokens, logprobs, rows, strict=True)
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """A token with its bytes; null where it is part of a character only."""
    return {"token": text, "logprob": logprob, "bytes": None if BROKEN in text else list(text.encode())}


def vllm_prompt_logprobs(name: Name, tokens: Sequence[int], scores: Scores) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: per position the token that stands there, then the most likely ones, by id."""
    return [
        None
        if logprob is None
        else {
            str(one): {"logprob": value, "rank": rank, "decoded_token": name(one)}
            for one, value, rank in _ranked(token, logprob, row)
        }
        for token, logprob, row in zip(tokens, scores.logprobs, scores.top, strict=True)
    ]


def _ranked(token: int, logprob: float, row: Row) -> list[tuple[int, float, int | None]]:
    ranks = {one: rank for rank, (one, _) in enumerate(row, start=1)}
    others = [(one, value, ranks[one]) for one, value in row if one != token]
    return [(token, logprob, ranks.get(token)), *others]


def by_id(token: int, logprob: float, row: Row) -> dict[str, float]:
    """The token that stands there first, then the most likely ones."""
    return {str(token): logprob} | {str(one): value for one, value in row if one != token}


def sglang_row(tokenizer: Tokenizer, logprob: float | None, token: int, *, text: bool) -> list[Any]:
    """[log-probability, token, its text or null]."""
    return [logprob, token, tokenizer.token(token) if text else None]


def sglang_top(tokenizer: Tokenizer, row: Row, *, text: bool) -> list[list[Any]] | None:
    """The most likely tokens of one position; null where nothing was computed."""
    return [sglang_row(tokenizer, logprob, token, text=text) for token, logprob in row] or None
