"""The tool that measures weights on held-out tasks: rl_evaluate.

Owns: which weights a call means, the noun `Request`, the wait, the answer; that the same call again goes on waiting,
and that there is one evaluation at a time.
Never: evaluates (`evaluator` does, in a process of its own), writes into a run but for its service's journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from pydantic import Field

from halteres.agent.drafting.drafts import load_draft
from halteres.agent.tool import Caller, Draft, Hints, Result, RunId, WaitSeconds, chosen_run, tool
from halteres.agent.trial.folder import TestFolder, begin, tests_home
from halteres.agent.trial.testing import until_ended
from halteres.agent.watching.headline import CORRECT, GREEDY, SCORE, rounded
from halteres.config import environ
from halteres.config.program import describe, program_of
from halteres.config.settings import ENV_WIRING
from halteres.errors import Conflict, InvalidConfig, NotFound, UserError
from halteres.next_step import worded
from halteres.observe.metrics import merge_by_step
from halteres.runs.directory import RunDirectory
from halteres.runs.lock import locked
from halteres.runs.measurement import Examination, examination
from halteres.runs.reading.adapter import newest_weights, weights_of
from halteres.runs.reading.evaluations import Evaluation, differences, evaluations
from halteres.runs.servers import service_arguments
from halteres.runs.starting.base_model import found_model

MODULE = "halteres.agent.judging.evaluator"

MOST_FIGURES = 14
"""That one answer tells; the folder's files have all."""

_QUIET = ("eval/policy_version", "eval/num_failed")
"""Figures that are told only where they say something: nothing failed, mostly."""

START_WITHIN_S = 30.0
"""How long a call waits while another one is starting an evaluation."""

LOST = "The evaluation's process is gone (killed, or the machine was restarted)."


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: one evaluation."""

    exam: Examination
    step: int | None  # optimiser steps that the weights have had; None: nobody says
    num_tasks: int | None  # None: as many as the environment has it
    service: tuple[str, ...]  # arguments of a service of our own
    created_at: float  # unix seconds
    service_url: str | None = None  # of the service to ask instead, with TINKER_API_KEY: it alone has the model

    @property
    def run(self) -> RunDirectory | None:
        """Whose weights, or whose base model; None: the draft's base model."""
        return self.exam.run

    def asks_the_same(self, other: Request) -> bool:
        """Whether both ask for the same, whenever they did."""
        return msgspec.structs.replace(self, created_at=0.0) == msgspec.structs.replace(other, created_at=0.0)


class Evaluated(Result):
    """An evaluation, done or under way."""

    evaluation_id: str
    status: str  # running, done, failed
    environment: str
    weights: str  # tinker:// path, or the base model's name
    run_id: str | None = None
    step: int | None = None  # optimiser steps that the weights have had
    figures: dict[str, Any] = {}
    improvement: dict[str, Any] = {}  # over the run's first evaluation: since_step, metric -> {delta, ci95, ...}
    files: str = ""  # folder: samples.jsonl has every answer
    seconds: float = 0.0
    notes: list[str] = []


@tool(title="Evaluate weights", hints=Hints())
async def rl_evaluate(
    caller: Caller,
    run_id: RunId = None,
    weights: Annotated[
        str | None, Field(description="instead of the run's newest: a tinker:// path, or a run's adapter folder")
    ] = None,
    base: Annotated[
        bool, Field(description="the untrained base model: of the run that is named, else of your draft")
    ] = False,
    num_tasks: Annotated[
        int | None, Field(ge=1, le=10_000, description="held-out tasks; default: as the environment has it")
    ] = None,
    evaluation_id: Annotated[str | None, Field(max_length=100, description="go on waiting for this one")] = None,
    wait_s: WaitSeconds = 45,
    draft: Draft = None,
) -> Evaluated:
    """Measure weights on held-out tasks, also of a run that has ended: more tasks are a surer figure.

    The run's own environment and settings hold. Answers how much better than the run's first evaluation they are.
    """
    ends_at = time.monotonic() + wait_s
    if evaluation_id:
        folder = await asyncio.to_thread(_find, evaluation_id)
    else:
        request = await asyncio.to_thread(_request, caller, run_id, weights, base, num_tasks, draft)
        folder = await asyncio.to_thread(_under_way_or_started, request)
    await until_ended(folder, ends_at)
    return Evaluated(**await asyncio.to_thread(_answer, folder))


def _request(
    caller: Caller, run_id: str | None, weights: str | None, base: bool, num_tasks: int | None, draft: str | None
) -> Request:
    """What a call means. UserError: it means two things."""
    if weights and (run_id or base):
        raise UserError(
            "weights name what is evaluated: run_id and base say otherwise.", "", 'rl_evaluate(weights="tinker://...")'
        )
    if base and not run_id:
        return _of_draft(caller, num_tasks, draft)
    found = weights_of(weights) if weights else None
    run = found.run if found else chosen_run(run_id)
    state = run.state()
    if num_tasks and state.is_foreign:
        raise InvalidConfig(
            f"num_tasks cannot be set for {state.environment}.", "An environment of atroposlib's decides for itself."
        )
    model = run.settings().inference.model
    found = found or (None if base else newest_weights(run))
    return Request(
        exam=examination(state.environment, run, model, found.path if found else model),
        step=found.step if found else 0,
        num_tasks=num_tasks,
        service=service_arguments(run.settings().inference),
        created_at=time.time(),
    )


def _of_draft(caller: Caller, num_tasks: int | None, draft: str | None) -> Request:
    """The base model of a draft, on the draft's environment."""
    settings = load_draft(caller, draft).resolve().settings
    program, (service_url, model) = program_of(settings.run), found_model(settings.inference)
    describe(program, {name: value for name, value in settings.env.items() if name not in ENV_WIRING})
    filled_in = {"seed": settings.run.seed, "success_threshold": settings.run.success_threshold}
    return Request(
        exam=Examination(
            program=program,
            env=json.loads(json.dumps({**settings.env, **filled_in}, default=str)),
            base=model.name,
            tokenizer=model.tokenizer,
            policy=model.name,
        ),
        step=0,
        num_tasks=num_tasks,
        service=service_arguments(settings.inference),
        service_url=service_url,
        created_at=time.time(),
    )


def _under_way_or_started(request: Request) -> TestFolder:
    """An evaluation of the same that goes on, for which whoever asks again waits; else a new one.

    Raises:
        Conflict: another one goes on: each may start a service with an engine, and one machine bears one of them.
    """
    tests_home().mkdir(0o700, parents=True, exist_ok=True)
    with locked(tests_home() / "evaluations.lock", START_WITHIN_S, "No evaluation can be started now."):
        under_way = [folder for folder in _all() if folder.phase() == "running"]
        if same := next((folder for folder in under_way if _asks(folder, request)), None):
            return same
        if under_way:
            other = under_way[0].test_id
            raise Conflict(
                f"Evaluation {other} is under way.",
                "One at a time is made: each may load a model. It ends by itself.",
                worded("rl_evaluate", evaluation_id=other, wait_s=45),
            )
        return _start(request)


def _start(request: Request) -> TestFolder:
    body = msgspec.to_builtins(request, enc_hook=str)
    keys = (environ.API_KEY,) if request.service_url else ()
    folder = begin("e", MODULE, lambda folder: folder.write("request.json", body), *keys)
    return folder


def request_in(folder: TestFolder) -> Request:
    """What was asked of the evaluation in this folder."""
    return msgspec.json.decode(
        (folder.path / "request.json").read_bytes(), type=Request, dec_hook=lambda kind, value: kind(value)
    )


def _asks(folder: TestFolder, request: Request) -> bool:
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # just removed, or of another version
        return request_in(folder).asks_the_same(request)
    return False


def _all() -> Iterator[TestFolder]:
    return (TestFolder(file.parent) for file in tests_home().glob("e-*/request.json"))


def _find(evaluation_id: str) -> TestFolder:
    folder = TestFolder(tests_home() / evaluation_id)
    if re.fullmatch(r"e-[0-9a-f]{8}", evaluation_id) and (folder.path / "request.json").is_file():
        return folder
    raise NotFound(
        f"There is no evaluation '{evaluation_id}'.", "rl_evaluate's answers name them.", "rl_evaluate(run_id)"
    )


def _answer(folder: TestFolder) -> dict[str, Any]:
    request, phase, result = request_in(folder), folder.phase(), folder.result() or {}
    exam, run = request.exam, request.run
    body: dict[str, Any] = {
        "evaluation_id": folder.test_id,
        "status": "failed" if phase == "lost" else phase,
        "environment": exam.program.name,
        "weights": exam.policy,
        **({"run_id": run.run_id} if run else {}),
        **({} if request.step is None else {"step": request.step}),
    }
    if phase == "running":
        return {**body, "next": worded("rl_evaluate", evaluation_id=folder.test_id, wait_s=45)}
    if phase != "done":
        error = result.get("error", LOST)
        log = folder.path / "tester.log"
        return {**body, "error": error, "code": result.get("code", "process_exited"), "next": f"read {log}, mend it"}
    figures = result["figures"]
    return {
        **body,
        "figures": _brief(figures),
        **_improvement(folder, request, figures),
        "files": str(folder.path),
        "seconds": result["seconds"],
        **_notes(request, figures),
        "next": worded("rl_get_results", run.run_id) if run else "rl_start_training(dry_run=true)",
    }


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    said = {name: value for name, value in figures.items() if name not in _QUIET or (name == _QUIET[1] and value)}
    return {name: rounded(value) for name, value in list(said.items())[:MOST_FIGURES]}


def _improvement(folder: TestFolder, request: Request, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Over the run's first evaluation, task by task where both asked the same."""
    run = request.run
    first = next(iter(evaluations(run, merge_by_step(run.metrics()))), None) if run else None
    if run is None or first is None or first.step == request.step:
        return {}
    samples = folder.path / "samples.jsonl"
    numbers = {name: float(value) for name, value in figures.items()}
    now = Evaluation(step=request.step or 0, figures=numbers, samples=samples, success_threshold=run.success_threshold)
    gains = differences(first, now)
    names = [name for name in (CORRECT, GREEDY) if name in gains] or [name for name in (SCORE,) if name in gains]
    return {"improvement": {"since_step": first.step, **{name: gains[name].facts for name in names}}} if names else {}


def _notes(request: Request, figures: Mapping[str, Any]) -> dict[str, Any]:
    asked, had = request.num_tasks, figures.get("eval/num_tasks")
    if asked is None or had is None or had + figures.get("eval/num_failed", 0) >= asked:
        return {}
    return {"notes": [f"{asked} held-out tasks were asked for; the environment has {had:g}"]}
