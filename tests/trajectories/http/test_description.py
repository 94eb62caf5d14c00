"""The API does what its own description says: requests made from it by schemathesis, fitting ones
and others.

The short run is part of `make test`; `make test-chaos` makes ten times as many requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode, checks
from schemathesis.python.asgi import shutdown_lifespans
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from halteres.trajectories import service
from halteres.trajectories.openapi import WORDS, openapi, page
from halteres.trajectories.posted_group import MOST_GROUPS
from halteres.trajectories.server import ROUTES, create_app
from halteres.trajectories.stores.sqlite import SqliteStore
from trajectories.server_fixtures import ENV, TRAINER, group

LOCAL = "http://127.0.0.1:8000"
OPERATIONS = {(route.method, route.path): route for route in ROUTES}
PROMISES = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
EVERY_ROUTE = pytest.mark.parametrize(
    ("method", "path"), list(OPERATIONS), ids=map(" ".join, OPERATIONS)
)
LONGEST_WAIT_S = 0.01


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The description, bound to a server that has something to tell about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "PAUSE_HOLD_S", LONGEST_WAIT_S)
        store = SqliteStore(tmp_path_factory.mktemp("described") / "queue.sqlite")
        api = schemathesis.openapi.from_dict(openapi(ROUTES))
        api.app = create_app(store)
        yield api
        shutdown_lifespans()
        store.close()


def begin(api: Any) -> None:
    """A run with groups, a batch that is out, an environment; whatever the requests before have
    done.
    """
    for method, path, body in (
        ("GET", "/reset_data", None),
        ("POST", "/register", TRAINER),
        ("GET", "/batch", None),
        ("POST", "/register-env", ENV),
        ("POST", "/scored_data_list", [group(mark=mark) for mark in range(9)]),
        ("GET", "/batch?lease=60", None),
    ):
        route = path.partition("?")[0]
        case = api[route][method].Case(body=body) if body else api[route][method].Case()
        assert (
            case.call(base_url=LOCAL, params={"lease": "60"} if "?" in path else None).status_code
            == 200
        )


def sent(case: Case) -> Any:
    """The answer; a question that would be held for long is held for shorter."""
    with suppress(TypeError, ValueError, KeyError):
        if case.query and float(case.query["wait"]) > LONGEST_WAIT_S:
            case.query["wait"] = LONGEST_WAIT_S
    return case.call(base_url=LOCAL)


def explore(api: Any, method: str, path: str, num_examples: int) -> int:
    """Requests of this route that fit the description, and as many that do not; gives their
    number.
    """
    takes, route = OPERATIONS[method, path], api[path][method]
    num_sent = _explore(route, GenerationMode.POSITIVE, num_examples)
    if takes.body or takes.query or takes.in_path:
        num_sent += _explore(route, GenerationMode.NEGATIVE, num_examples)
    return num_sent


def _explore(operation: Any, mode: GenerationMode, num_examples: int) -> int:
    num_sent = count()

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_described(case: Case) -> None:
        next(num_sent)
        case.validate_response(sent(case), checks=PROMISES)

    answers_as_described()
    return next(num_sent)


@EVERY_ROUTE
def test_every_answer_is_one_that_the_description_names(api: Any, method: str, path: str) -> None:
    begin(api)
    # lists of groups take long to make up
    explore(api, method, path, 2 if path == "/scored_data_list" else 8)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_thousands_of_requests_are_answered_as_described(api: Any) -> None:
    num_sent = 0
    for method, path in OPERATIONS:
        begin(api)
        num_sent += explore(api, method, path, 30 if path == "/scored_data_list" else 150)
    assert num_sent >= 2000


def test_every_route_is_described_and_every_status_has_words(api: Any) -> None:
    described = openapi(ROUTES)
    routes = {(method, route.path) for route in ROUTES for method in route.methods or ()}
    assert (
        routes
        == set(OPERATIONS)
        == {(m.upper(), path) for path, each in described["paths"].items() for m in each}
    )
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert (
                {"200", "401", "403"}
                <= set(operation["responses"])
                <= {str(status) for status in WORDS}
            ), path
            assert all(answer["description"] for answer in operation["responses"].values())
    bodies = [
        path
        for path, each in described["paths"].items()
        for one in each.values()
        if "requestBody" in one
    ]
    assert "/status-env" in bodies, (
        "a GET with a body: OpenAPI 3.1 leaves that to the method's definition"
    )


def test_every_route_and_parameter_is_explained_in_words_of_the_wire() -> None:
    described = openapi(ROUTES)
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"] and f"{method.upper()} {path}" not in operation["summary"]
            assert all(parameter["description"] for parameter in operation.get("parameters", ()))
    assert f"at most {MOST_GROUPS:,}." in described["paths"]["/scored_data_list"]["post"]["summary"]
    wanted = {
        each["name"]: each["description"]
        for each in described["paths"]["/batch"]["get"]["parameters"]
    }
    assert (
        set(wanted) == {"policy_version", "after", "wait", "lease"} and "Seconds" in wanted["wait"]
    )


def test_the_page_for_people_names_each_route_once_with_its_parameters() -> None:
    shown = page(ROUTES)
    for method, path in OPERATIONS:
        assert (
            shown.count(f"<code>{method} {path}</code>") == 1 and f"{method} {path}:" not in shown
        )
    assert "<li><code>wait</code> (query): Seconds to hold" in shown
    assert "<li><code>Idempotency-Key</code> (header): Of this group" in shown
