"""Every transport as a way to call a tool. Whoever adds a transport adds it to TRANSPORTS."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult
from typer.testing import CliRunner

import halteres.agent
from halteres.agent.table import BY_NAME
from halteres.agent.transports import command_line as cli
from halteres.agent.transports import hermes, openai
from halteres.agent.transports.access import token
from halteres.agent.transports.command_line import words_of
from halteres.agent.transports.mcp import PATH
from halteres.agent.transports.mcp.server import SESSION, Endpoint, guarded
from halteres.loopback import Server, open_listener, url_of

from . import control

Answer = dict[str, Any]
Call = Callable[[str, dict[str, Any]], Awaitable[Answer]]
Transport = Callable[[], AbstractAsyncContextManager[Call]]

TODAY, BEFORE = "2026-07-28", "2025-11-25"
MODES = {TODAY: "auto", BEFORE: "legacy"}
"""How the SDK's client is asked for a revision."""

MAIN = "from halteres.cli.main import main; main()"


def started(*arguments: str, first: str = "", **variables: str) -> StdioServerParameters:
    """The program as a host starts it, with some of our variables; `first` runs before it, in its
    process.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith("HALTERES_")}
    return StdioServerParameters(
        command=sys.executable,
        args=["-c", f"{first}\n{MAIN}", *arguments],
        env={**ours, **variables},
    )


@asynccontextmanager
async def http_client(
    session: str | None = None, revision: str = TODAY, endpoint: Endpoint | None = None
) -> AsyncIterator[Client]:
    """A client of an MCP server on a free port."""
    with open_listener(0) as listening:
        config = uvicorn.Config(
            guarded(endpoint or Endpoint()), log_level="warning", timeout_graceful_shutdown=1
        )
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        headers = {"Authorization": f"Bearer {token()}"} | ({SESSION: session} if session else {})
        try:
            async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
                transport = streamable_http_client(f"{url_of(listening)}{PATH}", http_client=http)
                async with Client(transport, mode=MODES[revision]) as client:
                    assert client.protocol_version == revision
                    yield client
        finally:
            server.end()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


def body(result: CallToolResult) -> Answer:
    """An answer over MCP; its text and its structure say the same."""
    text = result.content[0]
    assert text.type == "text"
    assert text.text == json.dumps(
        result.structured_content, ensure_ascii=False, separators=(",", ":")
    )
    assert isinstance(result.structured_content, dict)
    assert result.is_error == is_refusal(result.structured_content)
    return result.structured_content


def is_refusal(answer: Answer) -> bool:
    """Whether a call failed: a look at a run that failed tells of an error too, and of a status."""
    return "error" in answer and answer.get("code") is not None and "status" not in answer


def _over(client: Client) -> Call:
    async def call(name: str, arguments: Answer) -> Answer:
        return body(await client.call_tool(name, arguments))

    return call


@asynccontextmanager
async def mcp_stdio() -> AsyncIterator[Call]:
    async with Client(started("mcp"), mode="legacy") as client:
        yield _over(client)


@asynccontextmanager
async def mcp_http() -> AsyncIterator[Call]:
    async with http_client() as client:
        yield _over(client)


@asynccontextmanager
async def python() -> AsyncIterator[Call]:
    async def call(name: str, arguments: Answer) -> Answer:
        fields = BY_NAME[name].arguments.model_fields if name in BY_NAME else {}
        needed = {field for field, facts in fields.items() if facts.is_required()}
        if name not in BY_NAME or not needed <= set(arguments) <= set(fields):
            # Python itself refuses such a call
            return await halteres.agent.Tools().call(name, **arguments)
        return json.loads(await getattr(halteres.agent, name)(**arguments))

    yield call


@asynccontextmanager
async def python_client() -> AsyncIterator[Call]:
    tools = halteres.agent.Tools()

    async def call(name: str, arguments: Answer) -> Answer:
        return await tools.call(name, **arguments)

    yield call


@asynccontextmanager
async def openai_chat() -> AsyncIterator[Call]:
    async def call(name: str, arguments: Answer) -> Answer:
        function = {"name": name, "arguments": json.dumps(arguments)}
        message = await openai.answer({"id": "call_1", "type": "function", "function": function})
        assert (message["role"], message["tool_call_id"]) == ("tool", "call_1")
        return json.loads(message["content"])

    yield call


@asynccontextmanager
async def hermes_plugin() -> AsyncIterator[Call]:
    async def call(name: str, arguments: Answer) -> Answer:
        answer = await hermes.handle(name, arguments, task_id="t")
        return json.loads(answer if isinstance(answer, str) else answer["content"][0]["text"])

    yield call


@asynccontextmanager
async def http_api() -> AsyncIterator[Call]:
    session = {SESSION: os.environ["HALTERES_SESSION"]} if "HALTERES_SESSION" in os.environ else {}
    async with control.client(**session) as http:

        async def call(name: str, arguments: Answer) -> Answer:
            answer = await http.post(f"/api/tools/{name}", json=arguments, timeout=60)
            assert answer.is_error == is_refusal(answer.json())
            return answer.json()

        yield call


@asynccontextmanager
async def command_line() -> AsyncIterator[Call]:
    async def call(name: str, arguments: Answer) -> Answer:
        if not _can_be_typed(name, arguments):
            return (await asyncio.to_thread(cli.answer, name, arguments)).body
        words = words_of(BY_NAME[name], arguments)[2:]
        ended = await asyncio.to_thread(CliRunner().invoke, cli.tools_app(), [*words, "--json"])
        answer = json.loads(ended.stdout)
        assert ended.exit_code == ("error" in answer)
        return answer

    yield call


def _can_be_typed(name: str, arguments: Answer) -> bool:
    """Whether words can say it: there is no command for a tool that is not there, and no word for
    an empty list.
    """
    known = BY_NAME[name].arguments.model_fields if name in BY_NAME else {}
    return name in BY_NAME and set(arguments) <= set(known) and [] not in arguments.values()


TRANSPORTS: dict[str, Transport] = {
    "python": python,
    "python client": python_client,
    "openai": openai_chat,
    "hermes": hermes_plugin,
    "http": http_api,
    "command line": command_line,
    "mcp over http": mcp_http,
    "mcp over stdio": mcp_stdio,
}


def standing_in(monkeypatch: Any, name: str, function: Callable[..., Any]) -> None:
    """Let a tool of the table do something else."""
    monkeypatch.setitem(BY_NAME, name, dataclasses.replace(BY_NAME[name], function=function))


def home_of(path: Path, monkeypatch: Any) -> Path:
    """HALTERES_HOME, nobody's session, no folder of environments of the machine's."""
    monkeypatch.setenv("HALTERES_HOME", str(path))
    monkeypatch.delenv("HALTERES_SESSION", raising=False)
    monkeypatch.delenv("HALTERES_ENVIRONMENTS", raising=False)
    return path
