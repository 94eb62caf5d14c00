"""The API described by itself: /openapi.json, and /docs for people; nothing is loaded from another host."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from starlette.routing import Route

from halteres.trajectories import replies
from halteres.trajectories.schema import (
    BatchQuery,
    BatchReference,
    EnvReference,
    EnvRegistration,
    GroupReference,
    GroupsRequest,
    LeaseRequest,
    Registration,
)
from halteres.trajectories.scored_data import ScoredData

ASKED = (401, 403)
"""Of every route: the access policy."""

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
    """What a route takes and replies."""

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
    ("GET", "/"): Operation(answer=[replies.Message]),
    ("POST", "/register"): Operation(body=Registration, answer=[replies.Registered], statuses=(*WITH_BODY, *STORED)),
    ("POST", "/register-env"): Operation(
        body=EnvRegistration, answer=[replies.EnvRegistered, replies.EnvWaits], statuses=(*WITH_BODY, *STORED)
    ),
    ("POST", "/disconnect-env"): Operation(
        body=EnvReference, answer=[replies.Succeeded, replies.Failed], statuses=(*WITH_BODY, *STORED)
    ),
    ("GET", "/wandb_info"): Operation(answer=[replies.WandbInfo]),
    ("GET", "/info"): Operation(answer=[replies.Info]),
    ("GET", "/batch"): Operation(
        query=BatchQuery, words=_ASKING, answer=[replies.BatchAnswer, replies.NotRegistered], statuses=(422, *STORED)
    ),
    ("GET", "/latest_example"): Operation(answer=[replies.Example], statuses=STORED),
    ("POST", "/scored_data"): Operation(
        body=ScoredData,
        headers=_KEY | _OURS,
        answer=[replies.Received, replies.Buffered],
        statuses=(409, 410, *WITH_BODY, *STORED),
    ),
    ("POST", "/scored_data_list"): Operation(
        body=list[ScoredData],
        headers=_OURS,
        answer=[replies.ListReceived],
        statuses=(409, 410, *WITH_BODY, *STORED),
    ),
    ("GET", "/status"): Operation(answer=[replies.Status]),
    ("GET", "/status-env"): Operation(
        body=EnvReference, headers=_OURS, answer=[replies.EnvStatus], statuses=(410, *WITH_BODY, *STORED)
    ),
    ("GET", "/reset_data"): Operation(media_type="text/plain", statuses=STORED),
    ("POST", "/v1/batches/{batch_id}/ack"): Operation(
        path=BatchReference, words=_BATCH, answer=[replies.Settled], statuses=_LEASED
    ),
    ("POST", "/v1/batches/{batch_id}/nack"): Operation(
        path=BatchReference, words=_BATCH, answer=[replies.Settled], statuses=_LEASED
    ),
    ("POST", "/v1/batches/{batch_id}/extend"): Operation(
        path=BatchReference,
        query=LeaseRequest,
        words=_EXTENDED,
        body=LeaseRequest,
        needs_body=False,
        answer=[replies.Settled],
        statuses=(*_LEASED, *WITH_BODY),
    ),
    ("GET", "/v1/groups"): Operation(
        query=GroupsRequest, words=_CHOOSING, answer=[replies.Groups], statuses=(422, *STORED)
    ),
    ("GET", "/v1/groups/{group_id}"): Operation(
        path=GroupReference, words=_GROUP, answer=[replies.Group], statuses=(404, 422, *STORED)
    ),
    ("GET", "/v1/diagnostics"): Operation(answer=[replies.Diagnostics]),
    ("GET", "/metrics"): Operation(media_type="text/plain"),
    ("GET", "/openapi.json"): Operation(answer=[dict[str, Any]]),
    ("GET", "/docs"): Operation(media_type="text/html"),
}

PROTOCOL = "0.4.0"
"""The version of Atropos whose API this is."""

TEMPLATE = "#/components/schemas/{name}"


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = _method(route)
        operation = OPERATIONS[method, route.path]
        paths.setdefault(route.path, {})[method.lower()] = _described(operation, _summary(route), schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Halteres trajectory server", "version": PROTOCOL},
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "The password is the token."},
            },
        },
    }


def page(routes: Sequence[Route]) -> str:
    """A plain page that lists the routes and their parameters."""
    lines = "".join(map(_listed, routes))
    head = "<!doctype html><meta charset=utf-8><title>Halteres trajectory server</title><h1>Trajectory server</h1>"
    return f"{head}<dl>{lines}</dl><p>Schemas: <a href=/openapi.json>openapi.json</a></p>"


def _listed(route: Route) -> str:
    parameters = _parameters(OPERATIONS[_method(route), route.path], _Schemas())
    items = "".join(
        f"<li><code>{each['name']}</code> ({each['in']}): {html.escape(each['description'])}" for each in parameters
    )
    head = f"<dt><code>{_method(route)} {route.path}</code><dd>{html.escape(_summary(route))}"
    return f"{head}<ul>{items}</ul>" if items else head


class _Schemas:
    """Schemas of the types met so far; structs become components."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        (schema,), components = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
        self.components |= components
        return schema

    def fields(self, kind: type[msgspec.Struct]) -> tuple[dict[str, dict[str, Any]], Sequence[str]]:
        """Schemas of a struct's fields, and those that must be given."""
        (_,), components = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
        found = cast("dict[str, Any]", components[kind.__name__])
        return found["properties"], found["required"]


def _described(operation: Operation, summary: str, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": summary, "responses": dict(_responses(operation, schemas))}
    if parameters := _parameters(operation, schemas):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"application/json": {"schema": schemas.of(operation.body)}}
        described["requestBody"] = {"required": operation.needs_body, "content": content}
    return described


def _parameters(operation: Operation, schemas: _Schemas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for where, kind in (("path", operation.path), ("query", operation.query)):
        if kind is None:
            continue
        fields, required = schemas.fields(kind)
        needed = set(required) if where == "path" or operation.body is None else set[str]()
        found += [
            {
                "name": name,
                "in": where,
                "description": operation.words[name],
                "required": name in needed,
                "schema": _without_null(schema),
            }
            for name, schema in fields.items()
        ]
    for name, words in operation.headers.items():
        found.append({"name": name, "in": "header", "description": words, "schema": {"type": "string"}})
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is left out, not null."""
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    default = {} if schema.get("default") is None else {"default": schema["default"]}
    return rest | (kinds[0] if kinds else {}) | default


def _responses(operation: Operation, schemas: _Schemas) -> list[tuple[str, dict[str, Any]]]:
    found = [("200", {"description": WORDS[200], "content": _answer(operation, schemas)})]
    for status in sorted({*operation.statuses, *ASKED}):
        described: dict[str, Any] = {"description": WORDS[status]}
        kind = replies.Unprocessed if status == 422 else replies.Refused
        media = "text/plain" if status in TEXT else "application/json"
        described["content"] = {media: {"schema": {"type": "string"} if status in TEXT else schemas.of(kind)}}
        if status == 503:
            described["headers"] = {"Retry-After": {"description": "Seconds", "schema": {"type": "integer"}}}
        found.append((str(status), described))
    return found


def _answer(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if not operation.answer:
        return {operation.media_type: {"schema": {"type": "string"}}}
    kinds = [schemas.of(kind) for kind in operation.answer]
    return {operation.media_type: {"schema": kinds[0] if len(kinds) == 1 else {"anyOf": kinds}}}


def _method(route: Route) -> str:
    return "POST" if "POST" in (route.methods or ()) else "GET"


def _summary(route: Route) -> str:
    """What the docstring's first line says behind the route's name, which stands beside it."""
    said = (route.endpoint.__doc__ or "").partition("\n")[0].partition(": ")[2]
    return said[:1].upper() + said[1:]
