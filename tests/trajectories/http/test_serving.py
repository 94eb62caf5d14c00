"""The server as operators start it: its commands, its first line, its patience with connections."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
import requests
from starlette.types import Receive, Scope, Send

from halteres.trajectories import server
from trajectories.server_fixtures import TRAINER, group

"""Bytes of bodies: uvicorn stops reading a connection that holds more than the first."""

TOKEN = "correct-horse-battery"
RUN_API = (
    "-c",
    "import sys; from halteres.trajectories.__main__ import run_api; sys.exit(run_api())",
)


@contextmanager
def started(
    folder: Path, *words: str, command: tuple[str, ...] = ("-m", "halteres.trajectories")
) -> Iterator[list[str]]:
    """A server on a free port; gives the lines it begins with, the last of which names its URL."""
    environment = {**os.environ, "HALTERES_HOME": str(folder), "HALTERES_TRAJECTORY_TOKEN": TOKEN}
    process = subprocess.Popen(
        [sys.executable, *command, "--port", "0", *words],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout
        lines: list[str] = []
        while "answers on" not in (lines or [""])[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        yield lines
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout:
            process.stdout.close()


def url_in(line: str) -> str:
    return line.split(" answers on ")[1].split(": ")[0]


def with_login(url: str) -> str:
    return url.replace("http://", f"http://x:{TOKEN}@")


def ended(
    folder: Path, *words: str, command: tuple[str, ...] = ("-m", "halteres.trajectories")
) -> tuple[int, str]:
    """Exit code and stderr of a server that does not start."""
    found = subprocess.run(
        [sys.executable, *command, "--port", "0", *words],
        env={**os.environ, "HALTERES_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return found.returncode, found.stderr


def test_old_clients_reach_a_server_with_a_token_by_its_url_alone(tmp_path: Path) -> None:
    """aiohttp as atroposlib 0.4.0 calls it (a GET with a JSON body among them), requests as its
    trainers do.
    """

    async def environment(url: str) -> tuple[int, int]:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/status-env", json={"env_id": 0}) as answer:
                polled = answer.status
            async with session.post(
                f"{url}/scored_data", data=json.dumps(group()).encode()
            ) as answer:
                return polled, answer.status

    with started(tmp_path) as lines:
        url = url_in(lines[-1])
        assert asyncio.run(environment(with_login(url))) == (200, 200)
        assert (
            requests.post(f"{with_login(url)}/register", json=TRAINER, timeout=10).status_code
            == 200
        )
        assert requests.get(f"{with_login(url)}/info", timeout=10).json()["batch_size"] == 4
        assert requests.get(f"{url}/info", timeout=10).status_code == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        status = requests.get(f"{url}/status", headers=bearer, timeout=10).json()
        assert status == {"current_step": 0, "queue_size": 1}
    with started(tmp_path) as lines:
        assert lines[-1].endswith(": 1 groups wait, step 0.\n"), (
            "it says what waits, in the default database"
        )


def test_run_api_is_the_original_s_command(tmp_path: Path) -> None:
    with started(tmp_path, "--reload", "--host", "127.0.0.1", command=RUN_API) as lines:
        reload, here, file, answers = lines
    assert "--reload is of no use here" in reload
    assert file == f"The queue is in {tmp_path}/trajectories.sqlite, a new file.\n"
    assert "Only this machine is served" in here and "--host 0.0.0.0" in here
    assert answers.startswith("The trajectory server answers on http://127.0.0.1:")
    assert answers.endswith("0 groups wait, no trainer yet.\n")


@pytest.mark.parametrize("command", [RUN_API, ("-m", "halteres", "serve", "trajectories")])
def test_beyond_this_machine_it_wants_a_token_or_to_be_told(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    code, said = ended(tmp_path, "--host", "0.0.0.0", command=command)
    assert code == 1
    assert said.startswith("error: 0.0.0.0 is no address of the loopback.")
    assert "--token-file" in said and "HALTERES_TRAJECTORY_TOKEN" in said and "--insecure" in said


async def test_nobody_chooses_who_they_are() -> None:
    """The client's address decides whether replies are compressed; a header that anybody can send
    does not.
    """
    seen = list[tuple[str, int]]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"])

    config = server._config(app)  # pyright: ignore[reportPrivateUsage]
    config.load()
    headers = [(b"x-forwarded-for", b"10.1.2.3"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "client": ("127.0.0.1", 4), "scheme": "http", "headers": headers}
    await config.loaded_app(scope, None, None)  # type: ignore[arg-type]
    assert (seen, scope["scheme"]) == ([("127.0.0.1", 4)], "http")
