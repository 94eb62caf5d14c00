"""The tool that tries a scorer on given texts, rl_score; and the odd answers that every test tries by itself.

No environment's file is executed here: `answering` does that, in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from halteres.agent.drafting import drafts
from halteres.agent.tool import READS, Caller, Draft, LongArguments, Result, tool
from halteres.agent.trial.request import Request
from halteres.agent.truncation import nonempty, shortened
from halteres.config.discovery import read_environment
from halteres.config.program import EnvironmentProgram
from halteres.config.sandboxed_process import run_caught
from halteres.errors import EnvironmentFailed
from halteres.models import TINY, builtin_path, model_folder
from halteres.rewards.components import secret_variables
from halteres.runs.starting.base_model import models_home

WITHIN_S = 45.0  # how long an environment may take to load its tasks and score
ODD_WITHIN_S, LONGEST_ODD = 30.0, 160
"""Likewise for the odd answers of a test, which does not depend on them; characters of why one has no score."""

ECHOED, LONGEST_ECHO, LONGEST_PROMPT = 8, 60, 240
"""Texts of a call that its answer repeats with their scores; characters of one, and of the prompt."""


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
    program, description, env = drafts.described(settings)
    if description.is_foreign:
        raise EnvironmentFailed(f"{program.name} cannot score a text by itself.", "It is written for atroposlib.")
    tokenizer = str(model_folder(settings.inference.model, models_home()) or "")
    found = scored(program, env, tokenizer, {"completions": completions, "prompt": prompt})
    return Scored(
        environment=program.name,
        prompt=shortened(found["prompt"], LONGEST_PROMPT),
        **nonempty(reference=shortened(found["reference"], LONGEST_PROMPT)),
        scores=[
            {
                **({"completion": shortened(text, LONGEST_ECHO)} if len(completions) <= ECHOED else {}),
                "score": row["score"],
                **({"note": shortened(row["note"], LONGEST_PROMPT)} if "note" in row else {}),
            }
            for text, row in zip(completions, found["scores"], strict=True)
        ],
        success_above=settings.run.success_threshold,
        next="rl_test_inference()",
    )


def scored(
    program: EnvironmentProgram,
    env: Mapping[str, Any],
    tokenizer: str,
    job: Mapping[str, Any],
    within_s: float | None = None,
) -> dict[str, Any]:
    """What the scorer's process says: prompt, reference, scores (`of` a text's place or an odd answer's name, score,
    note).

    Args:
        program: an environment of ours.
        env: its settings.
        tokenizer: folder of the base model; empty: it is not here.
        job: `completions` (none: the odd answers), `prompt`.
        within_s: how long it may take; None: WITHIN_S.

    Raises:
        EnvironmentFailed: it cannot score texts, or not in time.
    """
    within_s, declared = within_s or WITHIN_S, read_environment(program.path)
    with tempfile.TemporaryDirectory(prefix="halteres-score-") as name:
        config, question = Path(name, "config.yaml"), Path(name, "job.json")
        tokenizer = tokenizer or str(character_tokenizer(Path(name, "characters")))
        values = json.loads(json.dumps({**env, "tokenizer_name": tokenizer, "use_wandb": False}, default=str))
        config.write_text(yaml.safe_dump({"env": values}))
        question.write_text(json.dumps(dict(job)))
        command = (program.interpreter, "-m", "halteres.agent.trial.answering", str(config), str(question))
        command += (str(program.path), declared.class_name if declared else "")
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
    if request.program.is_foreign or request.prompts:
        return {}
    within_s, tokenizer = min(ODD_WITHIN_S, request.model_within_s), request.models[0].tokenizer
    try:
        rows = scored(request.program, request.env, tokenizer, {}, within_s)["scores"]
    except EnvironmentFailed:
        return {}
    return {row["of"]: shortened(row["note"], LONGEST_ODD) if "note" in row else row["score"] for row in rows}


def character_tokenizer(folder: Path) -> Path:
    """Make a tokenizer folder in which every byte of a text is a token: the built-in model's, without its merges."""
    source = builtin_path(TINY)
    assert source is not None, "it is part of the package"  # noqa: S101 - for the type checker
    folder.mkdir()
    whole = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"] for token in whole["added_tokens"]}
    vocabulary = {text: number for text, number in whole["model"]["vocab"].items() if len(text) == 1 or text in special}
    whole["model"] |= {"vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    return folder
