"""What each route takes and answers.

Owns: the table of operations, the words of every status.
Never: serves one; renders the table (`openapi` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from halteres.trajectories.scored_data import ScoredData
from halteres.trajectories.wire import answers
from halteres.trajectories.wire.schema import (
    BatchQuery,
    BatchReference,
    EnvReference,
    EnvRegistration,
    GroupReference,
    GroupsRequest,
    LeaseRequest,
    Registration,
)

ASKED = (401, 403)
"""Of every route: the door."""

WITH_BODY = (400, 408, 413, 422)

STORED = (503,)

WORDS: Mapping[int, str] = {
    200: "Done",
    400: "The body cannot be read",
    401: "A token is wanted",
    403: "By another name, or from another page",
    404: "There is none",
    408: "The body did not arrive in time",
    409: "Another body with the same key; a lease that was lost",
    410: "An environment of ours is unknown here, and should register again",
    413: "The body is too large",
    422: "It does not fit; `detail` says where",
    503: "Nothing is kept or read for now; Retry-After says when to ask again",
}

TEXT = (400, 413)
"""Statuses answered as plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a route takes and answers."""

    answer: Sequence[type] = ()  # one of these; none: text
    media_type: str = "application/json"
    body: Any = None
    needs_body: bool = True
    query: type[msgspec.Struct] | None = None
    path: type[msgspec.Struct] | None = None
    words: Mapping[str, str] = field(default_factory=dict[str, str])  # of each parameter of the path and the query
    headers: Mapping[str, str] = field(default_factory=dict[str, str])  # with their words
    statuses: Sequence[int] = ()


_KEY = {"Idempotency-Key": "Of this group, kept for its retries: the same key never counts twice."}
_OURS = {"Halteres-Client": "Any value: the client knows our extensions, and registers again when it is answered 410."}
_LEASED = (404, 409, 422, *STORED)

_ASKING = {
    "policy_version": "Version of the trainer's weights; groups that are too far from it are set aside.",
    "after": "Id of the last batch the trainer holds, which acknowledges it; 0: it holds none.",
    "wait": "Seconds to hold the reply until there is a batch.",
    "lease": "Seconds until the batch comes back unless it is acknowledged; without it, the reply delivers the batch.",
}
_CHOOSING = {
    "after": "Only groups with a larger id.",
    "limit": "The first so many.",
    "place": "Only groups that are there; may be repeated. Without it, all.",
    "env_id": "Only groups of this environment.",
    "newest": "The last `limit` groups instead of the first; the oldest of them first.",
    "bodies": "With their tokens: what a trainer gets of them.",
}
_BATCH = {"batch_id": "Of a batch that was given under a lease."}
_EXTENDED = {**_BATCH, "lease": "Seconds from now until the lease ends; here or in the body."}
_GROUP = {"group_id": "Of the group."}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(answer=[answers.Message]),
    ("POST", "/register"): Operation(body=Registration, answer=[answers.Registered], statuses=(*WITH_BODY, *STORED)),
    ("POST", "/register-env"): Operation(
        body=EnvRegistration, answer=[answers.EnvRegistered, answers.EnvWaits], statuses=(*WITH_BODY, *STORED)
    ),
    ("POST", "/disconnect-env"): Operation(
        body=EnvReference, answer=[answers.Succeeded, answers.Failed], statuses=(*WITH_BODY, *STORED)
    ),
    ("GET", "/wandb_info"): Operation(answer=[answers.WandbInfo]),
    ("GET", "/info"): Operation(answer=[answers.Info]),
    ("GET", "/batch"): Operation(
        query=BatchQuery, words=_ASKING, answer=[answers.BatchAnswer, answers.NotRegistered], statuses=(422, *STORED)
    ),
    ("GET", "/latest_example"): Operation(answer=[answers.Example], statuses=STORED),
    ("POST", "/scored_data"): Operation(
        body=ScoredData,
        headers=_KEY | _OURS,
        answer=[answers.Received, answers.Buffered],
        statuses=(409, 410, *WITH_BODY, *STORED),
    ),
    ("POST", "/scored_data_list"): Operation(
        body=list[ScoredData],
        headers=_OURS,
        answer=[answers.ListReceived],
        statuses=(409, 410, *WITH_BODY, *STORED),
    ),
    ("GET", "/status"): Operation(answer=[answers.Status]),
    ("GET", "/status-env"): Operation(
        body=EnvReference, headers=_OURS, answer=[answers.EnvStatus], statuses=(410, *WITH_BODY, *STORED)
    ),
    ("GET", "/reset_data"): Operation(media_type="text/plain", statuses=STORED),
    ("POST", "/v1/batches/{batch_id}/ack"): Operation(
        path=BatchReference, words=_BATCH, answer=[answers.Settled], statuses=_LEASED
    ),
    ("POST", "/v1/batches/{batch_id}/nack"): Operation(
        path=BatchReference, words=_BATCH, answer=[answers.Settled], statuses=_LEASED
    ),
    ("POST", "/v1/batches/{batch_id}/extend"): Operation(
        path=BatchReference,
        query=LeaseRequest,
        words=_EXTENDED,
        body=LeaseRequest,
        needs_body=False,
        answer=[answers.Settled],
        statuses=(*_LEASED, *WITH_BODY),
    ),
    ("GET", "/v1/groups"): Operation(
        query=GroupsRequest, words=_CHOOSING, answer=[answers.Groups], statuses=(422, *STORED)
    ),
    ("GET", "/v1/groups/{group_id}"): Operation(
        path=GroupReference, words=_GROUP, answer=[answers.Group], statuses=(404, 422, *STORED)
    ),
    ("GET", "/v1/diagnostics"): Operation(answer=[answers.Diagnostics]),
    ("GET", "/metrics"): Operation(media_type="text/plain"),
    ("GET", "/openapi.json"): Operation(answer=[dict[str, Any]]),
    ("GET", "/docs"): Operation(media_type="text/html"),
}
