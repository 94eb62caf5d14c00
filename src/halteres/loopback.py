"""What it means to serve on the loopback only: the socket, who may talk through it, how the serving ends.

Owns: listening sockets of our servers, the sentence for a port that is taken, the check that a request names this
machine and comes from no foreign page (DNS rebinding, cross-site requests); that a signal ends a server in order.
Never: routes, authenticates anybody, listens on another address.
"""

from __future__ import annotations

import logging
import socket
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from halteres.errors import Conflict, InvalidConfig, UserError, as_answer, as_http

HOST = "127.0.0.1"

LOCAL_NAMES = frozenset({"localhost", HOST, "::1"})


class Foreign(UserError):
    """A request that came by another name, or from another page."""

    code, status = "foreign_request", 403


FOREIGN = Foreign(
    "This server answers requests to localhost only.",
    "Host, or Origin, names something else.",
    "Use its 127.0.0.1 address.",
)

BACKLOG = 1024
"""Connections that wait while a server starts or restarts."""


def open_listener(port: int, descriptor: int | None = None) -> socket.socket:
    """A listening socket on the loopback: the inherited one, or a new one.

    Args:
        port: where to bind; 0 takes a free one.
        descriptor: of a socket that listens already; `port` is then ignored.

    Raises:
        Conflict: the port is taken.
        InvalidConfig: the descriptor is no socket of the loopback.
    """
    if descriptor is not None:
        return _inherited(descriptor)
    # The protocol is named because asyncio turns Nagle's algorithm (40 ms per answer) off only where it sees TCP.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise Conflict(
            f"Port {port} of {HOST} cannot be used.",
            f"{error.strerror}.",
            "Name another with --port; 0 takes a free one.",
        ) from error
    bound.listen(BACKLOG)
    return bound


def _inherited(descriptor: int) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _unusable(descriptor, f"{error.strerror}.") from error
    address = found.getsockname()
    if found.family != socket.AF_INET or address[0] != HOST:
        found.close()
        raise _unusable(descriptor, f"It is bound to {address!r}; this server has no keys and stays on {HOST}.")
    return found


def _unusable(descriptor: int, why: str) -> InvalidConfig:
    return InvalidConfig(
        f"File descriptor {descriptor} cannot be listened on.", why, "Hand down a TCP socket of 127.0.0.1, or --port."
    )


def url_of(listening: socket.socket) -> str:
    """Where a listening socket answers."""
    return f"http://{HOST}:{listening.getsockname()[1]}"


class Server(uvicorn.Server):
    """uvicorn, which leaves its owner the time to close files after a signal."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our own processes say where they serve

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end in order; a second one does not wait for answers under way.

        uvicorn's own handler would raise the signal again once the last connection is closed: too early for us.
        """
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """End in order."""
        self.should_exit = True


class LocalOnly:
    """ASGI middleware: 403 unless Host, and Origin where there is one, name the loopback."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host"), headers.get("origin")
            if not is_local(f"//{host}") or (origin is not None and not is_local(origin)):
                await JSONResponse({**as_http(FOREIGN), **as_answer(FOREIGN)}, FOREIGN.status)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def is_local(url: str) -> bool:
    """Whether a URL names the loopback."""
    try:
        return urlsplit(url).hostname in LOCAL_NAMES
    except ValueError:
        return False
