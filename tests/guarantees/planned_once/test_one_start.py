"""A start reads its settings once, and asks its environment and the GPU's driver once, whichever
way it is called.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halteres.agent import drafts, start_training
from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.cli.main import app
from halteres.config import resolution
from halteres.config.resolution import Resolved
from halteres.runs import start
from halteres.runs.planning import plan as planning
from halteres.runs.planning import resources

ENVIRONMENT = '''
from pathlib import Path

from halteres.environments.base import BaseEnv
from halteres.environments.config import BaseEnvConfig

ASKED = Path(__file__).with_suffix(".asked")


class Config(BaseEnvConfig):
    difficulty: int = 1
    words: str = ""


class Counted(BaseEnv):
    """Counts how often it is asked."""

    config_cls = Config

    @classmethod
    def config_init(cls):
        with ASKED.open("a") as file:
            file.write("asked\\n")
        return Config(group_size=4, batch_size=8), []


if __name__ == "__main__":
    Counted.cli()
'''

# A supervisor that ends at once: what is counted has happened by then.
IDLE = (sys.executable, "-S", "-c", "pass")


class Counts:
    """How often each was called."""

    def __init__(self, environment: Path) -> None:
        self.environment = environment
        self.resolved = self.planned = 0

    @property
    def asked(self) -> int:
        """Processes of the environment that described themselves."""
        file = self.environment.with_suffix(".asked")
        return len(file.read_text().splitlines()) if file.exists() else 0

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            setattr(self, name, getattr(self, name) + 1)
            return function(*arguments, **options)

        return counted


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counts:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "HERMES_HOME"):
        monkeypatch.delenv(name, raising=False)
    environment = tmp_path / "counted.py"
    environment.write_text(ENVIRONMENT)
    found = Counts(environment)
    resolve = found.counting("resolved", resolution.resolve_settings)
    for module in (resolution, drafts, start_training):
        monkeypatch.setattr(module, "resolve_settings", resolve)
    plan = found.counting("planned", planning.plan_run)
    idle = functools.partial(start.start_run, supervisor=IDLE)
    for module in (planning, start_training):
        monkeypatch.setattr(module, "plan_run", plan)
    for module in (start, start_training):
        monkeypatch.setattr(module, "start_run", idle)
    return found


async def started(**arguments: Any) -> None:
    body = (await call("rl_start_training", arguments, Caller())).body
    assert "error" not in body, body


async def test_a_start_asks_the_driver_of_the_gpu_once(
    counts: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes up to some seconds: where the model fits is seen from it, and whose speed
    is remembered.
    """
    asked = tmp_path / "asked"
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho asked >> {asked}\necho "NVIDIA H200, 143771, 143156"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(resources.importlib.metadata, "version", lambda package: "2.13.0")
    monkeypatch.setenv("HALTERES_DEVICE", "cuda")
    await started(environment=str(counts.environment))
    assert asked.read_text().splitlines() == ["asked"]


async def test_a_start_that_selects_and_edits_resolves_and_asks_once(counts: Counts) -> None:
    changes = {"difficulty": 2, "trainer.total_steps": 4, "words": "a: b"}
    await started(environment=str(counts.environment), changes=changes)
    assert (counts.resolved, counts.planned, counts.asked) == (1, 1, 1)


async def test_a_start_of_an_edited_draft_resolves_and_plans_once(counts: Counts) -> None:
    changes = {"difficulty": 2}
    await call(
        "rl_select_environment",
        {"name": str(counts.environment), "changes": changes},
        Caller(),
    )
    counts.resolved = 0
    await started()
    assert (counts.resolved, counts.planned) == (1, 1)
    assert counts.asked == 1, "what it said when it was selected holds"


async def test_a_start_that_edits_its_draft_resolves_once(counts: Counts) -> None:
    await call("rl_select_environment", {"name": str(counts.environment)}, Caller())
    counts.resolved = 0
    await started(changes={"difficulty": 3})
    assert (counts.resolved, counts.planned, counts.asked) == (1, 1, 2)


async def test_a_rehearsal_resolves_and_plans_once(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "estimate", lambda *_, **__: None)
    await started(environment=str(counts.environment), dry_run=True)
    assert (counts.resolved, counts.planned, counts.asked) == (1, 1, 1)


@pytest.mark.parametrize("edit", ["difficulty=2", "words=a: b", "env.words=0123"])
def test_a_start_by_command_resolves_and_asks_once(counts: Counts, edit: str) -> None:
    command = ["train", str(counts.environment), "--set", edit, "--detach"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (counts.resolved, counts.planned) == (1, 1)
    # A text that looks like something else than the setting is, is asked about again.
    assert counts.asked == (2 if edit.endswith("0123") else 1)


def test_the_defaults_are_those_of_settings_that_nobody_changed(counts: Counts) -> None:
    """They come from the same answer as the settings, and are not asked for."""
    edits = ["difficulty=5", "group_size=2", "trainer.total_steps=3"]
    changed: Resolved = resolution.resolve_settings(str(counts.environment), None, edits)
    unchanged: Resolved = resolution.resolve_settings(str(counts.environment), None, [])
    assert changed.defaults == unchanged.defaults
    assert {key: changed.defaults[key] for key in ("env.difficulty", "env.group_size")} == {
        "env.difficulty": 1,
        "env.group_size": 4,
    }
