"""What a test is asked to do: `Order` (a draft and a call's arguments) becomes a checked `Request`.

Everything that can be refused is refused here, before anything is started: which models (`Candidate`) are tested, which
key that needs, the limits of a test. A request is stored as request.json and holds no key.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.drafting.drafts import Draft
from halteres.config import environ
from halteres.config.discovery import in_file_name, read_environment
from halteres.config.policies import load_policy
from halteres.config.program import EnvironmentProgram, describe, program_of
from halteres.config.settings import ENV_WIRING, Settings
from halteres.errors import HalteresError
from halteres.models import model_folder
from halteres.next_step import NextStep
from halteres.runs.directory import RunAmbiguous, RunNotFound, find_run
from halteres.runs.reading.adapter import CONFIG, weights_of
from halteres.runs.servers import service_arguments
from halteres.runs.starting.base_model import RunModel, found_model, models_home
from halteres.runs.starting.preflight import MissingKey

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


Backend = Literal["local", "openrouter"]

DEFAULTS = {
    "qwen/qwen3-8b": ("Qwen3 8B", "small"),
    "z-ai/glm-4.7-flash": ("GLM-4.7 Flash", "medium"),
    "minimax/minimax-m2.5": ("MiniMax M2.5", "large"),
}
"""The endpoint's models that are tried where none is named: id -> name, scale (seed 002)."""

LONGEST_STEM = 120  # characters


@dataclass(frozen=True, slots=True)
class Bench:
    """Makes candidates for one draft."""

    environment: str  # its name
    settings: Settings
    backend: Backend | None

    def seat(self, models: Sequence[str] | None) -> tuple[Candidate, ...]:
        """The models to test. ModelMissing where none is named and the draft's base model is not there."""
        if models:
            named = list(dict.fromkeys(models))
            made = [self._named(name) for name in named]
        elif self.backend == "openrouter":
            made = [self._remote(name) for name in DEFAULTS]
        else:
            made = [self._base(self.settings.inference.model)]
        return _with_own_files(made)

    def _named(self, name: str) -> Candidate:
        if self.backend != "openrouter" and _names_weights(name):
            return self._of_run(name)
        return self._local(name) if self._is_local(name) else self._remote(name)

    def _of_run(self, name: str) -> Candidate:
        """Weights of a run. Those that are not there are a candidate too, as with models."""
        try:
            found = weights_of(name)
            model = RunModel(name=found.path, tokenizer=found.run.state().tokenizer)
            return self._candidate(name, f"weights of run {found.run.run_id}", "local", model, run=found.run.run_id)
        except HalteresError as error:
            missing = RunModel(name=name, tokenizer="")
            return self._candidate(name, name, "local", missing, problem=f"{error.what} {error.why}".strip())

    def _is_local(self, name: str) -> bool:
        if self.backend == "openrouter":
            return name.startswith(LOCAL)
        is_here = name.startswith(LOCAL) or name == self.settings.inference.model
        return self.backend == "local" or is_here or model_folder(name, models_home()) is not None

    def _local(self, name: str) -> Candidate:
        """One that is not there is a candidate too: it fails, and the others do not."""
        model = name.removeprefix(LOCAL)
        try:
            return self._base(model)
        except HalteresError as error:
            return self._candidate(
                LOCAL + model, model, "local", RunModel(name=model, tokenizer=""), problem=error.what
            )

    def _base(self, model: str) -> Candidate:
        asked = self.settings.inference.model_copy(update={"model": model})
        url, found = found_model(asked)
        return self._candidate(LOCAL + model, model, "local", found, service_url=url)

    def _remote(self, model: str) -> Candidate:
        """Prompts are counted with the base model's tokenizer, nobody else's is here; without it, in characters."""
        name, scale = DEFAULTS.get(model, (model, "custom"))
        return self._candidate(model, name, scale, RunModel(name=model, tokenizer=self._tokenizer_folder()))

    def _tokenizer_folder(self) -> str:
        """Of the draft's base model; empty where it is not here: an endpoint's model is tested without it too."""
        asked = self.settings.inference
        if (folder := model_folder(asked.model, models_home())) is not None:
            return str(folder)
        try:
            tokenizer = found_model(asked)[1].tokenizer
        except HalteresError:
            return ""
        return tokenizer if Path(tokenizer).is_dir() else ""

    def _candidate(
        self,
        model: str,
        name: str,
        scale: str,
        found: RunModel,
        *,
        run: str = "",
        service_url: str | None = None,
        problem: str = "",
    ) -> Candidate:
        return Candidate(
            model=model,
            name=name,
            scale=scale,
            base=found.name,
            is_local=scale == "local",
            tokenizer=found.tokenizer,
            stem=_stem(self.environment, model),
            wandb_run=f"test_inference_RSIAgent_{in_file_name(self.environment)}_{secrets.token_hex(4)}",
            run=run,
            service_url=service_url,
            problem=problem,
        )


def _names_weights(name: str) -> bool:
    """Whether it is one of the forms in which rl_get_results names weights: tinker://, an adapter folder, a run."""
    if name.startswith("tinker://") or (Path(name).expanduser() / CONFIG).is_file():
        return True
    if "/" in name or model_folder(name, models_home()) is not None:
        return False
    try:
        find_run(name)
    except RunAmbiguous:
        return True  # `weights_of` says which they are
    except RunNotFound:
        return False
    return True


def _stem(environment: str, model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"test_{environment}_{model}")[:LONGEST_STEM]


def _with_own_files(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Two names may come to the same file name: the later one gets a number."""
    seen: dict[str, int] = {}
    told: list[Candidate] = []
    for one in candidates:
        seen[one.stem] = seen.get(one.stem, 0) + 1
        number = seen[one.stem]
        told.append(one if number == 1 else msgspec.structs.replace(one, stem=f"{one.stem}.{number}"))
    return tuple(told)


KEY, ADDRESS = "OPENROUTER_API_KEY", "OPENROUTER_BASE_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A test that somebody wants."""

    draft: Draft
    num_steps: int
    group_size: int
    models: Sequence[str] | None
    prompts: Sequence[str]
    max_tokens: int | None
    temperature: float | None
    backend: Backend | None

    def request(self) -> Request:
        """The test, not yet started.

        Raises:
            NoEnvironment, EnvironmentBroken, InvalidConfig: the draft cannot be tested.
            ModelMissing: its base model is not there, and no other was named. MissingKey: a key is.
        """
        settings = self.draft.resolve().settings
        program = program_of(settings.run)
        told = describe(program, {name: value for name, value in settings.env.items() if name not in ENV_WIRING})
        _check_set(*load_policy().require_keys.test, always=True)
        candidates = Bench(program.name, settings, self.backend).seat(self.models)
        if not all(one.is_local for one in candidates):
            _check_set(KEY, always=False)
        found = read_environment(program.path)
        return Request(
            draft=self.draft.handle,
            environment=program.name,
            environment_file=str(program.path),
            class_name=found.class_name if found else "",
            interpreter=program.interpreter,
            working_directory=str(program.working_directory),
            env={
                **settings.env,
                "seed": settings.run.seed,
                "success_threshold": settings.run.success_threshold,
            },
            is_foreign=told.is_foreign,
            num_steps=self.num_steps,
            group_size=self.group_size,
            candidates=candidates,
            base_model=settings.inference.model,
            created_at=time.time(),
            prompts=tuple(self.prompts),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            service=service_arguments(settings.inference),
            model_within_s=MODEL_WITHIN_S,
        )


def _check_set(*keys: str, always: bool) -> None:
    """MissingKey for the first that is not set; `always`: whatever is tested."""
    missing = next((key for key in keys if not environ.is_set(key)), None)
    if missing is None:
        return
    reason = f"{missing} must be set for other models; without a key"
    raise MissingKey(
        f"{missing} not set. Required for inference testing.",
        "Set it where these tools are started" + ("." if always else ", or test the local model, which needs none."),
        f"set {missing}, then rl_test_inference()"
        if always
        else NextStep("rl_test_inference", {"backend": "local"}, reason),
        field=missing,
    )
