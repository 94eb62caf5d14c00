"""Environments to select, and calls as an agent makes them."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.call import Reply, call
from halteres.agent.tool import Caller

QUIZ = """
    from typing import Annotated, Literal

    from pydantic import Field

    from halteres.environments.base import BaseEnv
    from halteres.environments.config import APIServerConfig, BaseEnvConfig

    class QuizConfig(BaseEnvConfig):
        level: Annotated[int, Field(ge=1, le=9, description="how hard")] = 1
        topics: list[str] = Field(default_factory=lambda: ["history"])
        style: Literal["plain", "witty"] = "plain"
        hint: str | None = None
        loss: float = 0.5

    class Quiz(BaseEnv):
        '''Asks questions.'''
        name = "quiz"

        @classmethod
        def config_init(cls):
            return QuizConfig(group_size=8, batch_size=64, level=3, max_new_tokens=32), [APIServerConfig()]

    if __name__ == "__main__":
        Quiz.cli()
"""


def quiz(factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quiz, at one place for all tests: it is asked to describe itself once."""
    place = factory.getbasetemp() / "quiz"
    file = place / "environments" / "quiz.py"
    if not file.exists():
        place.mkdir()
        environment(place, "quiz", QUIZ)
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", str(file.parent))
    return file


def environment(home: Path, name: str, text: str) -> Path:
    """A file in the home's folder of environments."""
    folder = home / "environments"
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(textwrap.dedent(text))
    return file


async def reply(tool: str, draft_of: str = "mine", /, **arguments: Any) -> Reply:
    """What a call comes to, whoever makes it."""
    answer = await call(tool, arguments, Caller(draft=draft_of))
    assert "next" in answer.body
    assert "\n" not in answer.body["next"]
    json.dumps(answer.body, allow_nan=False)
    return answer


async def told(tool: str, draft_of: str = "mine", /, **arguments: Any) -> dict[str, Any]:
    """The answer to a call that succeeds."""
    answer = await reply(tool, draft_of, **arguments)
    assert not answer.failed, answer.body
    return answer.body


async def refused(tool: str, draft_of: str = "mine", /, **arguments: Any) -> dict[str, Any]:
    """The answer to a call that fails."""
    answer = await reply(tool, draft_of, **arguments)
    assert answer.failed, answer.body
    assert isinstance(answer.body["error"], str)
    return answer.body


def tokens(body: dict[str, Any]) -> float:
    """Length of an answer as the budgets count it."""
    return len(json.dumps(body, separators=(",", ":"))) / 4
