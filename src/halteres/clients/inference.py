"""Inference over HTTP: token-exact `/generate` (sglang's shape) and OpenAI's
`/v1/chat/completions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from halteres.clients.json_client import JsonClient, error_text
from halteres.errors import ServerError
from halteres.types import StopReason

ServerType = Literal["sglang", "openai"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. A seed of None leaves the choice to the server."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    # of `generate`: by exactly these weights of the run; None: by the newest
    policy_version: int | None = None
    top_logprobs: int = 0  # of `chat`: so many of the most likely first tokens are in the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. `tokens` and `logprobs` are empty where the server does not send them."""

    text: str  # without the terminator
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log, one per token, temperature 1, full vocabulary
    finish: StopReason
    # policy versions of the first and last token, where the server sends them
    versions: tuple[int, int] | None
    # of `top_logprobs`: text -> probability; None: not sent
    first_token: Mapping[str, float] | None = None
    num_tokens: int = 0  # of the prompt and all its answers, where the server counts them


class InferenceClient(JsonClient):
    """One inference server.

    Args:
        base_url: OpenAI's form, ending in /v1; `/generate` lies beside /v1, not below it.
        model: pins a snapshot (a tinker:// path or a model name); None follows the address's own
            policy.
        timeout_s, ready_within_s, waits_for_start: as of a JsonClient.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        model: str | None = None,
        timeout_s: float = 1200,
        ready_within_s: float = 120,
        max_connections: int = 512,
        waits_for_start: bool = True,
    ) -> None:
        super().__init__(
            base_url.rstrip("/").removesuffix("/v1"),
            api_key=api_key,
            timeout_s=timeout_s,
            ready_within_s=ready_within_s,
            max_connections=max_connections,
            waits_for_start=waits_for_start,
        )
        self.model = model

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, n: int = 1
    ) -> tuple[Completion, ...]:
        """Sample `n` completions of one prompt, token-exact. Raises as `JsonClient.post_when_ready`
        does.
        """
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": n,
        }
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            parameters["sampling_seed"] = sampling.seed
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": parameters,
            "return_logprob": True,
            "return_text_in_logprobs": False,
        }
        if sampling.policy_version is not None:
            body["policy_version"] = sampling.policy_version
        answer = await self._post("/generate", body)
        return _all(
            n, [_from_sglang(item) for item in (answer if isinstance(answer, list) else [answer])]
        )

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, n: int = 1
    ) -> tuple[Completion, ...]:
        """Sample `n` answers to a chat that the server renders; raises likewise."""
        body: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": n,
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": sampling.top_logprobs}
        answer = await self._post("/v1/chat/completions", body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list):  # some endpoints answer 200 with an error in their place
            raise ServerError("A chat completion holds no choices.", error_text(answer))
        return _all(n, [_from_openai(choice, answer) for choice in choices])

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self.post_when_ready(
            path, body if self.model is None else {**body, "model": self.model}
        )


def _from_sglang(item: Any) -> Completion:
    try:
        meta = item["meta_info"]
        pairs = meta["output_token_logprobs"] or ()
        tokens = item.get("output_ids")
        finish = meta["finish_reason"]
        return Completion(
            text=item["text"],
            tokens=tuple(pair[1] for pair in pairs) if tokens is None else tuple(tokens),
            logprobs=tuple(float(pair[0]) for pair in pairs),
            finish=_finish(finish["type"] if isinstance(finish, dict) else finish),
            versions=_versions(meta.get("policy_version")),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ServerError(
            "An answer of /generate has another shape.", f"{type(error).__name__}: {error}."
        ) from error


def _from_openai(choice: Any, answer: Mapping[str, Any]) -> Completion:
    try:
        return Completion(
            text=choice["message"]["content"] or "",
            tokens=tuple(choice.get("token_ids") or ()),
            logprobs=(),
            finish=_finish(choice.get("finish_reason")),
            versions=_versions(answer.get("policy_version")),
            first_token=_first_token(choice.get("logprobs")),
            num_tokens=int((answer.get("usage") or {}).get("total_tokens") or 0),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ServerError(
            "A chat completion has another shape.", f"{type(error).__name__}: {error}."
        ) from error


def _first_token(logprobs: Any) -> dict[str, float] | None:
    """Probabilities of the most likely first tokens, if they were sent. Two tokens of one text
    count together.
    """
    content = (logprobs or {}).get("content") or ()
    if not content or not content[0].get("top_logprobs"):
        return None
    likely: dict[str, float] = {}
    for one in content[0]["top_logprobs"]:
        likely[str(one["token"])] = likely.get(str(one["token"]), 0.0) + math.exp(
            float(one["logprob"])
        )
    return likely


def _finish(reason: str | None) -> StopReason:
    return "length" if reason == "length" else "stop"


def _versions(value: Any) -> tuple[int, int] | None:
    if value is None or isinstance(value, int):
        return None if value is None else (value, value)
    return int(min(value)), int(max(value))


def _all(n: int, completions: list[Completion]) -> tuple[Completion, ...]:
    if len(completions) != n:
        raise ServerError(f"Asked for {n} completions, the server gave {len(completions)}.")
    return tuple(completions)
