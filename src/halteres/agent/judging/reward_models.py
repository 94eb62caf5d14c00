"""The tools that use reward models: rl_list_reward_models, rl_evaluate_reward_model, rl_rank_completions.

Owns: which models there are; the wait for a measurement, in a process of its own (`reward_evaluator`): this one has no
torch; that the same `evaluation_id` goes on waiting.
Never: scores.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field

from halteres.agent.tool import READS, Caller, Hints, LongArguments, Result, WaitSeconds, tool
from halteres.agent.trial.folder import TestFolder, begin, tests_home
from halteres.agent.trial.testing import until_ended
from halteres.agent.watching.headline import rounded
from halteres.config import environ
from halteres.errors import HalteresError, NotFound, UserError
from halteres.models import stored_models
from halteres.next_step import worded
from halteres.rewards.model_folder import RESULT, ModelFolder, read_model_folder
from halteres.runs.directory import list_runs

MODULE = "halteres.agent.judging.reward_evaluator"

MOST_LISTED, MOST_COMPLETIONS = 20, 64

LOST = "The process that scores is gone (killed, or the machine was restarted)."

_METRICS = ("eval_accuracy", "accuracy", "eval_loss", "loss")

Model = Annotated[str, Field(description="a reward model: its folder, a run that trained it, or a server's address")]
EvaluationId = Annotated[str | None, Field(max_length=100, description="go on waiting for this one")]


class RewardRequest(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: preferences to measure a model on, or completions to rank."""

    model: str
    data: str | None = None
    prompt: str | None = None
    completions: tuple[str, ...] = ()


class RewardModels(Result):
    """Reward models on this machine, the newest first."""

    reward_models: list[dict[str, Any]]  # model, and what is known: run_id, base, rows, figures, calibrated
    count: int


class RewardEvaluated(Result):
    """A reward model on held-out preferences, done or under way."""

    evaluation_id: str
    status: str  # running, done, failed
    model: str
    accuracy: float | None = None  # share of pairs whose better side has the higher score
    interval: list[float] = []  # 95 %, Wilson
    num_pairs: int = 0
    by_kind: dict[str, Any] = {}  # kind -> accuracy, interval, num_pairs
    warnings: list[str] = []
    files: str = ""  # folder: result.json has every figure


class Ranked(Result):
    """Completions of one prompt, the best first."""

    evaluation_id: str
    status: str  # running, done, failed
    order: list[int] = []  # places in what was given, from 0; what could not be scored comes last
    scores: list[float | None] = []  # as given; null: could not be scored


@tool(title="List reward models", hints=READS)
def rl_list_reward_models(caller: Caller) -> RewardModels:
    """List the reward models on this machine: trained by runs, or put into the store."""
    found = [_entry(folder, run_id) for folder, run_id in _folders()]
    path = found[0]["model"] if found else None
    follow = worded("rl_edit_config", "reward_model_path", path) if path else "rl_train_reward_model(dry_run=true)"
    return RewardModels(reward_models=found[:MOST_LISTED], count=len(found), next=follow)


@tool(title="Evaluate a reward model", hints=Hints())
async def rl_evaluate_reward_model(
    caller: Caller,
    model: Annotated[Model | None, Field(description="needed, unless evaluation_id is given")] = None,
    data: Annotated[str | None, Field(description="file of held-out preferences: prompt, chosen, rejected")] = None,
    evaluation_id: EvaluationId = None,
    wait_s: WaitSeconds = 45,
) -> RewardEvaluated:
    """Measure how often a reward model prefers the better of two answers, overall and by kind, on held-out pairs."""
    ends_at = time.monotonic() + wait_s
    if evaluation_id is None:
        if not model or not data:
            raise UserError("model and data are needed.", "", 'rl_evaluate_reward_model(model="...", data="...")')
        file = Path(data).expanduser()
        place = str(file.absolute()) if file.exists() else data
        folder = await asyncio.to_thread(_start, RewardRequest(model=_place(model), data=place))
    else:
        folder = _find(evaluation_id)
    await until_ended(folder, ends_at)
    return RewardEvaluated(**await asyncio.to_thread(_answer, folder, "rl_evaluate_reward_model", _figures))


@tool(title="Rank completions", hints=Hints(), arguments=LongArguments)
async def rl_rank_completions(
    caller: Caller,
    model: Annotated[Model | None, Field(description="needed, unless evaluation_id is given")] = None,
    completions: Annotated[list[str] | None, Field(max_length=MOST_COMPLETIONS, description="two or more")] = None,
    prompt: Annotated[str | None, Field(description="what they answer")] = None,
    evaluation_id: EvaluationId = None,
    wait_s: WaitSeconds = 45,
) -> Ranked:
    """Order answers to one prompt by a reward model, the best first."""
    ends_at = time.monotonic() + wait_s
    if evaluation_id is None:
        if not model or not completions or len(completions) < 2:
            raise UserError("model and two completions are needed.", "", "rl_list_reward_models()")
        request = RewardRequest(model=_place(model), prompt=prompt, completions=tuple(completions))
        folder = await asyncio.to_thread(_start, request)
    else:
        folder = _find(evaluation_id)
    await until_ended(folder, ends_at)
    return Ranked(**await asyncio.to_thread(_answer, folder, "rl_rank_completions", _ranking))


def request_in(folder: TestFolder) -> RewardRequest:
    """What was asked in this folder."""
    return msgspec.json.decode((folder.path / "request.json").read_bytes(), type=RewardRequest)


def _folders() -> list[tuple[ModelFolder, str | None]]:
    """With the run that trained it, where one did."""
    places = [(run.path / RESULT, run.run_id) for run in list_runs() if (run.path / RESULT).is_dir()]
    places += [(folder, None) for _, folder in stored_models(environ.home() / "models")]
    found = list[tuple[ModelFolder, str | None]]()
    for place, run_id in places:
        try:
            found.append((read_model_folder(place), run_id))
        except HalteresError:  # a base model, or a training that has not ended
            continue
    return found


def _entry(folder: ModelFolder, run_id: str | None) -> dict[str, Any]:
    facts = folder.facts
    metrics = facts.get("metrics") or {}
    entry: dict[str, Any] = {"model": str(folder.path), "run_id": run_id, "base": folder.base}
    entry["figures"] = {name: rounded(metrics[name]) for name in _METRICS if name in metrics}
    entry["num_rows"] = (facts.get("data") or {}).get("rows")
    entry["calibrated"] = bool(facts.get("calibration"))
    return {name: value for name, value in entry.items() if value not in (None, {})}


def _place(model: str) -> str:
    """An address as it is; the folder of a run's model; else a folder that must be one of a reward model."""
    if model.startswith(("http://", "https://")):
        return model
    trained = {run_id: folder.path for folder, run_id in _folders() if run_id}
    return str(trained.get(model) or read_model_folder(model).path)


def _start(request: RewardRequest) -> TestFolder:
    keys = (environ.REWARD_KEY,) if "://" in request.model else ()
    folder = begin("r", MODULE, lambda folder: folder.write("request.json", msgspec.to_builtins(request)), *keys)
    return folder


def _find(evaluation_id: str) -> TestFolder:
    folder = TestFolder(tests_home() / evaluation_id)
    if re.fullmatch(r"r-[0-9a-f]{8}", evaluation_id) and (folder.path / "request.json").is_file():
        return folder
    raise NotFound(f"There is no evaluation '{evaluation_id}'.", "Answers name them.", "rl_list_reward_models()")


def _answer(
    folder: TestFolder, name: str, figures_of: Callable[[TestFolder, Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    phase, result = folder.phase(), folder.result() or {}
    body = {"evaluation_id": folder.test_id, "status": "failed" if phase == "lost" else phase}
    body["model"] = request_in(folder).model
    if phase == "running":
        return {**body, "next": worded(name, evaluation_id=folder.test_id, wait_s=45)}
    if phase != "done":
        error, code = result.get("error", LOST), result.get("code", "process_exited")
        return {**body, "error": error, "code": code, "next": f"read {folder.path / 'tester.log'}, mend it"}
    return {**body, **figures_of(folder, result)}


def _figures(folder: TestFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {kind: _pairs(of_kind) for kind, of_kind in result["by_kind"].items()}
    figures = {**_pairs(result["overall"]), "by_kind": kinds, "warnings": result["warnings"][:6]}
    path = request_in(folder).model
    return {**figures, "files": str(folder.path), "next": worded("rl_edit_config", "reward_model_path", path)}


def _pairs(figures: Mapping[str, Any]) -> dict[str, Any]:
    accuracy = figures["accuracy"]
    interval = [rounded(accuracy["low"]), rounded(accuracy["high"])]
    return {"accuracy": rounded(accuracy["value"]), "interval": interval, "num_pairs": accuracy["count"]}


def _ranking(folder: TestFolder, result: Mapping[str, Any]) -> dict[str, Any]:
    scores = [None if score is None else rounded(score) for score in result["scores"]]
    return {"order": result["order"], "scores": scores, "next": "rl_list_reward_models()"}
