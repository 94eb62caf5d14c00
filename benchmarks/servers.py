"""The servers of `service_overhead.py`: ours, and SkyRL's, which serves the Tinker API too.

Owns: how each is started, told to be ready, and ended.
Never: measures.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from halteres.config import environ

HERE = Path(__file__).parent
PEER = ("torch", "skyrl[tinker,jax]==0.3.0", "tinker==0.24.1", "uv")
"""SkyRL accepts SDKs up to 0.24.1, and starts its engine by `uv run`."""

READY_S = 180
_OLD_PYTHON = """import sys
if sys.version_info < (3, 12):
    import typing, typing_extensions
    typing.TypedDict = typing_extensions.TypedDict
"""
"""skyrl/tinker/types.py of 0.3.0 declares a typing.TypedDict, which pydantic refuses before Python
3.12.
"""


def peer_python() -> str:
    """The interpreter of SkyRL's own environment; installed on first use."""
    return subprocess.check_output(
        [HERE.parent / "scripts" / "client", "skyrl", *PEER], text=True, encoding="utf-8"
    ).strip()


@contextmanager
def halteres(scratch: Path, model: str, engine: str, *further: str) -> Iterator[str]:
    """The address of our service, started with these further options, while the block runs."""
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        command = [
            sys.executable,
            "-m",
            "halteres.service",
            "--state",
            str(scratch / "state"),
            "--model",
            model,
        ]
        command += ["--engine", engine, "--listen-fd", str(bound.fileno()), *further]
        # answered when the engine is ready
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with _running(command, scratch, environ.for_child(), (bound.fileno(),)) as process:
            _wait(f"{url}/halteres/v1/info", process, scratch)
            yield url


@contextmanager
def skyrl(scratch: Path, model: str, python: str) -> Iterator[str]:
    """The address of SkyRL's server with its JAX backend, while the block runs."""
    scratch.mkdir()
    (scratch / "sitecustomize.py").write_text(_OLD_PYTHON, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    uv = str(Path(python).parent / "uv")
    command = [
        uv,
        "run",
        "--no-project",
        "--active",
        "-m",
        "skyrl.tinker.api",
        "--base-model",
        model,
    ]
    command += [
        "--backend",
        "jax",
        "--backend-config",
        json.dumps({"max_lora_adapters": 4, "max_lora_rank": 8}),
    ]
    command += [
        "--database-url",
        f"sqlite:///{scratch}/tinker.db",
        "--checkpoints-base",
        str(scratch / "checkpoints"),
    ]
    variables = environ.for_child(
        VIRTUAL_ENV=str(Path(python).parent.parent),
        PATH=f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(scratch),
        JAX_PLATFORMS="cpu",
        UV_OFFLINE="1",
    )
    with _running([*command, "--host", "127.0.0.1", "--port", port], scratch, variables) as process:
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/api/v1/healthz", process, scratch)
        yield url


@contextmanager
def _running(
    command: list[str],
    scratch: Path,
    variables: Mapping[str, str],
    descriptors: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which ends as one."""
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=variables,
            pass_fds=descriptors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, then end what is left of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], scratch: Path) -> None:
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310  our own address
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.2)
    raise SystemExit(
        f"error: {url} is not ready; the log ends "
        f"with:\n{(scratch / 'log').read_text(encoding='utf-8')[-3000:]}"
    )
