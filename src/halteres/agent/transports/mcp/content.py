"""What the MCP server offers beside the tools: runs and environments as resources (rl://...), which
clients and people attach to a conversation; prompts that a person picks; instructions on the tools
as a whole.

Reading a resource uses up no look that `min_status_interval_s` allows an agent.
"""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mcp_types as types
import msgspec
import yaml
from mcp.server import ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from halteres.agent.answer_text import RULE, fenced, marked
from halteres.agent.call import Defect, Reply, call, record_defect
from halteres.agent.tool import Caller
from halteres.agent.transports.functions import base64_of
from halteres.config.discovery import split_name
from halteres.dashboard.runs import view_of
from halteres.errors import HalteresError, NotFound, ServerError, boundary
from halteres.observe.metrics import merge_by_step
from halteres.redaction import Redactor
from halteres.runs.directory import find_run, list_runs
from halteres.runs.servers import servers_of

Context = ServerRequestContext[Any, Any]
Contents = types.TextResourceContents | types.BlobResourceContents

NEWEST = 10  # runs that are listed by themselves; the template reaches them all
_JSON = "application/json"
_NOT_FOUND_2025: Final = -32002  # revision 2026-07-28 says INVALID_PARAMS instead


async def list_resources(
    _: Context, __: types.PaginatedRequestParams | None
) -> types.ListResourcesResult:
    """All runs as one resource, and the newest ones."""
    every = types.Resource(
        uri="rl://runs", name="runs", title="Runs, newest first", mime_type=_JSON
    )
    newest = await asyncio.to_thread(lambda: [run.run_id for run in list_runs()[:NEWEST]])
    each = [
        types.Resource(uri=f"rl://runs/{run}/status", name=f"run {run}", mime_type=_JSON)
        for run in newest
    ]
    return types.ListResourcesResult(resources=[every, *each])


async def list_templates(
    _: Context, __: types.PaginatedRequestParams | None
) -> types.ListResourceTemplatesResult:
    """What can be read of each run and environment."""
    return types.ListResourceTemplatesResult(
        resource_templates=[
            types.ResourceTemplate(
                uri_template=uri, name=uri.removeprefix("rl://"), title=title, mime_type=kind
            )
            for uri, (title, kind, _) in TEMPLATES.items()
        ]
    )


async def read_resource(context: Context, uri: str, caller: Caller) -> types.ReadResourceResult:
    """What is at an address.

    Raises:
        MCPError: nothing, or it cannot be read; a defect is in the log.
    """
    try:
        with boundary(Defect, f"reading {uri}"):
            return types.ReadResourceResult(contents=[await _read(uri, caller)])
    except Defect as error:
        raise _refusal(
            record_defect(error.what, error.__cause__ or error), uri, types.INTERNAL_ERROR
        ) from None
    except ServerError as error:
        raise _refusal(error, uri, types.INTERNAL_ERROR) from None
    except HalteresError as error:
        modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        raise _refusal(error, uri, types.INVALID_PARAMS if modern else _NOT_FOUND_2025) from None


def _refusal(error: HalteresError, uri: str, code: int) -> MCPError:
    return MCPError(code, Redactor.of_this_process().text(error.sentence), {"uri": uri})


async def _read(uri: str, caller: Caller) -> Contents:
    if uri.rstrip("/") == "rl://runs":
        reply = await _reply("rl_list_runs", {}, caller)
        return _text(
            uri, _JSON, json.dumps(reply.for_agents, ensure_ascii=False, separators=(",", ":"))
        )
    for template, (_, kind, reader) in TEMPLATES.items():
        pattern = re.escape(template).replace(r"\{", "(?P<").replace(r"\}", ">[^/]+)")
        if found := re.fullmatch(pattern, uri):
            value = await reader(caller, **found.groupdict())
            if kind == "image/png":
                return types.BlobResourceContents(uri=uri, mime_type=kind, blob=value)
            return _text(uri, kind, value)
    raise NotFound(
        f"There is no resource {uri}.", f"There are: {', '.join(['rl://runs', *TEMPLATES])}."
    )


def _text(uri: str, kind: str, text: str) -> Contents:
    return types.TextResourceContents(
        uri=uri, mime_type=kind, text=Redactor.of_this_process().text(text)
    )


async def _status(caller: Caller, run_id: str) -> str:
    view = await asyncio.to_thread(lambda: view_of(find_run(run_id), caller.write))
    return msgspec.json.encode(marked(view)).decode()


async def _config(caller: Caller, run_id: str) -> str:
    def read() -> str:
        run = find_run(run_id)
        shown = yaml.safe_dump(Redactor.of_this_process().json(run.config()), sort_keys=False)
        return servers_of(run).redactor.text(shown)

    return await asyncio.to_thread(read)


async def _metrics(caller: Caller, run_id: str) -> str:
    """As CSV: `step` first, then every name that any row has; empty where a row has none."""
    rows = await asyncio.to_thread(lambda: merge_by_step(find_run(run_id).metrics()))
    stream = io.StringIO()
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


async def _plot(caller: Caller, run_id: str) -> str:
    reply = await _reply("rl_get_results", {"run_id": run_id, "plot": True}, caller)
    picture = None
    if reply.images:
        picture = await asyncio.to_thread(base64_of, reply.images[0])
    if picture is None:
        raise NotFound(f"Run {run_id} has nothing to plot yet.")
    return picture


async def _log(caller: Caller, run_id: str, role: str) -> str:
    reply = await _reply("rl_get_logs", {"run_id": run_id, "role": role, "lines": 40}, caller)
    return fenced("\n".join(reply.body["lines"]), "log")


async def _source(caller: Caller, name: str) -> str:
    reply = await _reply("rl_list_environments", {}, caller)
    family, _ = split_name(name)
    file = next(
        (
            Path(found["file_path"])
            for found in reply.body["environments"]
            if found["name"] == family
        ),
        None,
    )
    if file is None:
        raise NotFound(f"There is no environment {name}.")
    try:
        return await asyncio.to_thread(file.read_text)
    except FileNotFoundError:
        raise NotFound(f"There is no file {file}.") from None


async def _reply(name: str, arguments: dict[str, Any], caller: Caller) -> Reply:
    reply = await call(name, arguments, caller)
    if reply.failed:
        kind = NotFound
        if reply.status == ServerError.status:
            kind = ServerError
        raise kind(reply.body["error"])
    return reply


TEMPLATES: dict[str, tuple[str, str, Callable[..., Awaitable[str]]]] = {
    "rl://runs/{run_id}/status": ("A run's state", _JSON, _status),
    "rl://runs/{run_id}/config": (
        "The settings its environment ran with",
        "application/yaml",
        _config,
    ),
    "rl://runs/{run_id}/metrics.csv": ("Every metric, one row per step", "text/csv", _metrics),
    "rl://runs/{run_id}/plot.png": ("Its curves", "image/png", _plot),
    "rl://runs/{run_id}/logs/{role}": ("The end of one process's log", "text/plain", _log),
    "rl://envs/{name}/source": ("An environment's Python file", "text/x-python", _source),
}
"""Address -> title, media type, who reads it: a text, or for a picture its bytes in base 64."""


INSTRUCTIONS = f"""\
Halteres trains language models by reinforcement learning on this machine; no account or key is needed.
The path: rl_list_environments, rl_select_environment, rl_test_inference (trainable?), \
rl_start_training(dry_run=true), rl_start_training, rl_check_status until it has ended, rl_get_results. \
Or at once: rl_start_training(environment=..., changes={{...}}).
The `next` of every answer, errors too, holds the call that makes sense then.
Wait with rl_check_status(run_id, wait_s=45, until="...") instead of asking again and again. \
A run goes on without you: rl_list_runs finds it, from any session.
What you select and edit is a draft of your own; `draft` in an answer is its handle, to go on with it elsewhere.
{RULE}
Read rl_get_rollouts before you trust a reward that rises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt; `text` has a place for each argument, which `arguments` describes."""

    name: str
    title: str
    arguments: Mapping[str, str]
    defaults: Mapping[str, str]  # of those that may be left out
    text: str


PROMPTS = (
    Prompt(
        name="train",
        title="Train a model",
        arguments={"environment": "what to train on", "goal": "when it is good enough"},
        defaults={
            "environment": "the one that fits best",
            "goal": "a held-out gain whose confidence interval excludes 0",
        },
        text="""\
Train a model with the rl_* tools. Environment: {environment}. Goal: {goal}.
1. rl_health_check, rl_list_environments, rl_select_environment.
2. rl_test_inference: go on only if it is trainable; else change the difficulty, group_size or max_token_length.
3. rl_start_training(dry_run=true): settle its problems and mind its estimate. Then rl_start_training().
4. rl_check_status(run_id, wait_s=45, until="eval") until it has ended. Act on alerts as their remedy says.
5. Read rl_get_rollouts(which="best"): is the reward earned? Then rl_get_results, and tell gain, interval, weights.""",
    ),
    Prompt(
        name="debug_run",
        title="Find out what is wrong with a run",
        arguments={"run_id": "the run"},
        defaults={"run_id": "the newest that failed or has an alert (rl_list_runs)"},
        text="""\
Find out what is wrong with a training run, and mend it. Run: {run_id}.
1. rl_check_status: state, error, code, alerts, trend. An error's and an alert's remedy comes first.
2. It failed: rl_get_logs of the process that ended. It learns nothing: rl_get_rollouts(which="worst"), then "best":
   are answers cut off, unparsed, or scored wrongly? Is the reward earned or hacked?
3. Change one thing: settings with rl_start_training(resume_from=..., changes=...), or the environment's scorer.
4. rl_compare_runs of before and after. Say what was wrong, what you changed, what it brought.""",
    ),
    Prompt(
        name="write_environment",
        title="Write an environment",
        arguments={"task": "what the model is to learn"},
        defaults={},
        text="""\
Write a reinforcement-learning environment. The model is to learn: {task}.
1. rl_list_environments; read the file of the one that is nearest and copy it under a new name.
2. Tasks: many, of mixed difficulty, with held-out ones for evaluation. The scorer: deterministic, strict about form,
   silent about the answer; partial credit only where it cannot be farmed.
3. rl_select_environment(file), rl_test_inference: half-right groups teach most. All right or all wrong: change the
   difficulty.
4. rl_start_training(changes={{"total_steps": 20}}), then rl_get_rollouts(which="best"): look for hacking.""",
    ),
)


async def list_prompts(
    _: Context, __: types.PaginatedRequestParams | None
) -> types.ListPromptsResult:
    """All prompts."""
    prompts: list[types.Prompt] = []
    for prompt in PROMPTS:
        arguments = [
            types.PromptArgument(name=name, description=what, required=name not in prompt.defaults)
            for name, what in prompt.arguments.items()
        ]
        prompts.append(types.Prompt(name=prompt.name, title=prompt.title, arguments=arguments))
    return types.ListPromptsResult(prompts=prompts)


async def get_prompt(_: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    """One prompt, filled in.

    Raises:
        MCPError: there is no such prompt, or an argument is missing.
    """
    by_name = {prompt.name: prompt for prompt in PROMPTS}
    prompt = by_name.get(params.name)
    if prompt is None:
        raise MCPError(
            types.INVALID_PARAMS,
            f"There is no prompt '{params.name}'; there are {', '.join(by_name)}.",
        )
    given = {name: value for name, value in (params.arguments or {}).items() if value.strip()}
    missing = sorted(set(prompt.arguments) - set(prompt.defaults) - set(given))
    if missing:
        raise MCPError(
            types.INVALID_PARAMS, f"The prompt '{prompt.name}' needs: {', '.join(missing)}."
        )
    text = prompt.text.format(**{**prompt.defaults, **given})
    message = types.PromptMessage(role="user", content=types.TextContent(text=text))
    return types.GetPromptResult(description=prompt.title, messages=[message])
