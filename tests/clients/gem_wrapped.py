"""Runs where GEM is installed: plays one game within each list of wrappers and writes what the
policy would see.

Usage: gem_wrapped.py ASKED ANSWERED, both JSON; the address of a search server is in SEARCH_URL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gem
import gem.envs  # registers the games
from gem.wrappers.wrapper_factory import get_wrapper_fns


class Markup:
    """As the chat template of the tests, by the name that GEM calls."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        opened = "<assistant>" if add_generation_prompt else ""
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages) + opened


def play(asked: dict[str, Any], names: str) -> list[Any]:
    """Two resets, and the steps of the first episode."""
    env = gem.make(asked["id"])
    for wrapper in get_wrapper_fns(names, tokenizer=Markup()):
        env = wrapper(env)
    return [
        env.reset(seed=asked["seed"]),
        *(env.step(action) for action in asked["actions"]),
        env.reset(seed=asked["seed"]),
    ]


if __name__ == "__main__":
    asked, answered = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    answered.write_text(json.dumps({names: play(asked, names) for names in asked["wrappers"]}))
