"""The shapes of completions on the wire: OpenAI's, and sglang's /generate.

Owns: reading how many were asked for and what came, asking for one of several, joining several answers to one.
Never: sends anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]

LONGEST_ERROR = 300  # characters


def wanted(body: Body) -> int:
    """Completions that one request asks for."""
    params = body.get("sampling_params") or body
    each = params.get("n") if isinstance(params, Mapping) else None
    prompt = body.get("prompt")
    several = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return max(1, each if isinstance(each, int) else 1) * several


def single(body: Body, number: int) -> Body:
    """The request for the choice of this number alone, with a seed of its own."""
    seed = body.get("seed")
    return {**body, "n": 1, **({"seed": seed + number} if isinstance(seed, int) else {})}


def joined(answers: list[Any]) -> Any:
    """One answer with everybody's choices; their tokens are added up."""
    choices = [choice for answer in answers for choice in answer["choices"]]
    numbered = [{**choice, "index": number} for number, choice in enumerate(choices)]
    usage = {**(answers[0].get("usage") or {}), "completion_tokens": sum(map(tokens, answers))}
    return {**answers[0], "choices": numbered, "usage": usage}


def read(path: str, status: int, text: str) -> tuple[int, Any]:
    """Status and content. Some endpoints send an error, or nothing usable, with status 200: that is a 502."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if status == 200 and (isinstance(told, list | dict) if path == "generate" else _has_choices(told)):
        return 200, told
    error = told.get("error") or told.get("detail") if isinstance(told, dict) else None
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, error)
    inside = code if isinstance(code, int) and 400 <= code < 600 else 502
    return (status if status != 200 else inside), " ".join(str(message or text)[:LONGEST_ERROR].split())


def seconds(retry_after: str | None) -> float:
    """A Retry-After header in s; 0 where there is none, or a date."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0


def items(answer: Any) -> list[Any]:
    """The completions of an answer."""
    if isinstance(answer, list):
        return answer
    choices = answer.get("choices")
    return choices if isinstance(choices, list) else [answer]


def finish(item: Any) -> Any:
    """Why one of them ended."""
    reason = _meta(item).get("finish_reason") or (item.get("finish_reason") if isinstance(item, Mapping) else None)
    return reason.get("type") if isinstance(reason, Mapping) else reason


def tokens(answer: Any) -> int:
    """Of all completions of an answer, as far as it says so."""
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    counted = [_meta(item) for item in items(answer)] + [usage or {}]
    return sum(one.get("completion_tokens") or 0 for one in counted)


def _has_choices(told: Any) -> bool:
    choices = told.get("choices") if isinstance(told, dict) else None
    return isinstance(choices, list) and bool(choices) and all(isinstance(one, dict) for one in choices)


def _meta(item: Any) -> Mapping[str, Any]:
    return item.get("meta_info") or {} if isinstance(item, Mapping) else {}
