"""The process that plays one text environment of another package, by the Python that has it: no import of ours.

    python text_gym_worker.py MODULE:FUNCTION ID OPTIONS

Owns: the environment that `MODULE.FUNCTION(ID, **OPTIONS)` made; one line of JSON for each line of JSON.
Never: holds two environments: packages that draw from their process's own generators would disturb each other.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

LONGEST_ERROR = 2000
"""Characters of an exception's text."""


def main() -> None:
    """Say that the environment is there, or why not; then play until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def send(make: Callable[[], Mapping[str, Any]]) -> None:
        try:
            reply = json.dumps(make())
        except Exception as error:  # noqa: BLE001 - whatever the environment raises reaches the parent
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]})
        answers.write(reply + "\n")
        answers.flush()

    made: list[Any] = []
    send(lambda: made.append(make(*sys.argv[1:4])) or {})
    for line in sys.stdin:
        asked = json.loads(line)
        send(lambda asked=asked: play(made[0], asked))


def make(entry: str, id: str, options: str) -> Any:
    """The environment, without a wrapper that keeps what belongs to it."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(id, **json.loads(options))


def play(env: Any, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """A reset to a seed, or a step with an action."""
    if "seed" in asked:
        observation, info = env.reset(seed=asked["seed"])
        return {"observation": text_of(observation), **beside(info)}
    observation, reward, terminated, truncated, info = env.step(asked["action"])
    ends = {"terminated": bool(terminated), "truncated": bool(truncated)}
    return {"observation": text_of(observation), "reward": float(reward), **ends, **beside(info)}


def text_of(observation: Any) -> str:
    """TypeError where the environment does not speak in texts."""
    if not isinstance(observation, str):
        raise TypeError(f"its observation is of type {type(observation).__name__}, not a text")
    return observation


def beside(info: Any) -> Mapping[str, str]:
    """What is shown in front of and behind an observation, as GEM says it."""
    info = info if isinstance(info, Mapping) else {}
    return {name: str(info.get(name, "")) for name in ("prefix", "suffix")}


if __name__ == "__main__":
    main()
