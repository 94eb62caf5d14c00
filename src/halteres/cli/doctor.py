"""`halteres doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import typer

MIN_FREE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def doctor() -> None:
    """Check Python, packages, the built-in model, ports and disk; exit code 1 where something is missing."""
    failed = 0
    for check in checks():
        failed += not check.ok
        typer.echo(f"{'ok ' if check.ok else 'NO '} {check.name:16} {check.found}")
        if not check.ok and check.remedy:
            typer.echo(f"    {'':16} {check.remedy}")
    if failed:
        raise typer.Exit(1)


def checks() -> Iterator[Check]:
    """Every finding, in the order a new user would meet them."""
    yield Check(
        name="python", ok=sys.version_info >= (3, 11), found=sys.version.split()[0], remedy="3.11 or newer is needed."
    )
    for package in ("torch", "transformers", "tinker"):
        yield _package(package)
    yield _model()
    yield _home()
    for port, what in ((8001, "service"), (8000, "trajectory server")):
        yield _port(port, what)
    yield _accelerator()


def _package(name: str) -> Check:
    try:
        return Check(name=name, ok=True, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, found="not installed", remedy="make install")


def _model() -> Check:
    from halteres.models import TINY, builtin_path

    folder = builtin_path(TINY)
    ok = folder is not None and (folder / "model.safetensors").is_file()
    return Check(name="built-in model", ok=ok, found=str(folder), remedy="Reinstall: its files are missing.")


def _home() -> Check:
    from halteres.config import environ

    home = environ.home()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    ok = os.access(existing, os.W_OK) and free >= MIN_FREE_BYTES
    return Check(
        name="HALTERES_HOME",
        ok=ok,
        found=f"{home}, {free / 2**30:.0f} GiB free",
        remedy="Make room, or export HALTERES_HOME=a writable folder.",
    )


def _port(port: int, what: str) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            found = "free"
        except OSError:
            found = f"busy; a run takes another port, `halteres serve` wants --port (default of the {what})"
    return Check(name=f"port {port}", ok=True, found=found)


def _accelerator() -> Check:
    from halteres import process

    gpu = shutil.which("nvidia-smi") is not None
    found = f"{process.usable_cores()} cores, {'an NVIDIA GPU' if gpu else 'no GPU: the engine runs on the CPU'}"
    return Check(name="machine", ok=True, found=found)
