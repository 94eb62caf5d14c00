"""A service of our own in a process, for programs outside pytest as well as for its tests.

Owns: the port, the process and its end.
Never: knows who the clients are.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from halteres.models import TINY

READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A service that runs."""

    url: str
    log: Path


@contextmanager
def serving(folder: Path, engine: str = "torch", samplers: int = 0) -> Iterator[Serving]:
    """A service with the built-in model while the block runs; its state and log are in `folder`.

    `samplers`: engines beside the one that trains, which alone sample.

    Raises:
        RuntimeError: it ended before it was ready; the message holds the end of its log.
    """
    log = folder / "service.log"
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as bound, log.open("ab") as output:
        argv = [
            "--state",
            folder / "state",
            "--engine",
            engine,
            "--model",
            TINY,
            "--threads",
            "1",
            "--samplers",
            samplers,
        ]
        # SDKs before 0.27.2 cannot close: their models stay alive for ten minutes
        argv += ["--limit", "models=4096"]
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "halteres.service",
                *map(str, argv),
                "--listen-fd",
                str(bound.fileno()),
            ],
            stdout=output,
            stderr=output,
            pass_fds=(bound.fileno(), reading),
            env={**os.environ, "HALTERES_LIFELINE_FD": str(reading)},
        )
        os.close(reading)
        try:
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            _until_ready(f"{url}/api/v1/healthz", child, log)
            yield Serving(url, log)
        finally:
            _ended(child)
            os.close(writing)


def _until_ready(probe: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(
                f"The service ended with {child.returncode}:\n{log.read_text()[-3000:]}"
            )
        try:
            with urllib.request.urlopen(probe, timeout=5) as answer:  # noqa: S310 - our own address
                if answer.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError):
            pass
        time.sleep(0.1)  # between probes of a process that has no other way to say that it is ready
    raise RuntimeError(
        f"The service was not ready after {READY_S:.0f} s:\n{log.read_text()[-3000:]}"
    )


def _ended(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
