"""The API described by itself: /openapi.json, and /docs for people.

Owns: the description, taken from the routes' docstrings and the request schemas.
Never: loads anything from another host.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from halteres.trajectories.wire.schema import EnvReference, EnvRegistration, Registration
from halteres.trajectories.wire.scored import ScoredData

PROTOCOL = "0.4.0"
"""The version of Atropos whose API this is."""

BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/register"): Registration,
    ("POST", "/register-env"): EnvRegistration,
    ("POST", "/disconnect-env"): EnvReference,
    ("GET", "/status-env"): EnvReference,
    ("POST", "/scored_data"): ScoredData,
    ("POST", "/scored_data_list"): list[ScoredData],
}
"""What each route expects as its JSON body."""


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    schemas, components = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    bodies = dict(zip(BODIES, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        method = _method(route)
        operation: dict[str, Any] = {"summary": _summary(route), "responses": {"200": {"description": "OK"}}}
        if (method, route.path) in bodies:
            operation["requestBody"] = {"content": {"application/json": {"schema": bodies[method, route.path]}}}
        paths[route.path] = {method.lower(): operation}
    info = {"title": "Halteres trajectory server", "version": PROTOCOL}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def page(routes: Sequence[Route]) -> str:
    """A plain page that lists the routes."""
    lines = "".join(f"<dt><code>{_method(route)} {route.path}</code><dd>{_summary(route)}" for route in routes)
    head = "<!doctype html><meta charset=utf-8><title>Halteres trajectory server</title><h1>Trajectory server</h1>"
    return f"{head}<dl>{lines}</dl><p>Schemas: <a href=/openapi.json>openapi.json</a></p>"


def _method(route: Route) -> str:
    return "POST" if "POST" in (route.methods or ()) else "GET"


def _summary(route: Route) -> str:
    return html.escape((route.endpoint.__doc__ or "").partition("\n")[0])
