"""The process in which another package's environment runs: its Python may have none of Halteres, so
nothing of it is imported here, and its limits and its death are its parent's (`worker_process`).

    python gym_worker.py reasoning TASK SETTINGS            a task of reasoning-gym: its questions
                                                            and scores
    python gym_worker.py text MODULE:FUNCTION ID OPTIONS    the environment that MODULE.FUNCTION(ID,
                                                            **OPTIONS) makes

It answers questions by `worker_loop`. It holds one environment: packages that draw from their
process's own generators would disturb each other. What a task expects as its answer is never said.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halteres.environments.worker_loop import Answer, serve
else:
    # the file next to this one: there may be no package
    from worker_loop import Answer, serve

UNREADABLE: Mapping[str, tuple[type[Exception], ...]] = {
    "boxnet": (AttributeError, IndexError, TypeError),  # JSON that is no list of plans
    "coin_flip": (OverflowError,),  # a number that no float holds
    "game_of_life": (KeyError,),  # JSON that is no grid
    "prime_factorization": (ValueError,),  # no whole numbers
}
"""What scorers of reasoning-gym 0.1.25 raise at a text that they cannot read; the other scorers
read any text.
"""


def main() -> None:
    """Answer questions about the environment that the arguments name."""
    kind, *arguments = sys.argv[1:]
    start = {"reasoning": reasoning_task, "text": text_environment}[kind]
    serve(lambda opening: start(*arguments))


def reasoning_task(name: str, settings: str) -> Answer:
    """A data set of reasoning-gym. ImportError where there is no package, ValueError where there is
    no such task.
    """
    given = json.loads(settings)
    if name == "composite":
        spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
        given["datasets"] = [
            spec(**{"weight": 1.0, "config": {}, **one}) for one in given.get("datasets", ())
        ]
    data = importlib.import_module("reasoning_gym").create_dataset(name, **given)
    entries: dict[int, Any] = {}  # some take seconds to make, and every answer to one asks for it

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        index = question["index"]
        if index not in entries:
            entries[index] = data[index]
        entry = entries[index]
        task = entry["metadata"].get("source_dataset", name)
        if "answer" not in question:
            return {"question": entry["question"], "task": task}
        return {"score": score(data, task, question["answer"], entry)}

    return answer


def score(data: Any, task: str, answer: str | None, entry: Mapping[str, Any]) -> float:
    """What the task pays for an answer; what it pays for none where it cannot read it."""
    try:
        return float(data.score_answer(answer, entry))
    except UNREADABLE.get(task, ()):
        # Is it the text? Then the same scorer reads another one for the same item: the stored
        # answer or, of boxnet, which stores none, an empty plan.
        readable = entry["answer"]
        if readable is None:
            readable = "[]"
        data.score_answer(readable, entry)
        return float(data.score_answer(None, entry))


def text_environment(entry: str, id: str, options: str) -> Answer:
    """An environment with GEM's or Gymnasium's interface. TypeError where it does not speak in
    texts.
    """
    module, _, function = entry.partition(":")
    env: Any = getattr(importlib.import_module(module), function)(id, **json.loads(options))

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        played: dict[str, Any] = {}
        if "seed" in question:
            observation, info = env.reset(seed=question["seed"])
        else:
            observation, reward, terminated, truncated, info = env.step(question["action"])
            played = {
                "reward": float(reward),
                "terminated": bool(terminated),
                "truncated": bool(truncated),
            }
        if not isinstance(observation, str):
            raise TypeError(f"its observation is of type {type(observation).__name__}, not a text")
        # What is shown in front of and behind an observation, as GEM says it.
        beside = {
            name: str(info.get(name, "")) if isinstance(info, Mapping) else ""
            for name in ("prefix", "suffix")
        }
        return {"observation": observation, **played, **beside}

    return answer


if __name__ == "__main__":
    main()
