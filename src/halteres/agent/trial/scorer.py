"""The process that scores given texts: `python -m halteres.agent.trial.scorer CONFIG ASKED FILE CLASS`.

Owns: which task the texts answer; one JSON object on stdout.
Never: samples a model; runs in a process that holds a key beside those of the environment's own judges and reward
servers: it executes the environment's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres import process
from halteres.agent.trial.asker import NOT_KNOWN, Scoring, environment_of
from halteres.agent.trial.outcome import reference_of
from halteres.environments.commands import author_error
from halteres.environments.single_turn import SingleTurnEnv
from halteres.environments.work import Items
from halteres.errors import EnvironmentFailed, HalteresError, NotFound
from halteres.rewards.checking import odd_answers


async def score(env: SingleTurnEnv, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Score the `completions` of ASKED, or the odd answers where there are none, as answers to its `prompt`.

    Raises:
        NotFound: none of the environment's tasks asks this prompt. EnvironmentFailed: there is no task.
    """
    scoring = Scoring(env)
    item = await _task(env, scoring, asked.get("prompt"))
    prompt, reference = str(env.messages(item)[-1]["content"]), reference_of(item)
    texts = asked.get("completions")
    named = enumerate(texts) if texts is not None else odd_answers(prompt, reference).items()
    scores = [{"of": name, **await scoring.judged(item, text)} for name, text in named]
    return {"prompt": prompt, "reference": reference, "scores": scores}


async def _task(env: SingleTurnEnv, scoring: Scoring, prompt: str | None) -> Any:
    """The task that asks this, word for word; without a prompt the first of training."""
    if prompt is not None:
        await scoring.prepare()
        item = scoring.task(prompt)
        if item is None:
            raise NotFound(f"{env.title} cannot score answers to this prompt.", f"It is unknown: {NOT_KNOWN}.")
        return item
    await env.setup()
    drawn = await Items(env).next()
    if drawn is None:
        raise EnvironmentFailed(f"{env.title} has no task.", "get_next_item gave none.")
    return drawn.item


async def _run(config: Path, asked: Mapping[str, Any], file: Path, class_name: str) -> dict[str, Any]:
    env = environment_of(config, file, class_name)
    try:
        if not isinstance(env, SingleTurnEnv):
            raise EnvironmentFailed(f"{env.title} cannot score a text by itself.", "It scores whole episodes.")
        return await score(env, asked)
    finally:
        await env.server.close()


def main() -> int:
    """Exit code 0, or 1 with one sentence on stderr."""
    process.begin("env", torch=True)
    config, asked, file, class_name = sys.argv[1:]
    answers = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = asyncio.run(_run(Path(config), json.loads(Path(asked).read_bytes()), Path(file), class_name))
    except HalteresError as error:
        sentence = error.sentence
    except Exception as error:  # noqa: BLE001 - the environment's file runs here; its failure is the answer
        sentence = author_error(Path(file), "score", error).sentence
    else:
        answers.write(json.dumps(result) + "\n")
        return 0
    sys.stderr.write(f"error: {' '.join(sentence.split())}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
