"""Is this machine ready: the findings that `halteres doctor` prints and `rl_health_check` sums up.

Owns: the list, in the order in which a new user would meet them.
Never: mends anything; loads what it looks for.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Iterator

from halteres.agent.known_models import known_models, proposed
from halteres.config import environ
from halteres.config.policies import load_policy
from halteres.models import TINY, builtin_path
from halteres.runs.starting import machine
from halteres.runs.starting.preflight import Check, attempt
from halteres.runs.supervision.roles import WELL_KNOWN

MIN_FREE_BYTES = 1 << 30
PACKAGES = ("torch", "transformers", "tinker")


def machine_checks(there: machine.Machine | None = None) -> Iterator[Check]:
    """Every finding; `there` is this machine, where somebody has looked already."""
    there = there or machine.look()
    yield Check(
        name="python",
        ok=sys.version_info >= (3, 11),
        found=sys.version.split()[0],
        remedy="3.11 or newer is needed.",
    )
    yield from map(_package, PACKAGES)
    yield _builtin_model()
    yield _home()
    yield _policy()
    for port, command in zip(WELL_KNOWN, ("serve trajectories", "serve", "reward serve"), strict=True):
        yield _port(port, command)
    yield _machine(there)
    yield _models(there)


def _package(name: str) -> Check:
    try:
        return Check(name=name, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name=name, ok=False, found="not installed", remedy="Install it: make install.")


def _builtin_model() -> Check:
    folder = builtin_path(TINY)
    ok = folder is not None and (folder / "model.safetensors").is_file()
    return Check(name="built-in model", ok=ok, found=str(folder), remedy="Reinstall: its files are missing.")


def _home() -> Check:
    home = environ.home()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    return Check(
        name="HALTERES_HOME",
        ok=os.access(existing, os.W_OK) and free >= MIN_FREE_BYTES,
        found=f"{home}, {free / 1e9:.0f} GB free",
        remedy="Make room, or export HALTERES_HOME=a writable folder.",
    )


def _policy() -> Check:
    check, policy = attempt("policy", load_policy)
    if policy is None:
        said = check.failure.sentence if check.failure else ""
        return Check(name="policy", ok=False, found=said, remedy=f"Mend {environ.home() / 'policy.yaml'}.")
    return Check(name="policy", found=policy.name)


def _port(port: int, command: str) -> Check:
    busy = f"busy: `halteres {command}` wants --port (runs have ports of their own)"
    return Check(name=f"port {port}", found="free" if _is_free(port) else busy)


def _is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _machine(there: machine.Machine) -> Check:
    free, total = there.memory.free, there.memory.total
    told = f"{there.cores} cores, {_gb(free)} of {_gb(total)} GB memory free, "
    if there.unused_gpu is not None:
        unverified = f"{there.unused_gpu.name} is not used: its path is not verified yet (HALTERES_DEVICE=cuda uses it)"
        return Check(name="machine", found=told + unverified)
    if there.gpu is None:
        return Check(name="machine", found=f"{told}no GPU: the engine runs on the CPU")
    return Check(name="machine", found=f"{told}{there.gpu.name} with {_gb(there.gpu.memory.free)} GB free")


def _models(there: machine.Machine) -> Check:
    first = proposed(known_models(there=there))
    return Check(
        name="memory",
        ok=first.fits != "no",
        found=f"{first.name} needs {first.need_gb} GB, {first.free_gb} GB are free",
        remedy="End what else uses the memory.",
    )


def _gb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:.1f}"
