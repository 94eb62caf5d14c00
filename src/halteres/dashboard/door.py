"""What lets a browser in: tickets, the key in its cookie, and the proof that a server is ours.

Owns: these three, each signed with this machine's token, so that a new token ends them all.
Never: hands out the token itself: a ticket is in the browser's command line, a cookie goes to every port of the host.

    halteres ui ──#token=TICKET──▶ page ──POST /api/session──▶ cookie: page key ──▶ the page's own routes, no others
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from typing import Final

from halteres.agent.faces.token import is_token, token

TICKET_S: Final = 600
"""How long a ticket opens the door, once; long enough to carry a link to another window."""

MOST_USED = 4096
"""Tickets that a server remembers to have been used. Only who holds the token makes any."""


def ticket(now: float | None = None) -> str:
    """A ticket: EXPIRY.NONCE.SIGNATURE."""
    expiry = int((time.time() if now is None else now) + TICKET_S)
    told = f"{expiry}.{secrets.token_urlsafe(12)}"
    return f"{told}.{_signed('ticket', told)}"


def page_key() -> str:
    """What the cookie of an admitted browser holds."""
    return _signed("page", "")


def is_page_key(given: str) -> bool:
    """Whether a cookie's value is the key."""
    return hmac.compare_digest(given.encode(), page_key().encode())


def proof(nonce: str) -> str:
    """What only a server with our token answers to a nonce."""
    return _signed("proof", nonce)


class Door:
    """The door of one server."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}  # ticket -> expiry

    def admits(self, given: str, now: float | None = None) -> bool:
        """Whether this is the token, or a ticket that has neither been used nor run out; it is used now."""
        return is_token(given) or self._takes(given, time.time() if now is None else now)

    def _takes(self, given: str, now: float) -> bool:
        told, _, signature = given.rpartition(".")
        if not hmac.compare_digest(signature.encode(), _signed("ticket", told).encode()):
            return False
        expiry = int(told.partition(".")[0])
        if expiry < now or given in self._used:
            return False
        self._used = {ticket: until for ticket, until in self._used.items() if until >= now}
        if len(self._used) >= MOST_USED:
            return False
        self._used[given] = expiry
        return True


def _signed(purpose: str, text: str) -> str:
    return hmac.new(token().encode(), f"{purpose}\n{text}".encode(), hashlib.sha256).hexdigest()
