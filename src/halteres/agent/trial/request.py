"""What a test is asked to do.

Owns: the nouns `Candidate` and `Request`, request.json, the limits of a test.
Never: holds a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from halteres.config.program import EnvironmentProgram

LOCAL = "local:"
"""What the names of this machine's models begin with in answers."""

MODEL_WITHIN_S = 600.0
"""How long one model may take (seed 002)."""

SERVICE_WITHIN_S = 330.0
"""What a service of our own may take to start and to end, beside its model's time."""

ENDING_S = 15.0
"""What it may take to end an environment, and to tell how."""

REMOTE_AT_ONCE = 4
"""So many models of an endpoint sit side by side; those of this machine one after another."""

COMPLETIONS_PER_ROLLOUT = 32
"""A model answers so many times for each rollout asked for, at most: the turns of a long game, or a scorer that never
gives a score, which would go on asking for ever."""


LEAST_GROUP = 4
"""Of fewer answers it is chance whether their scores differ."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One model that sits the test."""

    model: str  # as answers name it: an endpoint's id, or "local:<name>"
    name: str  # for people
    scale: str  # small, medium, large, custom, local
    base: str  # as its server names it: a built-in name, a folder, a tinker:// path, an endpoint's id
    is_local: bool
    tokenizer: str  # folder; empty: the base model is not here, and lengths are counted in characters
    stem: str  # of its files
    wandb_run: str  # the seeds' name of the attempt
    run: str = ""  # id of the run whose weights they are; its service has them
    service_url: str | None = None  # of a service that has it, instead of one of our own
    problem: str = ""  # why it cannot be tried at all


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: one test."""

    test_id: str = ""  # its folder's name, once it is started
    draft: str  # handle
    environment: str
    environment_file: str
    class_name: str  # of the environment in its file, where the source tells
    interpreter: str
    env: Mapping[str, Any]  # the environment's effective settings
    is_foreign: bool  # not our BaseEnv: it knows `process`, and neither our fields nor free prompts
    num_steps: int
    group_size: int
    candidates: tuple[Candidate, ...]
    base_model: str  # the draft's; the one that would be trained
    created_at: float  # unix seconds
    working_directory: str = ""  # of the environment's commands
    prompts: tuple[str, ...] = ()
    max_tokens: int | None = None  # of one answer; None: as the environment has it
    temperature: float | None = None  # likewise
    service: tuple[str, ...] = ()  # arguments of a service of our own
    model_within_s: float = MODEL_WITHIN_S

    def asks_the_same(self, other: Request) -> bool:
        """Whether both are of the same arguments: all but what each test is given of its own."""
        return self._arguments == other._arguments

    @property
    def _arguments(self) -> Request:
        candidates = tuple(msgspec.structs.replace(one, wandb_run="") for one in self.candidates)
        return msgspec.structs.replace(self, test_id="", created_at=0.0, candidates=candidates)

    @property
    def program(self) -> EnvironmentProgram:
        """The environment, and what runs it."""
        return EnvironmentProgram(
            name=self.environment,
            path=Path(self.environment_file),
            interpreter=self.interpreter,
            working_directory=Path(self.working_directory),
            is_foreign=self.is_foreign,
        )

    @property
    def counts_characters(self) -> bool:
        """Whether some model's prompts are counted in characters."""
        return any(not one.is_local and not one.tokenizer for one in self.candidates)

    @property
    def rollouts(self) -> int:
        """Completions that each model is asked for."""
        return len(self.prompts) or self.num_steps * self.group_size

    @property
    def is_like_training(self) -> bool:
        """Whether what it finds is what training would: answers sampled, several of each task, none cut shorter."""
        own = self.env.get("max_new_tokens")
        is_cut = self.max_tokens is not None and (not isinstance(own, int) or self.max_tokens < own)
        is_greedy = self.temperature is not None and self.temperature <= 0
        return not (is_cut or is_greedy or self.prompts) and self.group_size >= LEAST_GROUP

    @property
    def within_s(self) -> float:
        """How long the whole test may take: the rest is for what does not end when it should."""
        num_local = sum(one.is_local for one in self.candidates)
        rounds = math.ceil((len(self.candidates) - num_local) / REMOTE_AT_ONCE)
        each_s = self.model_within_s + ENDING_S
        return max(rounds * each_s, num_local * (SERVICE_WITHIN_S + each_s))

    @property
    def success_above(self) -> float:
        """A score above it counts as success: the environment's own threshold, where it has one."""
        own = self.env.get("success_threshold")
        return float(own) if isinstance(own, int | float) else 0.0
