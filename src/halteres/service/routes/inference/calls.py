"""One HTTP call for inference: what it brings, who hears of its errors, what happens when its client leaves.

Owns: reading the body, the tenant and the run of the URL; ending work that nobody waits for any more.
Never: knows a shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError, UserError
from halteres.service.answers import body_of
from halteres.service.ending import ending_of
from halteres.service.inference.asking import Call
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire.codec import PROMPT_BYTES

T = TypeVar("T")


class ClientGone(UserError):
    """The client closed its connection before it was answered; nobody reads this."""

    code, status = "client_gone", 499


Handler = Callable[[Call], Coroutine[Any, Any, Response]]
Refuse = Callable[[HalteresError], Response]


def endpoint(handler: Handler, refuse: Refuse) -> Callable[[Request], Awaitable[Response]]:
    """A route that answers errors in its own shape, and ends the handler's work when its client leaves or the
    service ends."""

    async def answered(request: Request) -> Response:
        try:
            call = Call(
                run=request.path_params.get("run_id"),
                tenant=tenant_of(request),
                body=await body_of(request, PROMPT_BYTES),
            )
            async with ending_of(request.scope).heard():
                return await while_connected(request, handler(call))
        except HalteresError as error:
            return refuse(error)

    return answered


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled when the client goes away. The request's body has been read.

    Raises:
        ClientGone: it did.
    """
    working = asyncio.create_task(work, name=f"answer to {request.url.path}")
    leaving = asyncio.create_task(_left(request), name="client leaving")
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("The client went away.")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
