"""Which runs have changed, and whether services have recorded anything: server-sent events for
every page that is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.dashboard.training_runs import service_stamps
from halteres.errors import HalteresError, NotReady, ServerError, boundary
from halteres.runs.directory import known_runs
from halteres.runs.notes import FILE

_log = logging.getLogger(__name__)

POLL_S = 0.5
# how often a line is sent where nothing happens: a connection whose other end is gone shows itself
HEARTBEAT_S = 15.0
RETRY_MS = 1000  # when a browser asks again after a break
SERVICES = "services"  # among the ids: training runs of services may have changed
MOST_STREAMS = 64  # A page has one; browsers open six connections to one host

Stamps = dict[str, tuple[object, ...]]


class Events(StreamingResponse):
    """`event: change`, `data: {"runs": [ids]}`, as often as runs change, until client or server
    ends.
    """

    def __init__(self, ended: asyncio.Event, streams: asyncio.Semaphore) -> None:
        super().__init__(
            changes(ended), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, for as long as both sides want.

        Raises:
            NotReady: too many streams are open; nothing was sent yet.
        """
        if self._streams.locked():
            raise NotReady(f"{MOST_STREAMS} pages are open.", "That is the limit.", "Close one.")
        async with self._streams:
            await super().__call__(scope, receive, send)


async def changes(ended: asyncio.Event) -> AsyncIterator[str]:
    """The events from now on, until `ended` is set."""
    before, last = await _stamps({}), time.monotonic()
    yield f"retry: {RETRY_MS}\n\n"
    while not ended.is_set():
        try:
            async with asyncio.timeout(POLL_S):
                await ended.wait()
        except TimeoutError:
            now = await _stamps(before)
            changed = sorted(
                run for run in before.keys() | now.keys() if before.get(run) != now.get(run)
            )
            before = now
            if changed or time.monotonic() - last >= HEARTBEAT_S:
                last = time.monotonic()
                yield (
                    f"event: change\ndata: {json.dumps({'runs': changed})}\n\n"
                    if changed
                    else ": alive\n\n"
                )


async def _stamps(otherwise: Stamps) -> Stamps:
    """A look that fails finds nothing new; the next may succeed."""
    try:
        with boundary(ServerError, "looking at the runs"):
            return await asyncio.to_thread(stamps)
    except HalteresError as error:
        _log.warning("%s", error)
        return otherwise


def stamps() -> Stamps:
    """For every run, and for all services together, something that differs once it has changed; a
    run whose supervisor is gone has changed too.
    """
    found: Stamps = {}
    for run in known_runs():
        stamp: list[object] = [run.facts.status]
        for name in ("run.json", "metrics.jsonl", "events.jsonl", FILE):
            with contextlib.suppress(OSError):
                facts = os.stat(run.path / name)
                stamp += [name, facts.st_mtime_ns, facts.st_size]
        found[run.run_id] = tuple(stamp)
    found[SERVICES] = tuple(service_stamps())
    return found
