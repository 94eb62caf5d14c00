"""Which SDK asks, and what it has no word for.

Owns: the version that a request tells of itself.
Never: changes an answer for an SDK that can read it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.requests import Request

from halteres.service.checkpoints.store import Checkpoint

EXTERNAL_SINCE = (0, 28, 1)
"""The first tinker SDK that knows the checkpoint type "external"."""


def sdk_version(request: Request) -> tuple[int, ...] | None:
    """(0, 25, 0) of "AsyncTinker/Python 0.25.0"; None for other clients.

    Source: recorded traffic of tinker 0.9.0 to 0.38.0, header User-Agent.
    """
    told = re.match(r"AsyncTinker/Python (\d{1,6})\.(\d{1,6})\.(\d{1,6})", request.headers.get("user-agent", ""))
    return tuple(int(part) for part in told.groups()) if told else None


def listable(found: Sequence[Checkpoint], request: Request) -> Sequence[Checkpoint]:
    """Those that the asking SDK can read: before 0.28.1 one external checkpoint makes its whole list invalid."""
    version = sdk_version(request)
    if version is None or version >= EXTERNAL_SINCE:
        return found
    return [one for one in found if one.path.kind != "external_weights"]
