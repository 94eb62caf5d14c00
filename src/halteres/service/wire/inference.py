"""JSON bodies of run-addressed inference: sglang's /generate, OpenAI's completions and chat completions.

Owns: one struct per request (unknown fields are ignored), their translation to the engine's sampling parameters.
Never: samples.
Source: sglang 0.4 `GenerateReqInput`, OpenAI's API reference, vLLM's extra fields (stop_token_ids, top_k, ignore_eos).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from halteres.engine.protocol import SamplingParams


class Sampled(msgspec.Struct, kw_only=True):
    """What every such request says about sampling."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, max_tokens: int | None, end_tokens: Sequence[int], seed: int) -> SamplingParams:
        """For the engine; the model's end tokens stop it beside those that were named."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=seed,
            stop_tokens=(*self.stop_token_ids, *(() if self.ignore_eos else end_tokens)),
            stop_strings=tuple(text for text in self.stop_strings if text),
        )


class GenerateParams(Sampled, kw_only=True):
    """sglang's sampling parameters."""

    max_new_tokens: int | None = 128
    sampling_seed: int | None = None


class Generate(msgspec.Struct, kw_only=True):
    """POST generate."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: GenerateParams = msgspec.field(default_factory=GenerateParams)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    stream: bool = False
    model: str | None = None


class Completions(Sampled, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = 16
    logprobs: int | bool | None = None
    echo: bool = False
    stream: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(one, int) for one in self.prompt):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class ChatCompletions(Sampled, kw_only=True):
    """POST v1/chat/completions."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    tools: list[dict[str, Any]] = []
    stream: bool = False
