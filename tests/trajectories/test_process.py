"""The server as a process: its socket, its end, its weight."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .scenes import ServerProcess

COMMAND = (sys.executable, "-m", "halteres.trajectories")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_on_a_signal(server: ServerProcess, number: int) -> None:
    assert server.end(number) in (0, -signal.SIGTERM)


def test_it_ends_when_its_lifeline_does(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "--database", str(tmp_path / "q.sqlite"), "--port", "0"],
        pass_fds=[reading],
        env={**os.environ, "HALTERES_LIFELINE_FD": str(reading)},
        stderr=subprocess.DEVNULL,
    )
    os.close(reading)
    os.close(writing)
    try:
        assert process.wait(10) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


def test_a_busy_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        ended = subprocess.run(
            [*COMMAND, "--database", str(tmp_path / "q.sqlite"), "--port", port],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: Port {port} cannot be used.")


def test_it_loads_no_torch_and_no_sdk() -> None:
    code = (
        "import sys, halteres.trajectories.__main__, halteres.clients.trajectories\n"
        "assert not {'torch', 'tinker', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
