"""The API described by itself: /openapi.json, and /docs for people.

Owns: how the table of operations becomes a document, and a page.
Never: loads anything from another host.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from starlette.routing import Route

from halteres.trajectories.wire import answers
from halteres.trajectories.wire.operations import ASKED, OPERATIONS, TEXT, WORDS, Operation

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
        kind = answers.Unprocessed if status == 422 else answers.Refused
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
