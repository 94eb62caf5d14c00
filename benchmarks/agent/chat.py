"""An agent that is any model behind an OpenAI-compatible endpoint.

Owns: the conversation: system message, tool calls one by one, the last message as the answer.
Never: puts the key on a command line, into a message or into the transcript.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.agent import files
from benchmarks.agent.attempt import Arguments, GaveUp, Sitting, Told, Transcript
from benchmarks.agent.task import Place, Task, answer_in
from halteres.agent.tool import Caller
from halteres.agent.transports import openai
from halteres.agent.transports.mcp.content import INSTRUCTIONS

ANSWERS_WITHIN_S, TRIES, FIRST_PAUSE_S = 600.0, 4, 2.0
AGAIN = (408, 409, 429, 500, 502, 503, 504, 529)
"""Answers of an endpoint after which it is asked again."""

SYSTEM = f"""\
You are an agent with tools. Work alone: nobody answers questions. Call tools until the task is done, then answer.

{INSTRUCTIONS}"""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a model is asked."""

    url: str  # up to /v1
    model: str
    key: str | None = field(default=None, repr=False)

    async def complete(self, messages: list[Message], tools: list[Message]) -> Message:
        """The model's next message. GaveUp where the endpoint does not give one."""
        body = {"model": self.model, "messages": messages, "tools": tools}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=ANSWERS_WITHIN_S)
        status, text = 0, ""
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, trust_env=True
        ) as session:
            for number in range(TRIES):
                await asyncio.sleep(FIRST_PAUSE_S * (2**number - 1))
                async with session.post(
                    f"{self.url.rstrip('/')}/chat/completions", json=body
                ) as response:
                    status, text = response.status, await response.text()
                if status not in AGAIN:
                    break
        try:
            return json.loads(text)["choices"][0]["message"]
        except (ValueError, LookupError, TypeError) as error:
            raise GaveUp(f"the endpoint answered {status}: {text[:200]}") from error


@dataclass(frozen=True, slots=True)
class Chat:
    """The agent."""

    endpoint: Endpoint

    @property
    def name(self) -> str:
        """The model's."""
        return self.endpoint.model

    @asynccontextmanager
    async def seated(self, place: Place, transcript: Transcript) -> AsyncIterator[Sitting]:
        """At its tools in this place; they run in this process."""
        with place.entered():
            yield Sitting(_answered, files.Workspace(place.workspace), transcript)

    async def play(self, task: Task, sitting: Sitting) -> Mapping[str, Any] | None:
        """Talk until the model has nothing more to call; the JSON in its last message."""
        tools = openai.definitions() + ([] if sitting.workspace.is_empty else files.DEFINITIONS)
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": task.TEXT},
        ]
        for message in messages:
            sitting.transcript.add(**message)
        while True:
            said = await self.endpoint.complete(messages, tools)
            kept = {name: said[name] for name in ("role", "content", "tool_calls") if name in said}
            messages.append({"role": "assistant", **kept})
            sitting.transcript.add(**messages[-1])
            if not said.get("tool_calls"):
                return answer_in(said.get("content") or "")
            for asked in said["tool_calls"]:
                told = await sitting.call(*_asked(asked))
                messages.append({"role": "tool", "tool_call_id": asked.get("id"), "content": told})


def _asked(tool_call: Mapping[str, Any]) -> tuple[str, Arguments]:
    """Name and arguments; what a model wrote that is no JSON object stays a text."""
    function = tool_call.get("function") or {}
    given = function.get("arguments") or "{}"
    try:
        read = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        read = None
    return str(function.get("name")), read if isinstance(read, dict) else str(given)


async def _answered(name: str, arguments: Arguments) -> Told:
    given = arguments if isinstance(arguments, str) else dict(arguments)
    message = await openai.answer(
        {"function": {"name": name, "arguments": given}}, Caller(draft="model")
    )
    return Told(message["content"])
