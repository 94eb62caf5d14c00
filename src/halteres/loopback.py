"""Serving this machine alone: the listening socket, which requests name this machine, how the
serving ends.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from halteres.errors import Conflict, InvalidConfig, UserError, as_answer, as_http, size_text

HOST = "127.0.0.1"

STALL_S = 10.0  # how long nothing of a body may arrive
DEADLINE_S = 120.0  # how long a small body may take from first byte to last
SLOWEST = 256 * 1024  # bytes of a large one that come in each second beyond that

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
"""Of a Host header: a name or an address, and a port (RFC 9110, section 7.2)."""

# of Sec-Fetch-Site: other pages of this machine are same-site
OWN_SITES = ("same-origin", "same-site", "none")

T = TypeVar("T")

LOCAL_NAMES = frozenset({"localhost", HOST, "::1"})

BACKLOG = 1024  # connections that wait while a server starts or restarts

MOST_HEAD_BYTES = 2**16
"""Of a request's line and headers, which come before its key. h11 counts them, httptools would
not.
"""


EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Why a connection that waits cannot be accepted: nothing of these is left."""

SAID_EVERY_S = 60.0  # at most, that connections wait

log = logging.getLogger(__name__)


class Foreign(UserError):
    """A request that came by another name, or from another page."""

    code, status = "foreign_request", 403


FOREIGN = Foreign(
    "This server answers requests to localhost only.",
    "Host, or Origin, names something else.",
    "Use its 127.0.0.1 address.",
)


class AmbiguousLength(UserError):
    """A request whose body ends in two places."""

    code = "ambiguous_length"


TWO_LENGTHS = AmbiguousLength(
    "This request was not read.",
    "It has Content-Length and Transfer-Encoding both.",
    "Send one of them.",
)


def open_listener(
    port: int, descriptor: int | None = None, *, host: str = HOST, beyond: bool = False
) -> socket.socket:
    """A listening socket: the inherited one (`descriptor`), or a new one on a port of `host`; 0
    takes a free one.

    `beyond`: it need not be of the loopback, because the server has another way to know who may
    talk. Conflict: the port is taken, or this machine has no such address. InvalidConfig: the
    socket is, or would be, none of the loopback.
    """
    if descriptor is not None:
        return _inherited(descriptor, beyond)
    if not 0 <= port <= 65535:  # getaddrinfo would take what is left of it by 65536
        raise InvalidConfig(
            f"There is no port {port}.", "Ports are from 0 to 65535.", "Name another with --port."
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InvalidConfig(
            f"'{host}' is no address.", f"{error.strerror}.", "Name one of this machine."
        ) from error
    # `localhost` is 127.0.0.1
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    if not beyond and not is_loopback(str(address[0])):
        raise InvalidConfig(
            f"{host} is no address of the loopback.",
            f"This server has no keys and stays on {HOST}.",
        )
    # The protocol is named because asyncio turns Nagle's algorithm (40 ms per answer) off only
    # where it sees TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        next = "Name another with --port; 0 takes a free one."
        raise Conflict(
            f"Port {port} of {host} cannot be used.", f"{error.strerror}.", next
        ) from error
    bound.listen(BACKLOG)
    return bound


def _inherited(descriptor: int, beyond: bool) -> socket.socket:
    what = f"File descriptor {descriptor} cannot be listened on."
    next = "Hand down a TCP socket of 127.0.0.1, or --port."
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise InvalidConfig(what, f"{error.strerror}.", next) from error
    address = found.getsockname()
    if found.family != socket.AF_INET or not (beyond or address[0] == HOST):
        found.close()
        raise InvalidConfig(
            what, f"It is bound to {address!r}; this server has no keys and stays on {HOST}.", next
        )
    return found


def is_loopback(address: str) -> bool:
    """Whether what listens at this address is reached from this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Where a listening socket answers; for one that listens everywhere, where it answers this
    machine.
    """
    address, port = listening.getsockname()[:2]
    known = ipaddress.ip_address(address.partition("%")[0])
    name = HOST if known.is_unspecified else f"[{address}]" if known.version == 6 else address
    return f"{scheme}://{name}:{port}"


class Server(uvicorn.Server):
    """uvicorn, which leaves its owner the time to close files after a signal. `on_end` is called on
    the event loop when it begins to end, so that nobody is held in vain.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None] = lambda: None) -> None:
        config.app = OneLength(config.app)  # type: ignore[arg-type] - all our servers hand over an app, not its name
        config.http = StrictProtocol
        super().__init__(config)
        self._on_end = on_end
        # our own processes say where they serve
        logging.getLogger("uvicorn").setLevel(logging.WARNING)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end is asked for."""
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: end in order; a second one does not wait for answers under way.

        uvicorn's own handler would raise the signal again once the last connection is closed: too
        early for us.
        """
        self.force_exit = self.should_exit
        self.end()

    def end(self) -> None:
        """End in order."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way, then close."""
        self._on_end()
        await super().shutdown(sockets)


def serve(app: ASGIApp, bound: socket.socket) -> None:
    """Serve an app on a socket that listens, until the process is asked to end."""
    config = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        # else the client could name itself by X-Forwarded-For
        proxy_headers=False,
        # longer than the clients': who closes first leaves the other a broken request
        timeout_keep_alive=75,
        timeout_graceful_shutdown=3,
    )
    asyncio.run(Server(config).serve(sockets=[bound]))


class LoopErrors:
    """What goes wrong outside of any request, for the log: that connections cannot be accepted,
    once in a while.

    asyncio 3.11 says it with a traceback for every connection that its queue may hold, again and
    again: 4 MB a second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As `asyncio` calls it."""
        error = context.get("exception")
        if (
            "socket" not in context
            or not isinstance(error, OSError)
            or error.errno not in EXHAUSTED
        ):
            loop.default_exception_handler(context)
            return
        if self._clock() - self._said_at < SAID_EVERY_S:
            return
        self._said_at = self._clock()
        log.error(
            "Connections wait and cannot be accepted: %s. Others end first; `ulimit -n` sets how "
            "many files and"
            " connections this process may have open.",
            error.strerror,
        )


class StrictConnection(h11.Connection):
    """h11 that refuses a head whose lines a proxy may have read otherwise.

    h11 0.16 ends a line at a bare line feed, too, and joins a line that begins with a blank to the
    one before it. Where a proxy does not, a header, or a second request, comes past it.
    """

    def __init__(self, most_head_bytes: int) -> None:
        super().__init__(h11.SERVER, most_head_bytes)
        self._head = bytearray()  # what came since the last request ended

    def receive_data(self, data: bytes) -> None:
        """Take what came."""
        if self.their_state is h11.IDLE:
            self._head += data
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """What came next. RemoteProtocolError: a head that is refused."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            head = bytes(self._head[: len(self._head) - len(self.trailing_data[0])])
            self._head.clear()
            if AMBIGUOUS_LINE.search(head):
                raise h11.RemoteProtocolError("a line of the head ends, or goes on, in two ways")
        return event

    def start_next_cycle(self) -> None:
        """Begin the next request, of which something may have come already."""
        super().start_next_cycle()
        self._head = bytearray(self.trailing_data[0])


AMBIGUOUS_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n)|\n[ \t]")


class StrictProtocol(H11Protocol):
    """uvicorn's protocol over a strict connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = StrictConnection(config.h11_max_incomplete_event_size or MOST_HEAD_BYTES)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, unless an answer to it has begun; the connection ends.

        uvicorn 0.54 would begin a second answer, or let the app begin one: h11 raises either way.
        """
        # There is none before the first request.
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison]
            # What the app sends from here on is dropped, and it is waiting for no more of the body.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


class OneLength:
    """ASGI middleware: 400, and the connection's end, for a request with Content-Length and
    Transfer-Encoding.

    A proxy may have believed the one, and the server's parser the other: what one of them takes for
    the body's rest is the next request to the other, with somebody else's rights. h11 0.16 does not
    refuse it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set[bytes]()
        if {b"content-length", b"transfer-encoding"} <= names:
            body = {**as_http(TWO_LENGTHS), **as_answer(TWO_LENGTHS)}
            await JSONResponse(body, TWO_LENGTHS.status, {"Connection": "close"})(
                scope, receive, send
            )
        else:
            await self.app(scope, receive, send)


def is_foreign(headers: Headers) -> bool:
    """Whether Host, or Origin where there is one, names something else than the loopback; or
    another site's page only embeds an address. Following a link to one is no embedding.
    """
    hosts, origin = headers.getlist("host"), headers.get("origin")
    if len(hosts) != 1 or host_of(hosts[0]) not in LOCAL_NAMES:
        return True
    if origin is not None:
        return not is_local(origin)
    is_followed = (
        headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    return is_of_another_site(headers.getlist("sec-fetch-site")) and not is_followed


def is_of_another_site(sites: Sequence[str]) -> bool:
    """Whether Sec-Fetch-Site says that another site's page made a request."""
    return any(site.strip().lower() not in OWN_SITES for site in sites)


def host_of(header: str) -> str | None:
    """The one host that a Host header names, in small letters; None where it names none, or more
    than a host and its port: `127.0.0.1, evil`, `user@localhost`, `localhost/path`.
    """
    found = _HOST.fullmatch(header)
    return found[1].strip("[]").lower() if found else None


def is_local(url: str) -> bool:
    """Whether a URL names the loopback."""
    return hostname_of(url) in LOCAL_NAMES


def hostname_of(url: str) -> str | None:
    """The host a URL names, in small letters; None where it names none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class TooLarge(UserError):
    """A body that is larger than any client sends."""

    code, status = "too_large", 413


class TooSlow(UserError):
    """A body that did not arrive in time."""

    code, status = "too_slow", 408


async def body_within(
    request: Request,
    limit: int,
    advice: str = "Send less.",
    *,
    stall_s: float = STALL_S,
    deadline_s: float = DEADLINE_S,
) -> bytes:
    """A request's body, of at most `limit` bytes; TooLarge as soon as more has come.

    TooSlow where nothing of it comes for `stall_s`, or all of it takes longer than `deadline_s` and
    a second for every SLOWEST bytes.
    """
    now = asyncio.get_running_loop().time
    ends = now() + deadline_s
    body = bytearray()
    try:
        async with asyncio.timeout(min(stall_s, deadline_s)) as stalled:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    why = f"{size_text(limit)} are the limit."
                    raise TooLarge("The body is too large.", why, advice)
                stalled.reschedule(min(now() + stall_s, ends + len(body) / SLOWEST))
    except TimeoutError as error:
        what = f"The body did not arrive in time: {size_text(len(body))} came."
        why = f"Nothing of it came for {stall_s:g} s, or it took longer than {deadline_s:g} s."
        raise TooSlow(what, why, "Send it again on a better connection.") from error
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns; where the client leaves before, it is cancelled: ClientDisconnect."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(departure(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def departure(request: Request) -> None:
    """Return when the client is gone: after its body that is all that a client can say."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
