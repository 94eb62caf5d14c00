"""The run directory as the trainer sees it: files that it reads (settings, wiring, stop requests)
and that it writes (metrics, events, checkpoints, its failure).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from halteres.config.settings import Settings
from halteres.errors import InvalidConfig, NotFound
from halteres.files import read_regular
from halteres.observe.metrics import read_rows

T = TypeVar("T")


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that training goes on from."""

    name: str
    step: int
    state_path: str


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """Where this run's other processes are."""

    run_id: str
    service_url: str
    api_url: str
    base_model: str
    tokenizer: str = ""  # folder of the base model, or its name
    is_foreign: bool = False  # the environment is written for atroposlib
    # the service gives sampled log-probabilities at env.temperature, not at 1
    tempered: bool = False
    critic_url: str = ""  # with a login; empty: the run has no critic
    api_key: str | None = None
    service_up_s: float | None = None  # how long the service may take to start; None: as usual
    # file that names each version for the run's sampling relay; empty: the service answers
    # environments itself
    published: str = ""
    resume_from: ResumePoint | None = None

    @property
    def key_of_sdk(self) -> str:
        """The key for the SDK, which does not start without one; a service on this machine asks
        for none.
        """
        return self.api_key or "tml-local"

    @property
    def metadata(self) -> dict[str, str]:
        """How the service finds the policy of a run."""
        return {"halteres_run": self.run_id}


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version of a policy that a sampling relay may sample (control/published.json)."""

    version: int
    # `SamplingClient.get_sampler_handle`: names the snapshot and its session; no key is in it
    handle: str


class RunFolder:
    """Paths inside one run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"  # a row per step
        self.events = path / "events.jsonl"  # what happened, in order
        self.checkpoints = path / "checkpoints.jsonl"  # what can be resumed, sampled, evaluated
        self.rollouts = path / "rollouts"  # the groups of each step, and their advantages
        self.stop = path / "control" / "stop.json"  # somebody asks for an end
        # exists once environments can sample the policy
        self.ready = path / "control" / "trainer.ready"
        # why a process of the run ended, in its own words
        self.failure = path / "control" / "failure.json"

    def version_at(self, point: ResumePoint) -> int:
        """Optimiser steps of a checkpoint: fewer than its step where batches without signal were
        skipped.
        """
        rows = [
            row for row in read_rows(self.checkpoints) if row.get("state_path") == point.state_path
        ]
        return int(rows[-1].get("version", point.step)) if rows else point.step

    def is_given(self, setting: str, otherwise: bool) -> bool:
        """Whether a setting was given, in this run or in one that it goes on from; `otherwise`:
        where no run says.
        """
        folder = self.path
        while True:
            try:
                source = json.loads((folder / "config.resolved.json").read_text("utf-8"))[setting][
                    "source"
                ]
                if source != "resume":
                    return source != "default"
                earlier = json.loads((folder / "run.json").read_text("utf-8"))["resumed_from"]
                folder = folder.parent / str(earlier)
            except (OSError, ValueError, LookupError, TypeError):
                return otherwise

    def settings(self) -> Settings:
        """What to train, from settings.json."""
        return self._read("settings.json", Settings.model_validate_json)

    def wiring(self) -> Wiring:
        """Where the other processes are, from wiring.json."""
        return self._read("wiring.json", lambda content: msgspec.json.decode(content, type=Wiring))

    def _read(self, name: str, read: Callable[[bytes], T]) -> T:
        file = self.path / name
        try:
            return read(read_regular(file))
        except OSError as error:
            raise NotFound(
                f"{file} cannot be read.",
                f"{error.strerror}.",
                "Give --run the directory of a run that `halteres train` made.",
            ) from error
        except (ValidationError, msgspec.DecodeError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise InvalidConfig(
                f"{file} cannot be used.", f"{why}.", "Let `halteres train` write it."
            ) from error
