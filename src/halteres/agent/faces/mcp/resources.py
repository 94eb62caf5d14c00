"""Runs and environments as MCP resources: for hosts and people that attach things to a conversation.

Owns: the addresses rl://...; what is read for each.
Never: tells more than the tools and the page do; writes; uses up a look that `min_status_interval_s` allows an agent.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import mcp_types as types
import msgspec
import yaml
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from halteres.agent.call import Defect, Reply, call, recorded
from halteres.agent.caller import Caller
from halteres.agent.faces.functions import base64_of
from halteres.agent.untrusted import fenced, marked
from halteres.config.discovery import split_name
from halteres.dashboard.view import view_of
from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.observe.metrics import Row, merge_by_step
from halteres.redaction import Redactor
from halteres.runs.directory import find_run, list_runs
from halteres.runs.servers import servers_of

Context = ServerRequestContext[Any, Any]
Contents = types.TextResourceContents | types.BlobResourceContents

NEWEST = 10
"""Runs that are listed by themselves; the template reaches them all."""

_JSON, _TEXT, _CSV, _YAML, _PNG = "application/json", "text/plain", "text/csv", "application/yaml", "image/png"

_NOT_FOUND_2025: Final = -32002
"""Revision 2026-07-28 says INVALID_PARAMS instead."""

TEMPLATES = (
    ("rl://runs/{run_id}/status", "A run's state", _JSON),
    ("rl://runs/{run_id}/config", "The settings its environment ran with", _YAML),
    ("rl://runs/{run_id}/metrics.csv", "Every metric, one row per step", _CSV),
    ("rl://runs/{run_id}/plot.png", "Its curves", _PNG),
    ("rl://runs/{run_id}/logs/{role}", "The end of one process's log", _TEXT),
    ("rl://envs/{name}/source", "An environment's Python file", "text/x-python"),
)


async def listed(_: Context, __: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
    """All runs as one resource, and the newest ones."""
    every = types.Resource(uri="rl://runs", name="runs", title="Runs, newest first", mime_type=_JSON)
    newest = await asyncio.to_thread(lambda: [run.run_id for run in list_runs()[:NEWEST]])
    each = [types.Resource(uri=f"rl://runs/{run}/status", name=f"run {run}", mime_type=_JSON) for run in newest]
    return types.ListResourcesResult(resources=[every, *each])


async def templates(_: Context, __: types.PaginatedRequestParams | None) -> types.ListResourceTemplatesResult:
    """What can be read of each run and environment."""
    return types.ListResourceTemplatesResult(
        resource_templates=[
            types.ResourceTemplate(
                uri_template=template, name=template.removeprefix("rl://"), title=title, mime_type=kind
            )
            for template, title, kind in TEMPLATES
        ]
    )


async def read(context: Context, uri: str, caller: Caller) -> types.ReadResourceResult:
    """Read one.

    Raises:
        MCPError: there is no such resource, or reading it failed.
    """
    try:
        with boundary(Defect, f"reading {uri}"):
            return types.ReadResourceResult(contents=[await _read(uri, caller)])
    except Defect as error:
        told = recorded(error.what, error.__cause__ or error)
        raise _refusal(told, uri, types.INTERNAL_ERROR) from None
    except ServerError as error:
        raise _refusal(error, uri, types.INTERNAL_ERROR) from None
    except HalteresError as error:
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        raise _refusal(error, uri, types.INVALID_PARAMS if modern else _NOT_FOUND_2025) from None


def _refusal(error: HalteresError, uri: str, code: int) -> MCPError:
    return MCPError(code, Redactor.of_this_process().text(error.sentence), {"uri": uri})


async def _read(uri: str, caller: Caller) -> Contents:
    for pattern, read_one in _READERS:
        if match := pattern.fullmatch(uri):
            return await read_one(uri, caller, **match.groupdict())
    known = ", ".join(["rl://runs", *(template for template, _, _ in TEMPLATES)])
    raise NotFound(f"There is no resource {uri}.", f"There are: {known}.")


async def _runs(uri: str, caller: Caller) -> Contents:
    return _body(uri, await _told("rl_list_runs", {}, caller))


async def _status(uri: str, caller: Caller, run_id: str) -> Contents:
    view = await asyncio.to_thread(lambda: view_of(find_run(run_id)))
    return _plain(uri, _JSON, msgspec.json.encode(marked(view)).decode())


async def _config(uri: str, caller: Caller, run_id: str) -> Contents:
    def read() -> str:
        run = find_run(run_id)
        shown = yaml.safe_dump(Redactor.of_this_process().json(run.config()), sort_keys=False)
        return servers_of(run).redactor.text(shown)

    return _plain(uri, _YAML, await asyncio.to_thread(read))


async def _metrics(uri: str, caller: Caller, run_id: str) -> Contents:
    rows = await asyncio.to_thread(lambda: merge_by_step(find_run(run_id).metrics()))
    return _plain(uri, _CSV, table(rows))


async def _plot(uri: str, caller: Caller, run_id: str) -> Contents:
    reply = await _told("rl_get_results", {"run_id": run_id, "plot": True}, caller)
    picture = await asyncio.to_thread(base64_of, reply.images[0]) if reply.images else None
    if picture is None:
        raise NotFound(f"Run {run_id} has nothing to plot yet.")
    return types.BlobResourceContents(uri=uri, mime_type=_PNG, blob=picture)


async def _log(uri: str, caller: Caller, run_id: str, role: str) -> Contents:
    reply = await _told("rl_get_logs", {"run_id": run_id, "role": role, "lines": 40}, caller)
    return _plain(uri, _TEXT, fenced("\n".join(reply.body["lines"]), "log"))


async def _source(uri: str, caller: Caller, name: str) -> Contents:
    reply = await _told("rl_list_environments", {}, caller)
    family, _ = split_name(name)
    files = [found["file_path"] for found in reply.body["environments"] if found["name"] == family]
    if not files:
        raise NotFound(f"There is no environment {name}.")
    return _plain(uri, "text/x-python", await asyncio.to_thread(_text_of, Path(files[0])))


_Reader = Callable[..., Awaitable[Contents]]

_READERS: tuple[tuple[re.Pattern[str], _Reader], ...] = (
    (re.compile("rl://runs/?"), _runs),
    (re.compile("rl://runs/(?P<run_id>[^/]+)/status"), _status),
    (re.compile("rl://runs/(?P<run_id>[^/]+)/config"), _config),
    (re.compile(r"rl://runs/(?P<run_id>[^/]+)/metrics\.csv"), _metrics),
    (re.compile(r"rl://runs/(?P<run_id>[^/]+)/plot\.png"), _plot),
    (re.compile("rl://runs/(?P<run_id>[^/]+)/logs/(?P<role>[^/]+)"), _log),
    (re.compile("rl://envs/(?P<name>[^/]+)/source"), _source),
)


async def _told(name: str, arguments: dict[str, Any], caller: Caller) -> Reply:
    reply = await call(name, arguments, caller)
    if reply.failed:
        kind = ServerError if reply.status == ServerError.status else NotFound
        raise kind(reply.body["error"])
    return reply


def _text_of(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        raise NotFound(f"There is no file {file}.") from None


def table(rows: list[Row]) -> str:
    """Rows as CSV: `step` first, then every name that any row has; empty where a row has none."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _body(uri: str, reply: Reply) -> Contents:
    return _plain(uri, _JSON, json.dumps(reply.for_agents, ensure_ascii=False, separators=(",", ":")))


def _plain(uri: str, kind: str, text: str) -> Contents:
    return types.TextResourceContents(uri=uri, mime_type=kind, text=Redactor.of_this_process().text(text))
