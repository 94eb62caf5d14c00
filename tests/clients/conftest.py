"""The scene of the client tests: our servers as processes of their own, each client in its own
environment.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """One of our servers, running."""

    url: str
    log: Path


@pytest.fixture(scope="session")
def client_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The interpreter of a cached environment that holds these requirements."""

    def python(name: str, *requirements: str) -> str:
        command = [ROOT / "scripts" / "client", name, *requirements]
        with (tmp_path_factory.getbasetemp().parent / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the other worker may want the same environment
            return subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=900
            ).stdout.strip()

    return python


@asynccontextmanager
async def process(
    argv: list[Any], log: Path, **options: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that writes its log there and lives as long as the block."""
    reading, writing = os.pipe()
    inherited = (reading, *options.pop("pass_fds", ()))
    variables = {**os.environ, "HALTERES_LIFELINE_FD": str(reading), **options.pop("env", {})}
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *map(str, argv),
            stdout=output,
            stderr=output,
            env=variables,
            pass_fds=inherited,
            **options,
        )
    os.close(reading)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        try:
            async with asyncio.timeout(15):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()
        os.close(writing)


@asynccontextmanager
async def server(module: str, *argv: Any, probe: str, log: Path) -> AsyncIterator[Server]:
    """`python -m module` behind a port that the test has bound, once its probe answers 200."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-m", module, *argv, "--listen-fd", listening.fileno()]
        async with process(command, log, pass_fds=(listening.fileno(),)) as child:
            await until_ready(f"{url}{probe}", child, log)
            yield Server(url, log)


async def until_ready(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    """Ask until the answer is 200; the port is bound already, so a request waits for the server by
    itself.
    """
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as client:
        while True:
            assert child.returncode is None, log.read_text()[-2000:]
            try:
                async with client.get(url, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            # between probes of a process that has no other way to say that it is ready
            await asyncio.sleep(0.1)
