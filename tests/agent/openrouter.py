"""A look-alike of OpenRouter's API: what it asks for, what it answers, how it fails.

Models: `good/…` answers at once, one choice whatever `n` says; `bad/…` answers 500; `slow/…` never
answers; `broke/…` answers 402; `single/…` refuses `n` above 1; `busy/…` answers 429 once, then as a
good one; `cut/…` as a good one, cut off; `masked/…` tells an error with status 200. Every error,
and every answer of `leaky/…`, quotes the key it was called with: the worst that an endpoint can do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "sk-or-v1-planted-0123456789abcdef"


@dataclass
class OpenRouter:
    """The endpoint, as a test sees it."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    asked_slow: asyncio.Event = field(default_factory=asyncio.Event)
    # a client did, before a slow answer
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    honours_n: bool = False

    def requests_of(self, kind: str) -> list[dict[str, Any]]:
        return [body for body in self.requests if body["model"].startswith(f"{kind}/")]

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        response = await self._answer(request.headers.get("Authorization", ""), body)
        self.statuses[response.status] += 1
        return response

    async def _answer(self, authorization: str, body: dict[str, Any]) -> web.Response:
        kind = body["model"].partition("/")[0]
        if authorization != f"Bearer {KEY}":
            return _error(401, "No auth credentials found", authorization)
        if kind == "slow":
            await self._never()
        if kind == "broke":
            return _error(402, "Insufficient credits", authorization)
        if kind == "bad":
            return _error(500, "Internal Server Error", authorization)
        if kind == "single" and body.get("n", 1) > 1:
            return _error(400, "n must be 1", authorization)
        if kind == "busy" and len(self.requests_of("busy")) == 1:
            return _error(429, "Rate limit exceeded", authorization)
        if kind == "masked":  # an error of a provider behind the endpoint, told with status 200
            return web.json_response({"error": {"message": "Provider returned error", "code": 502}})
        return web.json_response(self._completion(body, kind, authorization))

    async def _never(self) -> None:
        self.asked_slow.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()

    def _completion(self, body: dict[str, Any], kind: str, authorization: str) -> dict[str, Any]:
        number = len(self.requests)
        texts = [
            f"{'yes' if (number + place) % 2 else 'no'}, says {kind}"
            for place in range(self._choices(body))
        ]
        if kind == "leaky":
            texts = [f"{text}; you are {authorization}" for text in texts]
        finish = "length" if kind == "cut" else "stop"
        choices = [
            {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": text, "refusal": None},
            }
            for text in texts
        ]
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 5 * len(texts),
            "total_tokens": 9 + 5 * len(texts),
        }
        return {"id": f"gen-{number}", "model": body["model"], "object": "chat.completion"} | {
            "choices": choices,
            "usage": usage,
        }

    def _choices(self, body: dict[str, Any]) -> int:
        return body.get("n", 1) if self.honours_n else 1


@asynccontextmanager
async def openrouter() -> AsyncIterator[OpenRouter]:
    """The endpoint answers inside, at `url`."""
    endpoint = OpenRouter()
    app = web.Application()
    app.router.add_post("/api/v1/chat/completions", endpoint.complete)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


def _error(status: int, message: str, authorization: str) -> web.Response:
    told = {
        "error": {"message": f"{message} (for {authorization})", "code": status},
        "user_id": authorization,
    }
    return web.json_response(told, status=status)
