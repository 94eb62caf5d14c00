"""The few settings that a look at a run needs, whatever version of us wrote them.

Owns: reading those, and nothing else, from settings.json.
Never: validates the settings of a run (`RunDirectory.settings` does).
"""

from __future__ import annotations

from typing import Any

import msgspec

from halteres.config import environ
from halteres.files import NOT_JSON, read_regular
from halteres.runs.directory import RunDirectory


class GivenRun(msgspec.Struct, frozen=True, kw_only=True):
    """Section `run`."""

    wandb_project: str | None = None
    wandb_entity: str | None = None

    @property
    def project(self) -> str:
        """As `RunSettings.project`."""
        return self.wandb_project or environ.wandb_project()


class GivenTrainer(msgspec.Struct, frozen=True, kw_only=True):
    """Section `trainer`."""

    eval_every: int = 0
    learning_rate: float | None = None


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What was given."""

    run: GivenRun = GivenRun()
    env: dict[str, Any] = {}
    trainer: GivenTrainer = GivenTrainer()


def read_given(run: RunDirectory) -> Given:
    """The run's settings, as far as they matter here; nothing was given where they cannot be read."""
    try:
        return msgspec.json.decode(read_regular(run.path / "settings.json"), type=Given)
    except (OSError, *NOT_JSON):
        return Given()
