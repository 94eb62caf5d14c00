"""The engine seen from the supervisor: a grandchild, known by what its service says.

Owns: its entry in run.json; noticing its end at once (Linux: a pid descriptor; elsewhere by looking); how it ended, by
what its service says.
Never: starts or ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres.files import NOT_JSON, read_regular
from halteres.runs import identity

LOOK_EVERY_S = 0.5
LOOK_AGAIN_S = 0.05


def engine_of(service_folder: Path) -> dict[str, Any] | None:
    """The engine's entry for run.json, from its service's service.json; None where that says nothing."""
    try:
        told = json.loads(read_regular(service_folder / "service.json"))
        pid = int(told["engine_pid"])
    except (OSError, *NOT_JSON, KeyError, TypeError):
        return None
    return {**identity.identity(pid), "pgid": _group(pid), "port": None, "exit": None, "state": "running"}


async def gone(who: Mapping[str, Any]) -> None:
    """Return once this process has ended."""
    if sys.platform != "linux":
        while identity.alive(who):  # noqa: ASYNC110 - nothing here tells us of a stranger's end
            await asyncio.sleep(LOOK_EVERY_S)
        return
    try:
        descriptor = os.pidfd_open(who["pid"])
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ended.set)
        if identity.alive(who):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def another(service_folder: Path, than: int) -> dict[str, Any]:
    """The engine that a service started after the one of this pid; returns once it is ready."""
    while (engine := engine_of(service_folder)) is None or engine["pid"] == than:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(LOOK_EVERY_S)
    return engine


async def exit_code(service_folder: Path, pid: int) -> int | None:
    """Of an engine that has ended, negative for a signal; returns once its service, its parent, has written it."""
    while (end := _last_end(service_folder)) is None or end.get("pid") != pid:  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(LOOK_AGAIN_S)
    code = end.get("code")
    return code if isinstance(code, int) else None


def _last_end(service_folder: Path) -> dict[str, Any] | None:
    try:
        end = json.loads(read_regular(service_folder / "engine_exit.json"))
    except (OSError, *NOT_JSON):
        return None
    return end if isinstance(end, dict) else None


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
