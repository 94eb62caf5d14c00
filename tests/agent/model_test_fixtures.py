"""Environments to test, a home to test them in, and looking at what a test leaves behind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

from halteres.agent.call import Reply, call
from halteres.agent.drafts import choose
from halteres.agent.tool import Caller

BUDGET = 900  # tokens of an answer

ENVIRONMENT = '''
"""Is it so?"""

import asyncio
import os
import sys
import time

from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv


class Mine(SingleTurnEnv):
    """Says yes or no."""

    name = "mine"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=4, max_new_tokens=32, max_token_length=64), [APIServerConfig()]

    async def get_next_item(self):
        return {"question": f"Is {self.rng.randint(0, 3)} a number?"}

    def prompt(self, item):
        return f"Question: {item['question']} Say yes or no."

    def score(self, item, text):
        SCORE


if __name__ == "__main__":
    Mine.cli()
'''

YES = "return float(text.startswith('yes'))"


def write_environment(folder: Path, score: str = YES) -> Path:
    file = folder / "mine.py"
    file.write_text(dedent(ENVIRONMENT).replace("SCORE", score.replace("\n", "\n        ")))
    return file


def draft(environment: Path | str, **changes: Any) -> None:
    """Select it; the scripted engine stands in for weights."""
    choose(Caller(), None, str(environment), {"inference.engine": "scripted", **changes})


async def replied(**arguments: Any) -> Reply:
    """The answer to rl_test_inference; it is JSON, within its budget, and says what to do next, in
    one line.
    """
    reply = await call("rl_test_inference", arguments, Caller())
    text = json.dumps(reply.body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    assert len(text) / 4 <= BUDGET, text
    assert reply.body["next"]
    assert "\n" not in reply.body["next"]
    return reply


async def answered(**arguments: Any) -> dict[str, Any]:
    """The answer to a call that succeeds."""
    reply = await replied(**arguments)
    assert not reply.failed, reply.body
    return reply.body


def processes(*, naming: str) -> Iterator[Path]:
    """/proc folders of living processes that name this in their command line or their working
    directory.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            told = (folder / "cmdline").read_text() + os.readlink(folder / "cwd")
        except OSError:
            continue
        if state not in "ZX" and naming in told and int(folder.name) != os.getpid():
            yield folder


def cmdline(process: Path) -> str:
    """Of a process that may have ended meanwhile."""
    return _told(process / "cmdline").replace("\0", " ")


def environment_of(process: Path) -> str:
    """Its variables, as it was started with them."""
    return _told(process / "environ")


def _told(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def files_with(secret: str, home: Path) -> list[Path]:
    """Files below this folder that hold the text."""
    return [
        file for file in home.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()
    ]
