"""What sessions are searched for.

Owns: the body of sessions/search.
Never: searches.
Source: tinker SDK 0.38.0, types/session_search_request.py.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec


class Owner(msgspec.Struct, kw_only=True):
    """Whose sessions are searched."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[str] = []


class StatusQuery(msgspec.Struct, kw_only=True):
    """Which sessions are searched, by how they stand."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[str] | None = None  # of client_finished; None matches every reason


class SearchCursor(msgspec.Struct, kw_only=True):
    """The last session of the page before."""

    last_created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    last_session_id: str


class Search(msgspec.Struct, kw_only=True):
    """POST sessions/search."""

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    owner: Owner = msgspec.field(default_factory=Owner)
    statuses: list[StatusQuery] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None
