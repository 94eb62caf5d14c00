"""`halteres mcp` as a host starts it: what is on the wire, what ends it, who may talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import Implementation

from halteres.agent.transports.access import token
from halteres.cli import main as program
from halteres.loopback import HOST

from .run_fixtures import RUN, add_alert, make_run, supervised
from .transports import MAIN, MODES, TODAY, body, home_of, http_client, standing_in, started

pytestmark = pytest.mark.runs

PLANTED = "hunter2-and-more"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


def tool_that(*lines: str) -> str:
    """Code that makes `rl_list_runs` do something else; its answer holds `told`."""
    inside = "\n    ".join(lines)
    return f"""
import asyncio, atexit, dataclasses, os, subprocess, sys
from halteres.agent.table import BY_NAME
tool = BY_NAME["rl_list_runs"]
async def instead(caller):
    told = None
    {inside}
    return tool.result(runs=[], count=0, told=told, next="x")
BY_NAME["rl_list_runs"] = dataclasses.replace(tool, function=instead)
"""


class Wire:
    """A host that reads and writes the lines of the protocol itself."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[bytes] = []

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    async def answered(self, number: int) -> dict[str, Any]:
        """The answer to a request; what else arrives is kept."""
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line)
            message = json.loads(line)
            if message.get("id") == number:
                return message
        raise AssertionError("the wire ended")

    async def complained(self, words: str) -> str:
        """Wait for a line on stderr that holds these words."""
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            if words in (text := line.decode()):
                return text
        raise AssertionError("stderr ended")

    async def greeted(self) -> None:
        """The handshake of revision 2025-11-25."""
        who = {"name": "test", "version": "1"}
        self.send(
            id=0,
            method="initialize",
            params={"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": who},
        )
        answer = await self.answered(0)
        assert answer["result"]["protocolVersion"] == "2025-11-25"
        self.send(method="notifications/initialized")

    def call(self, number: int) -> None:
        self.send(id=number, method="tools/call", params={"name": "rl_list_runs", "arguments": {}})

    async def closed(self) -> tuple[bytes, bytes]:
        """Close standard input; what was written until the process ended, on stdout and on
        stderr.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await asyncio.wait_for(self.process.communicate(), 10)


@asynccontextmanager
async def hosted(first: str, *arguments: str, **variables: str) -> AsyncIterator[Wire]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", f"{first}\n{MAIN}", *(arguments or ("mcp",))),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **variables},
    )
    try:
        async with asyncio.timeout(20):
            yield Wire(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_nothing_but_the_protocol_reaches_standard_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever prints: a module before the server starts, a tool in four ways, a library when the
    process ends.
    """
    # what a module prints early would not wait in a buffer
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    loud = tool_that(
        'print("by print")',
        'os.write(1, b"by descriptor\\n")',
        'subprocess.run(["echo", "by a child"])',
        'sys.__stdout__.write("by the first stdout")',
    )
    async with hosted(f'print("before")\n{loud}\natexit.register(print, "at the end")') as wire:
        await wire.greeted()
        wire.call(1)
        assert (await wire.answered(1))["result"]["isError"] is False
        rest, complaints = await wire.closed()
        assert rest == b""
        assert [json.loads(line)["id"] for line in wire.lines] == [0, 1]
        for words in (
            "before",
            "by print",
            "by descriptor",
            "by a child",
            "by the first stdout",
            "at the end",
        ):
            assert words in complaints.decode(), words
        assert wire.process.returncode == 0


async def test_a_tool_cannot_read_the_wire_and_has_no_torch() -> None:
    sees = tool_that(
        'told = [sys.stdin.read(), "torch" in sys.modules and sys.modules["torch"] is None]'
    )
    async with hosted(sees) as wire:
        await wire.greeted()
        wire.call(1)
        assert (await wire.answered(1))["result"]["structuredContent"]["told"] == ["", True]


async def test_a_secret_is_neither_in_the_answer_nor_in_the_log() -> None:
    async with hosted(
        tool_that('raise ValueError(os.environ["TINKER_API_KEY"])'), TINKER_API_KEY=PLANTED
    ) as wire:
        await wire.greeted()
        wire.call(1)
        answer = await wire.answered(1)
        _, complaints = await wire.closed()
    assert "raised ValueError: ***." in answer["result"]["structuredContent"]["error"]
    assert "ValueError: ***" in complaints.decode()
    assert PLANTED not in f"{wire.lines}{complaints.decode()}"


async def test_the_server_ends_with_its_client_even_while_a_call_waits() -> None:
    async with hosted(
        tool_that('print("inside", flush=True)', "await asyncio.Event().wait()")
    ) as wire:
        await wire.greeted()
        wire.call(1)
        await wire.complained("inside")
        await wire.closed()
        assert wire.process.returncode == 0


@pytest.mark.parametrize(
    "value",
    ['"\\ud800"', "[" * 3000 + "]" * 3000, "9" * 5000, "{"],
    ids=["surrogate", "deep", "digits", "broken"],
)
async def test_a_line_that_cannot_be_read_is_answered_and_the_next_one_too(value: str) -> None:
    """JSON-RPC's parse error; with the id, wherever the client's SDK writes it, so that the call
    ends.
    """
    arguments = f'{{"id": 9, "value": {value}}}'
    method = (
        f'"method": "tools/call", "params": {{"name": "rl_edit_config", "arguments": {arguments}}}'
    )
    async with hosted("") as wire:
        await wire.greeted()
        assert wire.process.stdin is not None
        for line in (
            f'{{"jsonrpc": "2.0", "id": 1, {method}}}\n',
            f'{{{method}, "jsonrpc": "2.0", "id": 2}}\n',
        ):
            wire.process.stdin.write(line.encode())
        for number in (1, 2):
            assert (await wire.answered(number))["error"]["code"] == -32700
        wire.process.stdin.write(b"{\n")
        wire.call(3)
        assert (await wire.answered(3))["result"]["isError"] is False
        assert json.loads(wire.lines[-2])["id"] is None


async def test_arguments_nested_without_end_do_not_end_the_server() -> None:
    async with hosted("") as wire:
        await wire.greeted()
        assert wire.process.stdin is not None
        for number, depth in ((1, 100), (2, 100_000)):
            deep = "[" * depth + "]" * depth
            call = f'{{"name": "rl_edit_config", "arguments": {{"field": "x", "value": {deep}}}}}'
            line = (
                f'{{"jsonrpc": "2.0", "id": {number}, "method": "tools/call", "params": {call}}}\n'
            )
            wire.process.stdin.write(line.encode())
        assert (await wire.answered(1))["result"]["structuredContent"][
            "code"
        ] == "invalid_arguments"
        wire.call(3)
        assert (await wire.answered(3))["result"]["isError"] is False


async def test_ctrl_c_ends_the_server_at_once() -> None:
    async with hosted("") as wire:
        await wire.greeted()
        wire.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(wire.process.wait(), 5) == -signal.SIGINT


async def test_each_server_process_has_a_draft_of_its_own_unless_it_is_told_one() -> None:
    async def draft(**variables: str) -> str:
        async with Client(
            started("mcp", first=tool_that("told = caller.draft"), **variables)
        ) as client:
            return body(await client.call_tool("rl_list_runs", {}))["told"]

    one, another, told = await asyncio.gather(draft(), draft(), draft(HALTERES_SESSION="mine"))
    assert re.fullmatch(r"mcp-[0-9a-f]{8}", one)
    assert one != another
    assert told == "mine"


async def test_each_client_is_shown_an_alert_whole_once() -> None:
    """Over HTTP a session tells one from another; without sessions every answer is whole."""
    run = make_run(steps=12)
    add_alert(run, "truncation", 7)

    async def whole(client: Client) -> list[bool]:
        answers = [await client.call_tool("rl_check_status", {"run_id": RUN}) for _ in range(2)]
        return ["evidence" in body(answer)["alerts"][0] for answer in answers]

    with supervised(run):
        for mode in ("legacy", "auto"):
            async with Client(started("mcp"), mode=mode) as client:
                assert await whole(client) == [True, False]
        async with hosted("", "mcp", "--http", "--port", "0") as wire:
            url = (await wire.complained("MCP at")).split("MCP at ")[1].split(";")[0]
            headers = {"Authorization": f"Bearer {token()}"}
            async with httpx2.AsyncClient(headers=headers, timeout=30) as http:

                def connected(mode: str) -> Client:
                    return Client(streamable_http_client(url, http_client=http), mode=mode)

                async with connected("legacy") as one, connected("legacy") as two:
                    assert [await whole(one), await whole(two)] == [[True, False]] * 2
                async with connected("auto") as client:
                    assert await whole(client) == [True, True]


async def test_a_client_whose_calls_may_take_longer_is_known_by_its_name() -> None:
    with supervised(make_run(steps=12)):

        async def wait_of(name: str, **variables: str) -> int:
            info = Implementation(name=name, version="1")
            async with Client(started("mcp", **variables), client_info=info) as client:
                answer = body(await client.call_tool("rl_check_status", {"run_ids": [RUN]}))
            found = re.search(r"wait_s=(\d+)", answer["next"])
            assert found
            return int(found[1])

        assert await wait_of("somebody") == 50
        assert await wait_of("gemini-cli-mcp-client-halteres") == 540
        assert await wait_of("gemini-cli-mcp-client", HALTERES_LONGEST_WAIT_S="80") == 80


async def test_over_http_a_header_names_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from halteres.agent.table import BY_NAME

    def told(caller: Any) -> Any:
        return BY_NAME["rl_list_runs"].result(runs=[], count=0, told=caller.draft, next="x")

    standing_in(monkeypatch, "rl_list_runs", told)
    for session, draft in ((None, "default"), ("mine", "mine")):
        async with http_client(session) as client:
            assert body(await client.call_tool("rl_list_runs", {}))["told"] == draft


async def test_over_http_only_this_machine_with_the_token_is_answered(home: Path) -> None:
    async with hosted("", "mcp", "--http", "--port", "0") as wire:
        url = re.search(r"http://\S+/mcp", await wire.complained("MCP at"))
        assert url is not None
        file = home / "token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        right = {"Authorization": f"Bearer {file.read_text().strip()}"}
        async with httpx2.AsyncClient() as stranger:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer guessed"}, 401),
                ({**right, "Host": "evil.example"}, 403),
                ({**right, "Origin": "http://evil.example"}, 403),
            ):
                assert (await stranger.post(url[0], headers=headers, json={})).status_code == status
        async with httpx2.AsyncClient(headers=right, timeout=20) as http:
            transport = streamable_http_client(url[0], http_client=http)
            async with Client(transport, mode=MODES[TODAY]) as client:
                assert (await client.call_tool("rl_nothing", {})).is_error
        wire.process.terminate()
        assert await asyncio.wait_for(wire.process.wait(), 10) == 0


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    with contextlib.closing(await asyncio.start_server(lambda *_: None, HOST, 0)) as taken:
        port = taken.sockets[0].getsockname()[1]
        async with hosted("", "mcp", "--http", "--port", str(port)) as wire:
            _, complaints = await wire.closed()
            assert (
                complaints.decode()
                .splitlines()[-1]
                .startswith(f"error: Port {port} of {HOST} cannot be used.")
            )
            assert wire.process.returncode == 1


def test_without_the_extra_one_sentence_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["halteres", "mcp"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "error: MCP needs the package `mcp`. It is not installed. pip install 'halteres[mcp]'\n"
    )
