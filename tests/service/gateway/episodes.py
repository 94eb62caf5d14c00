"""One gateway session as a test plays it: raw HTTP, so that a test sees the very bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halteres.engine.protocol import SampleResult, SamplingParams
from service.inference_fixtures import events
from service.live_service import LiveService

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Episode:
    """A session, and the program within it."""

    scene: LiveService
    opened: dict[str, Any]

    @property
    def id(self) -> str:
        return self.opened["session"]

    @property
    def path(self) -> str:
        """Of its data plane."""
        return f"/g/{self.id}"

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
        """Status and answer of a call below the session."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"{self.scene.url}{self.path}{path}"
        async with self.scene.http.post(url, json=body, headers=sent) as response:
            return response.status, await response.json(content_type=None)

    async def whole(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        status, answer = await self.post(path, body, **headers)
        assert status == 200, answer
        return answer

    async def chat(self, messages: Messages, **more: Any) -> dict[str, Any]:
        """One chat completion's choice."""
        body = {"messages": messages, "max_tokens": 8, **more}
        answer = await self.whole("/v1/chat/completions", body)
        return answer["choices"][0]

    async def streamed(self, path: str, **body: Any) -> list[Any]:
        return await events(self.scene, f"{self.path}{path}", **body)

    async def reward(self, **body: Any) -> Any:
        status, answer = await self.scene.ask(f"/gateway/sessions/{self.id}/reward", **body)
        assert status == 200, answer
        return answer

    async def view(self) -> Any:
        status, answer = await self.scene.get(f"/gateway/sessions/{self.id}")
        assert status == 200, answer
        return answer

    async def sequences(self) -> Any:
        status, answer = await self.scene.get(f"/gateway/sessions/{self.id}/sequences")
        assert status == 200, answer
        return answer


async def opened(scene: LiveService, **body: Any) -> Episode:
    """A new session."""
    status, answer = await scene.ask("/gateway/sessions", **{"task": "t", **body})
    assert status == 200, answer
    return Episode(scene, answer)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One sequence as the engine gave it."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    logprobs: list[float]


class EngineTap:
    """Notes what an engine was asked for and what it gave, beside the service."""

    def __init__(self, scene: LiveService) -> None:
        self.samplings: list[Sampling] = []
        engine = scene.engine
        sample, stream = engine.sample, engine.stream

        async def tapped_sample(*given: Any) -> SampleResult:
            result = await sample(*given)
            for one in result.sequences:
                self._note(given, one.tokens, one.logprobs)
            return result

        async def tapped_stream(*given: Any) -> Any:
            tokens, logprobs = b"", b""
            async for piece in stream(*given):
                tokens, logprobs = tokens + piece.tokens, logprobs + piece.logprobs
                yield piece
            self._note(given, tokens, logprobs)

        engine.sample = tapped_sample  # type: ignore[method-assign] - beside the service
        engine.stream = tapped_stream  # type: ignore[method-assign] - the same

    def _note(self, given: Any, tokens: bytes, logprobs: bytes) -> None:
        self.samplings.append(
            Sampling(
                prompt=np.frombuffer(given[1], np.int32).tolist(),
                params=given[3],
                tokens=np.frombuffer(tokens, np.int32).tolist(),
                logprobs=np.frombuffer(logprobs, np.float32).tolist(),
            )
        )


def trained(sequences: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each turn, as the session has them."""
    found: list[tuple[list[int], list[float]]] = []
    for turn in sequences["turns"]:
        sequence, part = (
            sequences["sequences"][turn["sequence"]],
            slice(turn["start"], turn["stop"]),
        )
        assert sequence["masks"][part] == sequence["tokens"][part]
        found.append((sequence["tokens"][part], sequence["logprobs"][part]))
    return found
