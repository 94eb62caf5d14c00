"""Calls under way.

Owns: that a call ends with its client, with the server, or at its route's limit, whichever is first; that those without
the token run in threads of their own.
Never: knows a route, changes an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from halteres.agent.call import Reply, call
from halteres.agent.caller import Caller, OpenThreads
from halteres.agent.faces.functions import own_caller
from halteres.errors import NotReady, as_answer

SESSION = "X-Halteres-Session"
"""Header that names the draft a call works on, unless its arguments do."""


class Calls:
    """The calls of one server."""

    def __init__(self) -> None:
        self._open_threads = OpenThreads()
        self._under_way: set[asyncio.Task[Reply]] = set()
        self.ended = asyncio.Event()  # for what is no call, and waits too

    async def reply(
        self,
        request: Request,
        name: str,
        arguments: Mapping[str, Any],
        limit_s: float | None = None,
        *,
        is_open: bool = False,
    ) -> Reply:
        """Call a tool for a request whose body was read.

        Args:
            request: its client, when it leaves, takes the call along.
            name: of the tool.
            arguments: of the tool.
            limit_s: seconds after which the answer is `not_ready`; what a tool does in a thread goes on.
            is_open: it came without the token.
        """
        work = asyncio.create_task(call(name, arguments, self._caller(request, is_open)), name=name)
        gone = asyncio.create_task(_departure(request), name=f"client of {name}")
        self._under_way.add(work)
        try:
            done, _ = await asyncio.wait((work, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._under_way.discard(work)
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if work.cancelled():
            return _cut(name, "The server ends." if done else f"{limit_s:g} s are the limit here; it may still go on.")
        return work.result()

    def _caller(self, request: Request, is_open: bool) -> Caller:
        session = request.headers.get(SESSION)
        caller = Caller(draft=session, face="http") if session else own_caller("http")
        return replace(caller, open_threads=self._open_threads) if is_open else caller

    def end(self) -> None:
        """End those that wait; their clients are told to ask again."""
        self.ended.set()
        for work in tuple(self._under_way):
            work.cancel()


async def _departure(request: Request) -> None:
    """Returns when the client is gone: after its body that is all a client can say."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _cut(name: str, why: str) -> Reply:
    error = NotReady(f"{name} was not answered.", why, "rl_list_runs()")
    return Reply(body=as_answer(error), failed=True, status=error.status)
