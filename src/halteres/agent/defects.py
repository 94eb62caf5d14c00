"""A defect of ours, as it is told to whoever met it.

Owns: that the log has the traceback, under an id that the told text names.
Never: tells what is inside, decides what is a defect.
"""

from __future__ import annotations

import logging
import secrets

from halteres.errors import ServerError

_log = logging.getLogger(__name__)


class Defect(ServerError):
    """Something nobody foresaw; `boundary` makes it of whatever was raised."""


def recorded(what: str, cause: BaseException) -> ServerError:
    """The error to tell; its cause is in the log."""
    number = secrets.token_hex(4)
    _log.error("%s (%s)", what, number, exc_info=cause)
    return ServerError(what, f"This is a defect of ours; the log has it as {number}.", "Report it.")
