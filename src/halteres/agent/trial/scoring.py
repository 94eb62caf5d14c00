"""The tool that tries a scorer on given texts, rl_score; and the odd answers that every test tries by itself.

Owns: running the scorer's process within its time, its answer, the sentences for what odd answers brought to light.
Never: executes an environment's file (`scorer` does, in a process of its own), samples a model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from halteres.agent.drafting import drafts
from halteres.agent.fitting import shortened
from halteres.agent.tool import READS, Caller, Draft, LongArguments, Result, tool
from halteres.agent.trial.environment_config import character_tokenizer
from halteres.agent.trial.request import Request
from halteres.config.discovery import read_environment
from halteres.config.program import EnvironmentProgram, describe, program_of
from halteres.config.sandboxed_process import run_caught
from halteres.config.settings import ENV_WIRING
from halteres.errors import EnvironmentFailed
from halteres.models import model_folder
from halteres.rewards.checking import ALLOWED
from halteres.rewards.components import secret_variables
from halteres.runs.starting.base_model import models_home

WITHIN_S = 45.0
"""How long an environment may take to load its tasks and score."""

ODD_WITHIN_S, LONGEST_ODD = 30.0, 160
"""Likewise for the odd answers of a test, which does not depend on them; characters of why one has no score."""

ECHOED, LONGEST_ECHO, LONGEST_PROMPT = 8, 60, 240
"""Texts of a call that are told back with their scores; characters of one, and of the prompt."""


class Scored(Result):
    """What an environment gives for texts."""

    environment: str
    prompt: str  # the task that the texts answer
    reference: str = ""  # its right answer, where the task has a field for it
    scores: list[dict[str, Any]]  # in the order given: completion, score; null with a note where the scorer failed
    success_above: float  # a score above it counts as right


@tool(title="Score texts", hints=READS, arguments=LongArguments)
def rl_score(
    caller: Caller,
    completions: Annotated[list[str], Field(min_length=1, max_length=32, description="texts as a model would answer")],
    environment: Annotated[str | None, Field(description="name or file; default: your draft's", max_length=500)] = None,
    prompt: Annotated[
        str | None, Field(description="the task they answer: its question, word for word; default: the first task")
    ] = None,
    draft: Draft = None,
) -> Scored:
    """Try an environment's scorer on texts of your own, without a model: is the right answer paid, is a cheat not?

    Tells the task and, where it has one, its right answer. An empty completion is a text too.
    """
    chosen = drafts.Draft(handle="score", environment=environment) if environment else drafts.load_draft(caller, draft)
    settings = chosen.resolve().settings
    program = program_of(settings.run)
    described = describe(program, {name: value for name, value in settings.env.items() if name not in ENV_WIRING})
    if described.is_foreign:
        raise EnvironmentFailed(f"{program.name} cannot score a text by itself.", "It is written for atroposlib.")
    asked = {"completions": completions, "prompt": prompt}
    folder = model_folder(settings.inference.model, models_home())
    found = scored(program, {**settings.env, "seed": settings.run.seed}, str(folder or ""), asked)
    return Scored(
        environment=program.name,
        prompt=shortened(found["prompt"], LONGEST_PROMPT),
        **({"reference": shortened(found["reference"], LONGEST_PROMPT)} if found["reference"] else {}),
        scores=[_score(row, completions) for row in found["scores"]],
        success_above=settings.run.success_threshold,
        next="rl_test_inference()",
    )


def _score(row: Mapping[str, Any], completions: list[str]) -> dict[str, Any]:
    echo = {"completion": shortened(completions[row["of"]], LONGEST_ECHO)} if len(completions) <= ECHOED else {}
    note = {"note": shortened(row["note"], LONGEST_PROMPT)} if "note" in row else {}
    return {**echo, "score": row["score"], **note}


def scored(
    program: EnvironmentProgram,
    env: Mapping[str, Any],
    tokenizer: str,
    asked: Mapping[str, Any],
    within_s: float | None = None,
) -> dict[str, Any]:
    """What the scorer's process says: prompt, reference, scores (see `scorer.score`).

    Args:
        program: an environment of ours.
        env: its settings.
        tokenizer: folder of the base model; empty: it is not here.
        asked: `completions` (none: the odd answers), `prompt`.
        within_s: how long it may take; None: WITHIN_S.

    Raises:
        EnvironmentFailed: it cannot score texts, or not in time.
    """
    within_s = within_s or WITHIN_S
    declared = read_environment(program.path)
    with tempfile.TemporaryDirectory(prefix="halteres-score-") as name:
        folder = Path(name)
        wired = {"tokenizer_name": tokenizer or str(character_tokenizer(folder / "characters")), "use_wandb": False}
        values = json.loads(json.dumps({**env, **wired}, default=str))
        (folder / "config.yaml").write_text(yaml.safe_dump({"env": values}))
        (folder / "asked.json").write_text(json.dumps(dict(asked)))
        files = (str(folder / "config.yaml"), str(folder / "asked.json"), str(program.path))
        command = (program.interpreter, "-m", "halteres.agent.trial.scorer", *files)
        command += (declared.class_name if declared else "",)
        try:
            ended = run_caught(command, program.working_directory, within_s, secret_variables(env))
        except TimeoutError:
            raise EnvironmentFailed(f"{program.path} did not score within {within_s:g} s.") from None
    if ended.code != 0:
        last = (ended.err.strip().splitlines() or ["It said nothing."])[-1].removeprefix("error: ")
        raise EnvironmentFailed(f"{program.path} cannot score these texts.", last)
    return json.loads(ended.out.strip().splitlines()[-1])


def odd_scores(request: Request) -> dict[str, Any]:
    """What the scorer of a tested environment gives for odd answers: name -> score, or why there is none. Empty where
    it cannot be tried so: it scores episodes, it is atroposlib's, it has no time."""
    if request.is_foreign or request.prompts:
        return {}
    within_s, tokenizer = min(ODD_WITHIN_S, request.model_within_s), request.candidates[0].tokenizer
    try:
        found = scored(request.program, request.env, tokenizer, {}, within_s)
    except EnvironmentFailed:
        return {}
    return {
        row["of"]: shortened(row["note"], LONGEST_ODD) if "note" in row else row["score"] for row in found["scores"]
    }


def odd_caveats(scores: Mapping[str, Any], success_above: float) -> list[str]:
    """What is wrong with a scorer, by its scores of odd answers (name -> score, or why there is none)."""
    paid = [name for name, score in scores.items() if isinstance(score, int | float) and score > success_above]
    failed = {name: score for name, score in scores.items() if isinstance(score, str)}
    wrong = [name for name in paid if name not in ALLOWED]
    said = [f"its scorer pays for answers that say nothing ({', '.join(wrong)})"] if wrong else []
    if failed:
        first = next(iter(failed))
        said.append(f"its scorer fails on odd answers ({', '.join(failed)}: {failed[first]})")
    return said
