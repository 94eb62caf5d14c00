"""The tool that measures weights on held-out tasks, rl_evaluate; and the process that does so for
it: `python -m halteres.agent.evaluation FOLDER --lock-fd N`.

One evaluation is made at a time; the same call again waits for it. Nothing is written into a run
but its service's journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import Field

from halteres import process
from halteres.agent.answer_text import nonempty
from halteres.agent.drafts import admitted, load_draft
from halteres.agent.tool import Caller, Draft, Hints, Result, RunId, WaitSeconds, chosen_run, tool
from halteres.agent.trial import folder as folders
from halteres.agent.trial.folder import TestFolder
from halteres.config import environ
from halteres.errors import Conflict, InvalidConfig, UserError
from halteres.next_step import NextStep, Placeholder
from halteres.observe.metrics import merge_by_step
from halteres.runs.planning.models import found_model
from halteres.runs.reading.evaluations import (
    CORRECT,
    GREEDY,
    SCORE,
    Evaluation,
    differences,
    evaluations,
)
from halteres.runs.reading.named_weights import newest_weights, weights_of
from halteres.runs.servers import (
    FREE_WITHIN_S,
    Server,
    ready_within_s,
    relayed,
    sampler_keys,
    served,
    service_arguments,
)
from halteres.runs.state import locked
from halteres.runs.supervision.evaluation import WITHIN_S, Examination, examination, measure
from halteres.short_texts import rounded

MODULE = "halteres.agent.evaluation"
MOST_FIGURES = 14  # that one answer has; the folder's files have all
START_WITHIN_S = 30.0  # how long a call waits while another one is starting an evaluation


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: one evaluation."""

    exam: Examination
    step: int | None  # optimiser steps that the weights have had; None: not known
    num_tasks: int | None  # None: as many as the environment has it
    service: tuple[str, ...]  # arguments of a service of our own
    created_at: float  # unix seconds
    # of the service to ask instead, with TINKER_API_KEY: it alone has the model
    service_url: str | None = None
    is_relayed: bool = False  # that service speaks the Tinker API alone


class Evaluated(Result):
    """An evaluation, done or under way."""

    evaluation_id: str
    status: str  # running, done, failed
    environment: str
    weights: str  # tinker:// path, or the base model's name
    run_id: str | None = None
    step: int | None = None  # optimiser steps that the weights have had
    figures: dict[str, Any] = {}
    # over the run's first evaluation: since_step, metric -> {delta, ci95, ...}
    improvement: dict[str, Any] = {}
    files: str = ""  # folder: samples.jsonl has every answer
    seconds: float = 0.0
    notes: list[str] = []


@tool(title="Evaluate weights", hints=Hints())
async def rl_evaluate(
    caller: Caller,
    run_id: RunId = None,
    weights: Annotated[
        str | None,
        Field(
            description="instead of the run's newest: a tinker:// path, or a run's adapter folder"
        ),
    ] = None,
    base: Annotated[
        bool,
        Field(description="the untrained base model: of the run that is named, else of your draft"),
    ] = False,
    num_tasks: Annotated[
        int | None,
        Field(ge=1, le=10_000, description="held-out tasks; default: as the environment has it"),
    ] = None,
    evaluation_id: Annotated[
        str | None, Field(max_length=100, description="go on waiting for this one")
    ] = None,
    wait_s: WaitSeconds = 45,
    draft: Draft = None,
) -> Evaluated:
    """Measure weights on held-out tasks, also of a run that has ended: more tasks are a surer
    figure.

    The run's own environment and settings hold. Answers how much better than the run's first
    evaluation they are.
    """

    def start() -> TestFolder:
        return _under_way_or_started(_request(caller, run_id, weights, base, num_tasks, draft))

    instead = NextStep.of("rl_evaluate", Placeholder("run_id"))
    folder = await folders.awaited("e", evaluation_id, wait_s, start, instead)
    return await asyncio.to_thread(_answer, folder, wait_s)


def _request(
    caller: Caller,
    run_id: str | None,
    weights: str | None,
    base: bool,
    num_tasks: int | None,
    draft: str | None,
) -> Request:
    """What a call means. UserError: it means two things."""
    if weights and (run_id or base):
        raise UserError(
            "weights name what is evaluated: run_id and base say otherwise.",
            "",
            NextStep.of("rl_evaluate", weights="tinker://..."),
        )
    service_url, is_relayed = None, False
    if base and not run_id:  # the base model of a draft, on the draft's environment
        resolved = admitted(caller, load_draft(caller, draft))
        settings, step = resolved.settings, 0
        service_url, model = found_model(settings.inference)
        is_relayed = model.is_relayed
        exam = Examination(
            program=resolved.environment,
            env=json.loads(json.dumps(resolved.environment_settings, default=str)),
            base=model.name,
            tokenizer=model.tokenizer,
            policy=model.name,
        )
    else:
        found = None
        if weights:
            found = weights_of(weights)
        if found:
            run = found.run
        else:
            run = chosen_run(run_id)
        state, settings = run.state(), run.settings()
        if state.is_on_file:
            raise UserError(
                f"Run {run.run_id} has no environment to be evaluated in.",
                "It trains on a file, and evaluates held-out rows of it itself.",
                NextStep.of("rl_get_results", run.run_id),
            )
        if num_tasks and state.is_foreign:
            what = f"num_tasks cannot be set for {state.environment}."
            raise InvalidConfig(what, "An environment of atroposlib's decides for itself.")
        if found is None and not base:
            found = newest_weights(run)
        model, step = settings.inference.model, 0
        policy = model
        if found:
            step, policy = found.step, found.path
        exam = examination(state.environment, run, model, policy)
    return Request(
        exam=exam,
        step=step,
        num_tasks=num_tasks,
        service=service_arguments(settings.inference, lora_rank=settings.trainer.lora_rank),
        service_url=service_url,
        is_relayed=is_relayed,
        created_at=time.time(),
    )


def _under_way_or_started(request: Request) -> TestFolder:
    """An evaluation of the same that goes on, so that a repeated call waits for it; else a new
    one.

    Raises:
        Conflict: another one goes on: each may start a service with an engine, and one machine
            bears one of them.
    """
    folders.tests_folder().mkdir(0o700, parents=True, exist_ok=True)
    with locked(
        folders.tests_folder() / "evaluations.lock",
        START_WITHIN_S,
        "No evaluation can be started now.",
    ):
        under_way = [folder for folder in folders.all_folders("e") if folder.phase() == "running"]
        for folder in under_way:
            # just removed, or of another version
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if (
                    msgspec.structs.replace(folder.request(Request), created_at=request.created_at)
                    == request
                ):
                    return folder
        if under_way:
            other = under_way[0].test_id
            raise Conflict(
                f"Evaluation {other} is under way.",
                "One at a time is made: each may load a model. It ends by itself.",
                NextStep.of("rl_evaluate", evaluation_id=other, wait_s=45),
            )
        keys = sampler_keys(request.service)
        if request.service_url:
            keys = (environ.API_KEY,)
        return folders.begin("e", MODULE, request, *keys)


def _answer(folder: TestFolder, wait_s: float) -> Evaluated:
    request = folder.request(Request)
    exam, run = request.exam, request.exam.run
    run_id, following = None, NextStep.of("rl_start_training", dry_run=True)
    if run:
        run_id, following = run.run_id, NextStep.of("rl_get_results", run.run_id)
    body: dict[str, Any] = {
        "evaluation_id": folder.test_id,
        "environment": exam.program.name,
        "weights": exam.policy,
        **nonempty(run_id=run_id, step=request.step),
    }
    answer = folders.unfinished(folder, "rl_evaluate", "evaluation's process", wait_s)
    if answer is not None:
        return Evaluated(**body, **answer)
    result = folder.result() or {}
    figures: Mapping[str, Any] = result["figures"]
    # How many failed is said only where some did, mostly none.
    shown = [
        name
        for name in figures
        if name != "eval/policy_version" and (name != "eval/num_failed" or figures[name])
    ]
    num_tasks, available = request.num_tasks, figures.get("eval/num_tasks")
    notes: list[str] = []
    if num_tasks is not None and available is not None:
        num_asked = available + figures.get("eval/num_failed", 0)
        if num_asked < num_tasks:
            note = f"{num_tasks} held-out tasks were asked for; the environment has {available:g}"
            notes = [note]
    return Evaluated(
        **body,
        status="done",
        figures={name: rounded(figures[name]) for name in shown[:MOST_FIGURES]},
        **nonempty(improvement=_improvement(folder, request, figures), notes=notes),
        files=str(folder.path),
        seconds=result["seconds"],
        next=following,
    )


def _improvement(
    folder: TestFolder, request: Request, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Over the run's first evaluation, task by task where both asked the same."""
    run = request.exam.run
    first = None
    if run:
        first = next(iter(evaluations(run, merge_by_step(run.metrics()))), None)
    if run is None or first is None or first.step == request.step:
        return {}
    # its first evaluation was of other tasks
    if request.exam.program.path != run.state().program.path:
        return {}
    now = Evaluation(
        step=request.step or 0,
        figures={name: float(value) for name, value in figures.items()},
        samples=folder.path / "samples.jsonl",
        success_threshold=run.success_threshold,
    )
    gains = differences(first, now)
    names = [name for name in (CORRECT, GREEDY) if name in gains]
    if not names and SCORE in gains:
        names = [SCORE]
    if not names:
        return {}
    # `before` and `after`: the two figures that the difference is of
    told = {
        name: {
            "before": rounded(first.figures[name]),
            "after": rounded(now.figures[name]),
            **gains[name].facts,
        }
        for name in names
    }
    return {"since_step": first.step, **told}


def main() -> int:
    """Evaluate, and write the result. Exit code 0, or 1 where it failed."""
    folder = folders.own_folder()
    process.begin("evaluator")
    began = time.monotonic()

    def work() -> dict[str, Any]:
        """By the service that was named, by the run's own where it is alive, or by one for this
        alone.
        """
        request = folder.request(Request)
        starts_s = FREE_WITHIN_S + ready_within_s(request.service)
        # Should nothing else have ended it; its children end with it.
        signal.alarm(int(starts_s + WITHIN_S) + 60)
        environ.hold_back(sampler_keys(request.service))
        exam, settings = request.exam, dict[str, Any]()
        if request.num_tasks:
            settings["eval_tasks"] = request.num_tasks
        # a run's own service has a log already
        log = None
        if exam.run is None:
            log = folder.path / "service.log"
        service = served(exam.base, exam.run, arguments=request.service, log=log)
        if request.service_url:
            given = Server(url=request.service_url, key=environ.api_key())
            service = contextlib.nullcontext(given)
            if request.is_relayed:
                service = relayed(given, exam.base, exam.tokenizer, log=log)
        with service as server:
            figures = measure(exam, server, settings, folder.path)
        return {"figures": figures, "seconds": round(time.monotonic() - began, 1)}

    return folders.leave_result(folder, "The evaluation", work)


if __name__ == "__main__":
    sys.exit(main())
