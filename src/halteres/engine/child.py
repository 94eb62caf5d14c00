"""One process of the engine, from its start to its end.

Owns: its lifeline, its process group, its link once there is one, its signs of life, the words for its failure.
Never: starts a second one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import IO

from halteres.config import environ
from halteres.engine.link.link import LinkedEngine
from halteres.errors import HalteresError, ProcessFailed
from halteres.files import tail
from halteres.process import GRACE_S, die_with_parent

READY_LINE = b"ready\n"


class EngineChild:
    """One process of the engine."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, log: Path, log_begins: int) -> None:
        self.process, self._lifeline, self._log = process, lifeline, log
        self._log_begins = log_begins
        self.link: LinkedEngine | None = None

    @classmethod
    async def spawn(cls, argv: list[str], log: Path) -> EngineChild:
        """Start it; it is not ready yet."""
        reading, writing = os.pipe()
        try:
            with _opened(log) as output:
                begins = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    env=environ.for_sandboxed(HALTERES_LIFELINE_FD=str(reading)),  # it needs no secret
                    pass_fds=(reading,),
                    process_group=0,  # a Ctrl-C at the terminal is the service's to handle
                    preexec_fn=die_with_parent,
                )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return cls(process, writing, log, begins)

    async def listening(self) -> None:
        """Wait for the child's `ready`; ProcessFailed if it ends before."""
        output = self.process.stdout
        while output is not None and (line := await output.readline()):
            if line == READY_LINE:
                return
        raise self.failure("ended before it was ready", await self.process.wait())

    async def ended(self, ping_s: float, silent_s: float) -> ProcessFailed:
        """Wait for the end of the process, of its link or of its signs of life; returns why it ended."""
        silence = asyncio.create_task(self._silent(ping_s, silent_s), name="engine signs of life")
        waits: list[asyncio.Task[object]] = [silence, asyncio.create_task(self.process.wait(), name="engine exit")]
        if self.link is not None:
            waits.append(asyncio.create_task(self.link.broken.wait(), name="engine link broken"))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            hung = silence.done() and self.process.returncode is None
        finally:
            for wait in waits:
                wait.cancel()
        await self.kill()
        how = f"hung: it answered nothing for {silent_s:g} s, and was killed" if hung else "died"
        return self.failure(how, await self.process.wait())

    async def _silent(self, ping_s: float, silent_s: float) -> None:
        """Ask for a sign of life again and again; returns once so many in a row did not come that `silent_s` are over.

        Several are asked for, so that a service that was itself stopped for a while does not blame its engine.
        """
        silent_for = 0.0
        while self.link is not None and silent_for < silent_s:
            try:
                async with asyncio.timeout(ping_s):
                    await self.link.info()
                silent_for = 0.0
                await asyncio.sleep(ping_s)
            except TimeoutError:
                silent_for += ping_s
            except HalteresError:  # the link's own end is noticed by itself, and any other answer is a sign of life
                silent_for = 0.0
                await asyncio.sleep(ping_s)

    async def end(self) -> None:
        """Ask it to end; after the grace it is killed."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the whole group, wait for the process, let go of link and lifeline."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        if self.link is not None:
            await self.link.disconnect()
        with suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1

    def failure(self, how: str, exit_code: int | None) -> ProcessFailed:
        """What to say about it, with the end of what it has logged."""
        lines = tail(self._log, 40, self._log_begins)
        killed_by = signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else None
        why = f"It was killed by {killed_by}." if killed_by else f"Exit code {exit_code}."
        last = f" Its log ends with: {lines[-1].strip().removesuffix('.')}." if lines else ""
        return ProcessFailed(
            f"The engine (process {self.process.pid}) {how}.",
            why + last,
            pid=self.process.pid,
            exit_code=exit_code,
            log=str(self._log),
            tail="\n".join(lines),
        )


def _opened(log: Path) -> IO[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("ab")
