"""The server as a process: its socket, its end, its weight."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from halteres.trajectories.stores.sqlite import SqliteStore

from .server_fixtures import TRAINER, ServerProcess, group

pytestmark = pytest.mark.runs

COMMAND = (sys.executable, "-m", "halteres.trajectories")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order_on_a_signal(server: ServerProcess, number: int) -> None:
    assert server.end(number) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whoever_is_held_is_answered_when_it_ends(server: ServerProcess, number: int) -> None:
    """At once where there is an answer; with a sentence where a body had not come, for which it
    waits 3 s.
    """
    server.ask("/register", TRAINER)
    stderr = server.process.stderr
    assert stderr is not None
    with (
        socket.create_connection(server.listener.getsockname()) as held,
        socket.create_connection(server.listener.getsockname()) as half,
    ):
        held.sendall(b"GET /batch?wait=60 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        half.sendall(
            b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n{"
        )
        server.ask("/info")  # both have been read
        began = time.monotonic()
        server.process.send_signal(number)
        assert all_of(held).endswith(b'{"batch":null}')
        assert time.monotonic() - began < 2
        assert b" 503 " in all_of(half).partition(b"\r\n")[0]
    assert server.process.wait(10) in (0, -signal.SIGTERM)
    assert b"Traceback" not in stderr.read()


def test_the_files_of_a_queue_are_their_owners_alone(server: ServerProcess, tmp_path: Path) -> None:
    server.ask("/register", TRAINER)
    server.ask("/batch")
    server.ask("/scored_data", group())
    written = list(tmp_path.rglob("*"))
    assert {".seg", ".sqlite", ".lock"} <= {path.suffix for path in written}
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def all_of(connection: socket.socket) -> bytes:
    """Everything that comes until the server closes."""
    connection.settimeout(10)
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("name", ["q?1.sqlite", "p%41.sqlite", "mode=ro&x.sqlite", "#a b.sqlite"])
def test_a_database_is_the_file_that_was_named(tmp_path: Path, name: str) -> None:
    with closing(SqliteStore(tmp_path / name)):
        assert (tmp_path / name).stat().st_size > 0


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


def refused(database: str, folder: Path) -> str:
    """The one line with which the server ends."""
    ended = subprocess.run(
        [*COMMAND, "--database", database, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=folder,
    )
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (1, "")
    return line


@pytest.mark.parametrize(
    ("database", "says"),
    [
        ("/", "'/' can be no database. It is a folder; a queue is kept in a file."),
        (".", "Name a file in a folder of yours: --database {folder}/trajectories.sqlite."),
        ("new/", "'new/' can be no database. It is a folder"),
        ("file/q.sqlite", "The folder of the database {folder}/file/q.sqlite cannot be made. "),
        (
            "file/new/q.sqlite",
            "The folder of the database {folder}/file/new/q.sqlite cannot be made. Not a directory",
        ),
        ("pipe", "It is there, but is no file."),
        (
            "/proc/new/q.sqlite",
            "The folder of the database /proc/new/q.sqlite cannot be made. No such file",
        ),
        ("~nobody-is-called-so/q.sqlite", "Could not determine home directory."),
        ("x" * 300, "File name too long."),
    ],
)
def test_a_name_that_can_be_no_database_is_one_sentence(
    database: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    assert says.format(folder=tmp_path) in refused(database, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pipe"}, (
        "it left something behind"
    )


def test_it_begins_with_the_file_it_uses_and_whether_that_is_new(tmp_path: Path) -> None:
    """A mistyped path makes a folder and an empty queue, which should be seen."""
    (tmp_path / "old").mkdir()

    def first_line(file: str) -> str:
        command, lines = [*COMMAND, "--database", str(tmp_path / file), "--port", "0"], [""]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while process.stdout and "answers on" not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], "it ended"
            process.terminate()
        return lines[1]

    old, new = tmp_path / "old" / "q.sqlite", tmp_path / "odl" / "q.sqlite"
    assert first_line("odl/q.sqlite") == f"The queue is in {new}, a new file in a new folder.\n"
    assert first_line("old/q.sqlite") == f"The queue is in {old}, a new file.\n"
    assert first_line("old/../old/q.sqlite") == f"The queue is in {old}.\n"


def test_a_lost_database_ends_it_with_one_sentence(server: ServerProcess) -> None:
    """Whoever starts it again finds what was acknowledged; going on would answer from memory nobody
    kept.
    """
    with closing(sqlite3.connect(server.database)) as other:
        other.execute("DROP TABLE groups")
    with pytest.raises(AssertionError, match="store_failed"):
        server.ask("/scored_data", group())
    assert server.process.stderr
    said = server.process.stderr.read().decode().splitlines()
    assert (
        said[-1].startswith("error: The trajectory database")
        and "no such table: groups" in said[-1]
    )
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
        [*COMMAND, "--database", str(file), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(
        f"error: The trajectory database {file} raised DecodeError"
    )


def test_it_loads_no_torch_and_no_sdk() -> None:
    code = (
        "import sys, halteres.trajectories.__main__, halteres.clients.trajectories\n"
        "assert not {'torch', 'tinker', 'transformers', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
