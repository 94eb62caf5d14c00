"""Calls: read, under way, answered.

Owns: the JSON object of a body, its limits; errors in the tools' own form, whatever raised them; that a call ends with
its client, with the server, or at its route's limit, whichever is first; that those without the token run in threads of
their own.
Never: knows a route, changes an answer, answers HTML.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from halteres.agent.call import Reply, call, recorded
from halteres.agent.caller import Caller, OpenThreads
from halteres.agent.faces.functions import own_caller
from halteres.agent.faces.responses import refused
from halteres.errors import HalteresError, NotFound, NotReady, UserError, as_answer
from halteres.loopback import body_within

MAX_BODY_BYTES = 2**20
"""Arguments are short; the longest are prompts to try."""

CLIENT_GONE = 499
"""Written to nobody; the number is nginx's."""


class _TooLarge(UserError):
    status = 413


_LIMIT = ("The body is too large.", f"{MAX_BODY_BYTES // 2**10} KiB are the limit.", "Send less.")


async def arguments_of(request: Request) -> dict[str, Any]:
    """The JSON object in the body, whatever its declared type; an empty body holds no arguments.

    Raises:
        UserError: it is no JSON object, or too large.
    """
    body = await body_within(request, MAX_BODY_BYTES, _TooLarge(*_LIMIT))
    if not body.strip():
        return {}
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise _unusable(f"{error}") from error
    if not isinstance(value, dict):
        raise _unusable(f"It is {_KINDS.get(type(value), 'no object')}")
    return value


_KINDS = {list: "an array", str: "a text", type(None): "null", bool: "a boolean", int: "a number", float: "a number"}


def _unusable(why: str) -> UserError:
    return UserError("The body is no JSON object of arguments.", f"{why}.", 'Send {"argument": value, ...}.')


async def on_error(_: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refused(error)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route, or not this method."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = f"There is no {request.method} {request.url.path} here."
    return refused(NotFound(what, "", "GET /api/tools lists the tools."), status)


async def on_gone(_: Request, __: Exception) -> Response:
    """The client left while its body was read."""
    return Response(status_code=CLIENT_GONE)


async def on_bug(request: Request, error: Exception) -> Response:
    """A defect of ours, which is in the log."""
    return refused(recorded(f"{request.method} {request.url.path} raised {type(error).__name__}.", error))


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
