"""Runs where GEM is installed: plays the episodes of a file with GEM's games and writes what came
of them.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import gem
import gem.envs  # registers the games
import nltk

nltk.download = lambda *_, **__: True  # the words are there: NLTK_DATA


@functools.cache
def made(id: str, **parameters: Any) -> Any:
    """GEM cannot make FifteenPuzzle's random level: its size is used before it is drawn."""
    if id != "game:FifteenPuzzle-v0-random":
        return gem.make(id, **parameters)
    env = gem.make("game:FifteenPuzzle-v0-easy", **parameters)
    env._is_random = True
    return env


def play(episode: dict[str, Any]) -> list[Any]:
    """[observation, suffix] of the reset, then [observation, reward, terminated, truncated, suffix]
    of each step.
    """
    env = made(episode["id"], **episode["parameters"])
    observation, info = env.reset(seed=episode["seed"])
    transcript: list[Any] = [[observation, info.get("suffix")]]
    for action in episode["actions"]:
        try:
            *result, info = env.step(action)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what came of the action
            transcript.append(["raised", type(error).__name__])
        else:
            transcript.append([*result, info.get("suffix")])
    return transcript


if __name__ == "__main__":
    asked, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps([play(episode) for episode in json.loads(asked.read_text())]))
