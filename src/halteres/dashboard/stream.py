"""Changes as server-sent events.

Owns: the event stream's form, its heartbeat, its end.
Never: looks at a run (`changes`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from halteres.dashboard.changes import Changes, Listener

HEARTBEAT_S = 15.0
"""How often a word is said where nothing happens: a connection whose other end is gone shows itself."""

RETRY_MS = 1000
"""When a browser asks again after a break."""


class Events(StreamingResponse):
    """`event: change`, `data: {"runs": [ids]}`, as often as runs change, until client or server ends."""

    def __init__(self, changes: Changes) -> None:
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, for as long as both sides want.

        Raises:
            NotReady: too many listen; nothing was sent yet.
        """
        async with self._changes.listening() as listener:
            self.body_iterator = _told(listener)
            await super().__call__(scope, receive, send)


async def _told(listener: Listener) -> AsyncIterator[str]:
    yield f"retry: {RETRY_MS}\n\n"
    while not listener.ended:
        changed = await listener.changed(HEARTBEAT_S)
        yield f"event: change\ndata: {json.dumps({'runs': sorted(changed)})}\n\n" if changed else ": alive\n\n"
