"""kill -9 of the service in mid-episode: the same trajectory. We chose it; no protocol asks for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from deadlines import until
from inexact import PROGRAM

pytestmark = pytest.mark.runs

EPISODE_S = 120
TURNS = 4
KILLED_IN = (1, 2)  # turns under way while the service dies

ENDLESS = {"ignore_eos": True, "skip_special_tokens": False}

SAME_SEEDS = """
import sys
from halteres.service.inference import answering
answering.drawn_seed = lambda: 7
from halteres.service.server import main
sys.exit(main())
"""
"""A service whose calls all have one seed, so that two episodes are comparable."""


@dataclass
class Mortal:
    """A service on a socket that outlives it."""

    program: str
    state: Path
    bound: socket.socket
    arguments: tuple[str, ...]
    popen: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.bound.getsockname()[1]}"

    def start(self) -> None:
        argv = ["--state", str(self.state), "--threads", "1", *self.arguments]
        descriptor = self.bound.fileno()
        command = [sys.executable, "-c", self.program, *argv, "--listen-fd", str(descriptor)]
        with (self.state.parent / f"{self.state.name}.log").open("ab") as log:
            self.popen = subprocess.Popen(command, pass_fds=[descriptor], stderr=log, stdout=log)

    def kill(self) -> None:
        os.kill(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def states(self) -> list[str]:
        """Of the calls in the journal."""
        connection = sqlite3.connect(f"file:{self.state}/journal.sqlite?mode=ro", uri=True)
        try:
            query = "SELECT state FROM requests WHERE kind = 'gateway' ORDER BY accepted_at"
            return [state for (state,) in connection.execute(query)]
        finally:
            connection.close()


@contextmanager
def mortal(program: str, state: Path, *arguments: str) -> Iterator[Mortal]:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        service = Mortal(program, state, bound, arguments)
        service.start()
        try:
            yield service
        finally:
            service.popen.kill()
            service.popen.wait()


async def ask(method: str, url: str, body: Any = None, **headers: str) -> Any:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


async def completed(url: str, body: Any) -> Any:
    """As OpenAI's client and Anthropic's: the same body again, with the number of its retry."""
    async with aiohttp.ClientSession() as http:
        for number in range(60):
            headers = {"x-stainless-retry-count": str(number)}
            try:
                async with http.post(url, json=body, headers=headers) as response:
                    if response.status == 200:
                        return await response.json()
                    assert response.status >= 500, await response.text()
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.25)
    raise AssertionError("The service did not come back.")


async def episode(service: Mortal, killed_in: tuple[int, ...]) -> Any:
    """What is trained on of an episode."""
    opened = await ask("POST", f"{service.url}/gateway/sessions", {"task": "t"})
    url = f"{opened['openai_base_url']}/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "Tell me of 17 + 25."}]
    for turn in range(TURNS):
        # Long answers, so that the service dies within one: an end token is text like any other.
        body = {"messages": messages, "max_tokens": 120, **ENDLESS}
        answering = asyncio.create_task(completed(url, body))
        if turn in killed_in:
            await until(lambda: service.states()[-1:] == ["accepted"], within_s=EPISODE_S)
            service.kill()
            service.start()
        answer = await answering
        messages += [
            answer["choices"][0]["message"],
            {"role": "user", "content": "Go on."},
        ]
    session = f"{service.url}/gateway/sessions/{opened['session']}"
    await ask("POST", f"{session}/reward", {"reward": 1.0})
    found = await ask("GET", f"{session}/sequences")
    for one in found["sequences"]:
        del one["nodes"]
    for one in found["turns"]:
        del one["node"]
    return found["sequences"], found["turns"]


async def test_an_episode_in_which_the_service_is_killed_is_the_same_trajectory(
    tmp_path: Path,
) -> None:
    """The built-in model, whose engine draws the same again; twice the service dies while a call is
    under way, and its client sends it again.
    """
    found = []
    async with asyncio.timeout(2 * EPISODE_S):
        for name, killed_in in (("undisturbed", ()), ("killed", KILLED_IN)):
            with mortal(SAME_SEEDS, tmp_path / name) as service:
                found.append(await episode(service, killed_in))
                assert service.states() == ["done"] * TURNS
    undisturbed, killed = found
    assert killed == undisturbed
    [sequence], turns = killed
    assert len(turns) == TURNS
    assert sum(mask >= 0 for mask in sequence["masks"]) == 120 * TURNS


async def test_an_engine_that_draws_otherwise_answers_a_settled_call_from_the_journal(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(EPISODE_S):
        with mortal(PROGRAM, tmp_path / "state", "--engine", "scripted") as service:
            opened = await ask("POST", f"{service.url}/gateway/sessions", {"task": "t"})
            url = f"{opened['openai_base_url']}/chat/completions"
            body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 12}
            body |= ENDLESS
            first = await ask("POST", url, body)
            service.kill()
            service.start()
            again = await ask("POST", url, body, **{"x-stainless-retry-count": "1"})
            assert again["choices"] == first["choices"]
            other = await ask("POST", url, body)
            assert other["choices"] != first["choices"]
            assert service.states() == ["done", "done"]
