"""The two servers: the unmodified `run-api` of atroposlib 0.4.0, and ours.

Owns: how each is started, said to be ready, killed; what the system says of its processor time and
memory. Never: measures a latency; knows what is asked of them.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.trajectories.wire import CutOff, ask
from halteres.config import environ

ROOT = Path(__file__).resolve().parents[2]
PEER = ("atroposlib", "atroposlib==0.4.0")
READY_S = 60.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def peer_python() -> Path:
    """The interpreter of the original's own environment; installed on first use."""
    return Path(
        subprocess.check_output(
            [ROOT / "scripts" / "client", *PEER], text=True, encoding="utf-8"
        ).strip()
    )


@dataclass
class Server:
    """A server process over a folder of its own."""

    name: str
    folder: Path
    port: int = 0
    ready_s: float = 0.0
    """From the start of the process to its first reply."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int:
        """Of the process that serves."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; returns when it answers."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL, its children too."""
        assert self._process is not None
        for pid in [*descendants(self.pid), self.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait()

    def close(self) -> None:
        """End it and delete what it wrote."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A call whose cost does not count."""
        return ask(self.port, method, path, body)

    def _launch(self, command: list[str], descriptors: tuple[int, ...] = ()) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        variables = environ.for_child(HALTERES_HOME=str(self.folder / "home"))
        began = time.perf_counter()
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, pass_fds=descriptors
            )
        self._wait_for_reply()
        self.ready_s = time.perf_counter() - began

    def _wait_for_reply(self) -> None:
        assert self._process is not None
        ends = time.monotonic() + READY_S
        while time.monotonic() < ends and self._process.poll() is None:
            try:
                ask(self.port, "GET", "/", patience_s=2.0)
                return
            except CutOff:  # the socket listens, the server may be dead
                continue
            except ConnectionError:  # nobody listens yet
                time.sleep(0.005)
        raise SystemExit(
            f"error: {self.name} does not "
            f"answer:\n{(self.folder / 'log').read_text(encoding='utf-8')[-3000:]}"
        )


class Original(Server):
    """`run-api --host 127.0.0.1`, otherwise by its defaults."""

    def start(self) -> None:
        """Start it; returns when it answers."""
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        program = str(peer_python().parent / "run-api")
        self._launch([program, "--host", "127.0.0.1", "--port", str(self.port)])


class Halteres(Server):
    """`python -m halteres.trajectories --database FILE`, otherwise by its defaults: durable."""

    _listening: socket.socket | None = None

    def start(self) -> None:
        """Start it; returns when it answers. The socket outlives it, as under our supervisor."""
        if self._listening is None:
            self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
            self.port = self._listening.getsockname()[1]
        descriptor = self._listening.fileno()
        command = [
            sys.executable,
            "-m",
            "halteres.trajectories",
            "--database",
            str(self.folder / "queue.sqlite"),
        ]
        self._launch([*command, "--listen-fd", str(descriptor)], (descriptor,))

    def close(self) -> None:
        """End it and delete what it wrote."""
        super().close()
        if self._listening is not None:
            self._listening.close()


PARTIES: dict[str, type[Server]] = {"original": Original, "halteres": Halteres}
"""They take turns in this order."""


def descendants(pid: int) -> list[int]:
    """Living children, and theirs."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, listed.read_text(encoding="utf-8").split()):
                found += [child, *descendants(child)]
    return found


def cpu_s(pid: int) -> float:
    """Processor seconds (user and system) of a process, its living children, and those that it has
    waited for.
    """
    ticks = 0
    for each in [pid, *descendants(pid)]:
        after_name = (
            Path(f"/proc/{each}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
        ticks += sum(map(int, after_name[11:15]))  # utime, stime, cutime, cstime
    return ticks * TICK_S


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children."""
    pages = (
        int(Path(f"/proc/{each}/statm").read_text(encoding="utf-8").split()[1])
        for each in [pid, *descendants(pid)]
    )
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")
