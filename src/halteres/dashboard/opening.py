"""Opening the page: where it answers, the link that lets a browser in, the browser.

Owns: telling a server of this home from whatever else answers on its port.
Never: starts a server, keeps a link.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import webbrowser

from halteres.clients.plain import Refused, get_json
from halteres.config import environ
from halteres.dashboard.door import proof, ticket
from halteres.errors import Conflict, NotReady
from halteres.loopback import HOST

ANSWERS_WITHIN_S = 5.0


def check_ours(port: int) -> None:
    """That a server of this home answers there: a ticket is for nobody else.

    Raises:
        Conflict: it is another, of somebody else perhaps.
    """
    nonce = secrets.token_urlsafe(24)
    try:
        told = get_json(f"http://{HOST}:{port}/api/session?nonce={nonce}", ANSWERS_WITHIN_S).get("proof")
    except (NotReady, Refused):
        told = None
    if not isinstance(told, str) or not hmac.compare_digest(told.encode(), proof(nonce).encode()):
        raise Conflict(
            f"Port {port} of {HOST} is taken.",
            f"What answers there is no control server of {environ.home()}.",
            "Name another with --port; 0 takes a free one.",
        )


def link(url: str) -> str:
    """The address that lets one browser in. What is behind the # is never sent."""
    return f"{url}/#token={ticket()}"


def show(address: str) -> None:
    """Open a browser, if windows can be opened here; what it takes to start nobody waits for."""
    if environ.has_display():
        threading.Thread(target=webbrowser.open, args=(address,), name="browser", daemon=True).start()
