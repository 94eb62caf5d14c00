"""The API described by itself: /openapi.json, and /docs for people; nothing is loaded from another host."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.routing import Route

from halteres.trajectories import schema
from halteres.trajectories.scored_data import ScoredData

ASKED = (401, 403)  # of every route: the access policy
STORED = (503,)
WITH_BODY = (400, 408, 413, 422, *STORED)

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

TEXT = (400, 413)  # statuses answered as plain text
PROTOCOL = "0.4.0"  # the version of Atropos whose API this is


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
_SETTLING = Operation(
    path=schema.BatchReference, words=_BATCH, answer=[schema.Settled], statuses=(404, 409, 422, *STORED)
)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(answer=[schema.Message]),
    ("POST", "/register"): Operation(body=schema.Registration, answer=[schema.Registered], statuses=WITH_BODY),
    ("POST", "/register-env"): Operation(
        body=schema.EnvRegistration, answer=[schema.EnvRegistered, schema.EnvWaits], statuses=WITH_BODY
    ),
    ("POST", "/disconnect-env"): Operation(
        body=schema.EnvReference, answer=[schema.Succeeded, schema.Failed], statuses=WITH_BODY
    ),
    ("GET", "/wandb_info"): Operation(answer=[schema.WandbInfo]),
    ("GET", "/info"): Operation(answer=[schema.Info]),
    ("GET", "/batch"): Operation(
        query=schema.BatchQuery,
        words=_ASKING,
        answer=[schema.BatchAnswer, schema.NotRegistered],
        statuses=(422, *STORED),
    ),
    ("GET", "/latest_example"): Operation(answer=[schema.Example], statuses=STORED),
    ("POST", "/scored_data"): Operation(
        body=ScoredData,
        headers=_KEY | _OURS,
        answer=[schema.Received, schema.Buffered],
        statuses=(409, 410, *WITH_BODY),
    ),
    ("POST", "/scored_data_list"): Operation(
        body=list[ScoredData], headers=_OURS, answer=[schema.ListReceived], statuses=(409, 410, *WITH_BODY)
    ),
    ("GET", "/status"): Operation(answer=[schema.Status]),
    ("GET", "/status-env"): Operation(
        body=schema.EnvReference, headers=_OURS, answer=[schema.EnvStatus], statuses=(410, *WITH_BODY)
    ),
    ("GET", "/reset_data"): Operation(media_type="text/plain", statuses=STORED),
    ("POST", "/v1/batches/{batch_id}/ack"): _SETTLING,
    ("POST", "/v1/batches/{batch_id}/nack"): _SETTLING,
    ("POST", "/v1/batches/{batch_id}/extend"): Operation(
        path=schema.BatchReference,
        query=schema.LeaseRequest,
        words={**_BATCH, "lease": "Seconds from now until the lease ends; here or in the body."},
        body=schema.LeaseRequest,
        needs_body=False,
        answer=[schema.Settled],
        statuses=(404, 409, *WITH_BODY),
    ),
    ("GET", "/v1/groups"): Operation(
        query=schema.GroupsRequest, words=_CHOOSING, answer=[schema.Groups], statuses=(422, *STORED)
    ),
    ("GET", "/v1/groups/{group_id}"): Operation(
        path=schema.GroupReference,
        words={"group_id": "Of the group."},
        answer=[schema.Group],
        statuses=(404, 422, *STORED),
    ),
    ("GET", "/v1/diagnostics"): Operation(answer=[schema.Diagnostics]),
    ("GET", "/metrics"): Operation(media_type="text/plain"),
    ("GET", "/openapi.json"): Operation(answer=[dict[str, Any]]),
    ("GET", "/docs"): Operation(media_type="text/html"),
}


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    components: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        method = _method(route)
        operation = OPERATIONS[method, route.path]
        described: dict[str, Any] = {"summary": _summary(route), "responses": _responses(operation, components)}
        if parameters := _parameters(operation):
            described["parameters"] = parameters
        if operation.body is not None:
            content = {"application/json": {"schema": _schema_of(operation.body, components)}}
            described["requestBody"] = {"required": operation.needs_body, "content": content}
        paths.setdefault(route.path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Halteres trajectory server", "version": PROTOCOL},
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic", "description": "The password is the token."},
            },
        },
    }


def page(routes: Sequence[Route]) -> str:
    """A plain page that lists the routes and their parameters."""
    lines = ""
    for route in routes:
        method = _method(route)
        items = "".join(
            f"<li><code>{each['name']}</code> ({each['in']}): {html.escape(each['description'])}"
            for each in _parameters(OPERATIONS[method, route.path])
        )
        lines += f"<dt><code>{method} {route.path}</code><dd>{html.escape(_summary(route))}"
        lines += f"<ul>{items}</ul>" if items else ""
    head = "<!doctype html><meta charset=utf-8><title>Halteres trajectory server</title><h1>Trajectory server</h1>"
    return f"{head}<dl>{lines}</dl><p>Schemas: <a href=/openapi.json>openapi.json</a></p>"


def _schema_of(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; structs within it become components."""
    (found,), more = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    components |= more
    return found


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for where, kind in (("path", operation.path), ("query", operation.query)):
        if kind is None:
            continue
        components: dict[str, Any] = {}
        _schema_of(kind, components)
        described = components[kind.__name__]
        needed = described["required"] if where == "path" or operation.body is None else ()
        for name, each in described["properties"].items():  # a parameter is left out, not null
            rest = {key: value for key, value in each.items() if key not in ("anyOf", "default")}
            kinds = [kind for kind in each.get("anyOf", ()) if kind != {"type": "null"}]
            default = {} if each.get("default") is None else {"default": each["default"]}
            found.append(
                {
                    "name": name,
                    "in": where,
                    "description": operation.words[name],
                    "required": name in needed,
                    "schema": rest | (kinds[0] if kinds else {}) | default,
                }
            )
    for name, words in operation.headers.items():
        found.append({"name": name, "in": "header", "description": words, "schema": {"type": "string"}})
    return found


def _responses(operation: Operation, components: dict[str, Any]) -> dict[str, Any]:
    kinds = [_schema_of(kind, components) for kind in operation.answer]
    answer = {"type": "string"} if not kinds else kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    found: dict[str, Any] = {"200": {"description": WORDS[200], "content": {operation.media_type: {"schema": answer}}}}
    for status in sorted({*operation.statuses, *ASKED}):
        if status in TEXT:
            content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        else:
            kind = schema.Unprocessed if status == 422 else schema.Refused
            content = {"application/json": {"schema": _schema_of(kind, components)}}
        found[str(status)] = {"description": WORDS[status], "content": content}
        if status == 503:
            header = {"description": "Seconds", "schema": {"type": "integer"}}
            found[str(status)]["headers"] = {"Retry-After": header}
    return found


def _method(route: Route) -> str:
    return "POST" if "POST" in (route.methods or ()) else "GET"


def _summary(route: Route) -> str:
    """What the docstring's first line says behind the route's name, which stands beside it."""
    said = (route.endpoint.__doc__ or "").partition("\n")[0].partition(": ")[2]
    return said[:1].upper() + said[1:]
