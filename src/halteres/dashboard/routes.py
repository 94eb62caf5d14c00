"""The page's routes: its files, the session that lets a browser in, what it reads of runs, the
tools' own answers.

A run is started, or gone on from, by the tools alone: each view of the page has a draft of its own,
which it selects with edits, checks and starts as an agent does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

import halteres
from halteres.agent.transports.access import (
    JSON,
    Guard,
    Tickets,
    Unauthorized,
    WithHeaders,
    answer,
    cookie_name,
    is_admitted,
    page_key,
    proof,
    refuse_outside_page,
)
from halteres.agent.transports.http_routes import Calls, arguments_of
from halteres.config.discovery import discover
from halteres.config.edits import Word
from halteres.dashboard.chat import MOST_ANSWERS, ChatAnswer, chat_of, question_of
from halteres.dashboard.curves import curves_of
from halteres.dashboard.events import MOST_STREAMS, SERVICES, Events
from halteres.dashboard.rollout_groups import group_of_step, groups_of_step
from halteres.dashboard.runs import (
    change_notes_of,
    evaluations_of,
    list_of_runs,
    origin_of,
    settings_of,
    view_of,
)
from halteres.dashboard.training_runs import (
    rows_of_training_runs,
    training_metrics,
    view_of_training_run,
)
from halteres.errors import UserError
from halteres.next_step import NextStep
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.reading.usage import usage_columns
from halteres.standalone_page import STATIC

ASSETS = "/ui"  # where the page's own files are; they tell nothing of a run, and are open

OWN_DRAFT = "page-"  # how the handles begin of drafts that the page's views work on

Endpoint = Callable[[Request], Awaitable[Response]]


def _open_routes() -> list[BaseRoute]:
    """The page's files, and the session by which a browser is let in."""
    tickets = Tickets()

    async def page(request: Request) -> Response:
        """The page, or a 401 that says how to open it (and opens it, for a link of `halteres
        ui`).
        """
        admitted = is_admitted(request.headers)
        file = STATIC / ("index.html" if admitted else "sign_in.html")
        return FileResponse(file, 200 if admitted else 401, {"Cache-Control": "no-store"})

    async def prove(request: Request) -> Response:
        """GET /api/session?nonce=...: shows the client that this is a server of the same home."""
        nonce = request.query_params.get("nonce", "")
        if not re.fullmatch(r"[A-Za-z0-9_-]{16,64}", nonce):
            raise UserError(
                "There is no nonce of 16 to 64 letters and digits.",
                "",
                "GET /api/session?nonce=NONCE",
            )
        return answer({"halteres": halteres.__version__, "proof": proof(nonce)})

    async def admit(request: Request) -> Response:
        """POST /api/session {token}: a cookie for a ticket, or for the token itself."""
        given = (await arguments_of(request)).get("token")
        if not isinstance(given, str) or not tickets.admits(given):
            raise Unauthorized(
                "This link was used before, is too old, or is of another home.",
                "",
                "Run: halteres ui",
            )
        response = Response(status_code=204)
        response.set_cookie(
            cookie_name(request.headers), page_key(), httponly=True, samesite="strict"
        )
        return response

    headers = [Middleware(WithHeaders)]
    return [
        Route("/", page, middleware=headers),
        Route("/api/session", prove, middleware=headers),
        Route("/api/session", admit, methods=["POST"], middleware=headers),
        Mount(ASSETS, StaticFiles(directory=STATIC), middleware=headers),
    ]


def page_routes(calls: Calls, write: Callable[[NextStep], str]) -> list[BaseRoute]:
    """The page and what it asks for.

    Args:
        calls: those of the server that it is part of.
        write: a call as a person types it.
    """
    streams = asyncio.Semaphore(MOST_STREAMS)
    answers = asyncio.Semaphore(MOST_ANSWERS)

    async def events(_: Request) -> Response:
        return Events(calls.ended, streams)

    async def stop(request: Request) -> Response:
        """POST /api/runs/{id}/stop {mode}."""
        arguments = {**await arguments_of(request), **request.path_params}
        reply = await calls.reply(request, "rl_stop_training", arguments, write=write)
        return answer(reply.body, reply.status)

    async def ask(request: Request) -> Response:
        """POST /api/runs/{id}/chat {policy, question, ...}: the answer, line by line."""
        wanted = await arguments_of(request)
        run_id = request.path_params["run_id"]
        asked = await asyncio.to_thread(lambda: question_of(find_run(run_id), wanted))
        return ChatAnswer(asked, write=write, ended=calls.ended, places=answers)

    async def compare(request: Request) -> Response:
        """GET /api/compare?ids=A,B: the tool's own answer for these runs."""
        ids = request.query_params.get("ids", "").split(",")
        arguments = {"run_ids": ids, "plot": False}
        reply = await calls.reply(request, "rl_compare_runs", arguments, write=write)
        return answer(reply.body, reply.status)

    def of_tool(name: str, *queries: str) -> Endpoint:
        """The endpoint that gives a tool's own answer."""

        async def endpoint(request: Request) -> Response:
            given = {**_given(request, queries), **request.path_params}
            reply = await calls.reply(request, name, given, write=write)
            return answer(reply.body, reply.status)

        return endpoint

    on_draft = partial(_of_draft, calls, write)
    guarded: list[tuple[str, str, Endpoint]] = [
        ("GET", "/api/events", events),
        ("GET", "/api/runs", _runs),
        ("GET", "/api/compare", compare),
        ("GET", "/api/runs/{run_id}", _of_run(partial(view_of, write=write))),
        ("GET", "/api/runs/{run_id}/metrics", _metrics),
        ("GET", "/api/runs/{run_id}/origin", _of_run(origin_of)),
        ("GET", "/api/runs/{run_id}/settings", _of_run(settings_of)),
        ("GET", "/api/runs/{run_id}/evals", _of_run(evaluations_of)),
        ("GET", "/api/runs/{run_id}/usage", _of_run(usage_columns)),
        ("GET", "/api/runs/{run_id}/status", of_tool("rl_check_status")),
        ("GET", "/api/runs/{run_id}/results", of_tool("rl_get_results")),
        ("GET", "/api/runs/{run_id}/groups", _groups),
        ("GET", "/api/runs/{run_id}/groups/{step:int}/{place:int}", _group),
        ("GET", "/api/runs/{run_id}/logs", of_tool("rl_get_logs", "role", "lines", "grep")),
        ("GET", "/api/runs/{run_id}/chat", _of_run(chat_of)),
        ("POST", "/api/runs/{run_id}/chat", ask),
        ("GET", "/api/training_runs/{id}", _training_run),
        ("GET", "/api/training_runs/{id}/metrics", _training_metrics),
        ("POST", "/api/runs/{run_id}/stop", stop),
        ("POST", "/api/runs/{run_id}/notes", _notes),
        ("GET", "/api/environments", _environments),
        ("POST", "/api/drafts/{draft}/select", on_draft("rl_select_environment")),
        ("POST", "/api/drafts/{draft}/settings", on_draft("rl_get_current_config", detail="full")),
        ("POST", "/api/drafts/{draft}/start", _of_draft(calls, _unwritten, "rl_start_training")),
    ]
    guard = [Middleware(WithHeaders), Middleware(Guard, refusal=refuse_outside_page)]
    routes = [
        Route(path, endpoint, methods=[method], middleware=guard)
        for method, path, endpoint in guarded
    ]
    return [*_open_routes(), *routes]


async def _runs(request: Request) -> Response:
    """GET /api/runs, GET /api/runs?ids=A,B."""
    ids = request.query_params.get("ids")
    if ids is None:
        return await _read(_rows, None)
    return await _read(_rows, set(ids.split(",")))


def _unwritten(_: NextStep) -> str:
    """A call that a person would type works on another draft than the view's."""
    return ""


def _of_draft(calls: Calls, write: Callable[[NextStep], str], name: str, **fixed: Any) -> Endpoint:
    """The endpoint that calls a tool on a draft of the page's own, never on an agent's."""

    async def endpoint(request: Request) -> Response:
        given = {**await arguments_of(request), **fixed}
        given["draft"] = f"{OWN_DRAFT}{request.path_params['draft']}"
        typed = given.get("changes")
        if isinstance(typed, dict):
            given["changes"] = {key: _as_typed(value) for key, value in typed.items()}
        reply = await calls.reply(request, name, given, takes_all=True, write=write)
        return answer(reply.body, reply.status)

    return endpoint


def _of_run(reader: Callable[[RunDirectory], dict[str, Any]]) -> Endpoint:
    """The endpoint that answers with what a function reads of a run."""

    async def endpoint(request: Request) -> Response:
        return await _read(lambda run_id: reader(find_run(run_id)), request.path_params["run_id"])

    return endpoint


async def _metrics(request: Request) -> Response:
    """GET /api/runs/{id}/metrics?names=A,B&first=STEP&last=STEP: the curves of these metrics
    between two steps, and the evaluations.
    """
    names = request.query_params.get("names", "").split(",")
    within = _steps_between(request)
    return await _of_run(
        lambda run: curves_of(run.path / "metrics.jsonl").columns(names, within=within)
    )(request)


def _rows(only: Collection[str] | None) -> dict[str, Any]:
    """The list of runs; where services are among what has changed, with the training runs of
    scripts.
    """
    body = list_of_runs(only)
    if only is None or SERVICES in only:
        body["runs"] += rows_of_training_runs()
    return body


async def _training_run(request: Request) -> Response:
    """GET /api/training_runs/{id}: that of a script of the Tinker SDK, with its checkpoints."""
    return await _read(view_of_training_run, request.path_params["id"])


async def _training_metrics(request: Request) -> Response:
    """GET /api/training_runs/{id}/metrics?names=A,B&first=STEP&last=STEP: as those of a run."""
    names = request.query_params.get("names", "").split(",")
    within = _steps_between(request)
    return await _read(training_metrics, request.path_params["id"], names, within)


async def _notes(request: Request) -> Response:
    """POST /api/runs/{id}/notes {tags, note, revision}: changes them."""
    wanted = await arguments_of(request)
    return await _of_run(lambda run: change_notes_of(run, wanted))(request)


async def _environments(_: Request) -> Response:
    """GET /api/environments: what a new run can be of, of a family every variant; and the files
    that are no environments, each with why.
    """
    return await _read(_known_environments)


def _known_environments() -> dict[str, Any]:
    found = discover()
    rows = [
        {"name": one.name, "description": one.description, "variants": list(one.members)}
        for one in found.environments
    ]
    broken = [{"file": one.file_path, "why": one.why} for one in found.broken]
    return {"environments": rows, "broken": broken}


async def _groups(request: Request) -> Response:
    """GET /api/runs/{id}/groups?step=N&search=TEXT: the groups of a step, in brief."""
    query = request.query_params
    step = None
    if re.fullmatch(r"\d{1,9}", query.get("step", "")):
        step = int(query["step"])
    search = query.get("search", "")
    return await _of_run(lambda run: groups_of_step(run, step, search))(request)


async def _group(request: Request) -> Response:
    """GET /api/runs/{id}/groups/{step}/{place}: one of them, with every answer."""
    step, place = request.path_params["step"], request.path_params["place"]
    return await _of_run(lambda run: group_of_step(run, step, place))(request)


def _as_typed(value: Any) -> Any:
    """The value of a setting; a text is read as one that was typed, by the type of the setting."""
    if isinstance(value, str):
        return Word(value)
    return value


def _given(request: Request, queries: Sequence[str]) -> dict[str, Any]:
    """A tool's arguments in a query. What is no number is left for the tool to refuse."""
    given: dict[str, Any] = {}
    for query in queries:
        word = request.query_params.get(query)
        if word is None:
            continue
        given[query] = word
        if re.fullmatch(r"\d{1,9}", word):
            given[query] = int(word)
    return given


def _steps_between(request: Request) -> tuple[int, int]:
    """The first and the last step that a query asks for; by default all.

    Raises:
        UserError: one is no step.
    """
    given = [request.query_params.get("first", "0"), request.query_params.get("last", str(2**53))]
    if not all(re.fullmatch(r"[0-9]{1,16}", word) for word in given):
        raise UserError("first and last are steps.", "", "Ask with whole numbers from 0 on.")
    first, last = map(int, given)
    return first, last


async def _read(reader: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    """What a reader of files says, without secrets; where a number is not finite, null."""
    body = Redactor.of_this_process().json(await asyncio.to_thread(reader, *arguments))
    return Response(
        msgspec.json.encode(body), media_type=JSON, headers={"Cache-Control": "no-store"}
    )
