"""The server as a process: its socket, its end, its weight."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from halteres.trajectories.stores.sqlite import SqliteStore

from .scenes import ServerProcess, group

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
    assert line.startswith(f"error: Port {port} of 127.0.0.1 cannot be used.")


def test_a_lost_database_ends_it_with_one_sentence(server: ServerProcess) -> None:
    """Whoever starts it again finds what was acknowledged; going on would answer from memory nobody kept."""
    with closing(sqlite3.connect(server.database)) as other:
        other.execute("DROP TABLE groups")
    with pytest.raises(AssertionError, match="store_failed"):
        server.ask("/scored_data", group())
    assert server.process.stderr
    said = server.process.stderr.read().decode().splitlines()
    assert said[-1].startswith("error: The trajectory database") and "no such table: groups" in said[-1]
    assert server.process.wait(10) == 1


def test_a_database_that_cannot_be_read_is_no_good_start(tmp_path: Path) -> None:
    file = tmp_path / "q.sqlite"
    SqliteStore(file).close()
    with closing(sqlite3.connect(file)) as other:
        other.execute(
            "INSERT INTO run (id, registration, uuid, started, step, first_group, parked) "
            "VALUES (1, '{', '', 0, 0, 0, 0)"
        )
        other.commit()
    ended = subprocess.run(
        [*COMMAND, "--database", str(file), "--port", "0"], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: The trajectory database {file} raised DecodeError")


def test_it_loads_no_torch_and_no_sdk() -> None:
    code = (
        "import sys, halteres.trajectories.__main__, halteres.clients.trajectories\n"
        "assert not {'torch', 'tinker', 'transformers', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
