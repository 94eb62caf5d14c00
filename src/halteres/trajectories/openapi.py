"""The API described by itself: /openapi.json, and /docs for people; nothing is loaded from another
host.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from halteres.trajectories import schema

ALWAYS = (401, 403, 503)  # of every route: the access policy, and a server that is ending
WITH_BODY = (400, 408, 413, 422)
WORDS: Mapping[int, str] = {
    200: "Done",
    400: "The body cannot be read",
    401: "It needs a token",
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


class Described(Route):
    """A route with what it takes and replies; its endpoint's docstring begins with its name and a
    word on it.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        *,
        answer: Sequence[type] = (),  # one of these; none: text
        media_type: str = "application/json",  # of the answer
        body: Any = None,
        needs_body: bool = True,
        in_path: type[msgspec.Struct] | None = None,
        query: type[msgspec.Struct] | None = None,
        headers: Mapping[str, str] | None = None,  # what each is for
        statuses: Sequence[int] = (),  # beside 200, those of every route and those of what it takes
    ) -> None:
        super().__init__(path, endpoint, methods=[method])
        # without the HEAD that Starlette adds: HEAD /batch would deliver a batch to nobody
        self.methods = {method}
        self.method, self.answer, self.media_type = method, answer, media_type
        self.body, self.needs_body = body, needs_body
        self.in_path, self.query, self.headers = in_path, query, headers or {}
        self.statuses = {*statuses, *ALWAYS}
        if body:
            self.statuses.update(WITH_BODY)
        elif query or in_path:
            self.statuses.add(422)
        words = " ".join((endpoint.__doc__ or "").partition("\n\n")[0].split()).partition(": ")[2]
        self.summary = words[:1].upper() + words[1:]


def openapi(routes: Sequence[Described]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    components: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        described: dict[str, Any] = {
            "summary": route.summary,
            "responses": _responses(route, components),
        }
        if parameters := _parameters(route):
            described["parameters"] = parameters
        if route.body is not None:
            content = {"application/json": {"schema": _schema_of(route.body, components)}}
            described["requestBody"] = {"required": route.needs_body, "content": content}
        paths.setdefault(route.path, {})[route.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Halteres trajectory server", "version": PROTOCOL},
        "security": [{}, {"bearer": []}, {"basic": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "The password is the token.",
                },
            },
        },
    }


def page(routes: Sequence[Described]) -> str:
    """A plain page that lists the routes and their parameters."""
    lines = ""
    for route in routes:
        items = "".join(
            f"<li><code>{each['name']}</code> ({each['in']}): {html.escape(each['description'])}"
            for each in _parameters(route)
        )
        lines += f"<dt><code>{route.method} {route.path}</code><dd>{html.escape(route.summary)}"
        if items:
            lines += f"<ul>{items}</ul>"
    head = (
        "<!doctype html><meta charset=utf-8><title>Halteres trajectory "
        "server</title><h1>Trajectory server</h1>"
    )
    return f"{head}<dl>{lines}</dl><p>Schemas: <a href=/openapi.json>openapi.json</a></p>"


def _schema_of(kind: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type; structs within it become components."""
    (found,), more = msgspec.json.schema_components(
        [kind], ref_template="#/components/schemas/{name}"
    )
    components |= more
    return found


def _parameters(route: Described) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for where, kind in (("path", route.in_path), ("query", route.query)):
        if kind is None:
            continue
        components: dict[str, Any] = {}
        _schema_of(kind, components)
        described = components[kind.__name__]
        needed = described["required"]
        if where == "query" and route.body is not None:
            # The body may say it instead.
            needed = ()
        for name, each in described["properties"].items():
            found.append(
                {
                    "name": name,
                    "in": where,
                    "description": each["description"],
                    "required": name in needed,
                    "schema": _without_null(each),
                }
            )
    for name, words in route.headers.items():
        found.append(
            {"name": name, "in": "header", "description": words, "schema": {"type": "string"}}
        )
    return found


def _without_null(described: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a parameter, which is left out and never null."""
    found = {
        key: value
        for key, value in described.items()
        if key not in ("anyOf", "default", "description")
    }
    kinds = [kind for kind in described.get("anyOf", ()) if kind != {"type": "null"}]
    if kinds:
        found |= kinds[0]
    if described.get("default") is not None:
        found["default"] = described["default"]
    return found


def _responses(route: Described, components: dict[str, Any]) -> dict[str, Any]:
    kinds = [_schema_of(kind, components) for kind in route.answer]
    answer: dict[str, Any] = {"type": "string"}
    if len(kinds) == 1:
        answer = kinds[0]
    elif kinds:
        answer = {"anyOf": kinds}
    found: dict[str, Any] = {
        "200": {"description": WORDS[200], "content": {route.media_type: {"schema": answer}}}
    }
    for status in sorted(route.statuses):
        if status in TEXT:
            content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        elif status == 422:
            content = {"application/json": {"schema": _schema_of(schema.Unprocessed, components)}}
        else:
            content = {"application/json": {"schema": _schema_of(schema.Refused, components)}}
        found[str(status)] = {"description": WORDS[status], "content": content}
        if status == 503:
            header = {"description": "Seconds", "schema": {"type": "integer"}}
            found[str(status)]["headers"] = {"Retry-After": header}
    return found
