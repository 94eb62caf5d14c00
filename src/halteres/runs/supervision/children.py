"""One child process: started so that it cannot outlive us, and ended so that nothing of it remains.

Owns: the child's process group, its exit; that it is given our lifeline, and no secrets but those named.
Never: decides what an exit means.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from halteres.config import environ
from halteres.process import Lifeline, die_with_parent
from halteres.runs import identity
from halteres.runs.supervision.logpipe import Output, output_to

GRACE_S = 10.0
"""How long a child may take to end in order."""


@dataclass(slots=True)
class Child:
    """A running (or ended) child in a process group of its own."""

    process: asyncio.subprocess.Process
    who: Mapping[str, Any]  # pid, start_time, boot_id
    output: Output
    exited: asyncio.Task[int] = field(init=False, repr=False)  # ends with the exit code, negative for a signal
    swept: bool = False  # whether its group was killed: when it ended, or to end it

    def __post_init__(self) -> None:
        self.exited = asyncio.create_task(self._reap(), name=f"exit of {self.pid}")

    @property
    def pid(self) -> int:
        """Its pid, which is also its group's."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.returncode

    async def end(self, grace_s: float = GRACE_S) -> int:
        """SIGTERM, wait, then SIGKILL for the whole group. Returns the exit code; safe to repeat."""
        if self.exit_code is None:
            if identity.alive(self.who):  # `process.terminate` would reap one that has just ended, and lose its code
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.exited), grace_s)
        self.sweep()
        return await self.exited

    def sweep(self) -> None:
        """Kill the group, or what its leader left of it, once: later the number may be somebody else's."""
        if not self.swept:
            self.swept = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _reap(self) -> int:
        code = await self.process.wait()
        self.sweep()  # grandchildren survive their parent otherwise
        await self.output.emptied()  # whoever is told of the exit may read its last words
        return code


async def spawn(
    command: Sequence[str],
    *,
    log: Path,
    folder: Path,
    lifeline: Lifeline,
    descriptors: Sequence[int] = (),
    keys: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    answer: IO[bytes] | None = None,
) -> Child:
    """Start a command with its output in `log`.

    Args:
        command: program and arguments.
        log: appended to, without secrets.
        folder: where it runs.
        lifeline: it ends with this.
        descriptors: handed down besides.
        keys: names of the secret variables of ours that it may have.
        variables: what it gets besides.
        answer: a file for its stdout, which is then not for the log. No pipe: a child that it leaves behind would keep
            that open, and its exit from being known (CPython 3.11).

    Raises:
        OSError: there is no such program, or no process can be made.
    """
    with output_to(log) as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=environ.with_keys(
                *keys, HALTERES_LIFELINE_FD=str(lifeline.read_end), PYTHONUNBUFFERED="1", **variables
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=answer or output.descriptor,
            stderr=output.descriptor,
            pass_fds=(lifeline.read_end, *descriptors),
            process_group=0,
            preexec_fn=die_with_parent,
        )
    return Child(process, identity.identity(process.pid), output)
