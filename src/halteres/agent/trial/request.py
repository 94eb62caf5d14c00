"""What a test of an environment is asked to do: `Request`, checked before anything is started, and
its models.

A request is stored as request.json and holds no key.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.open_access import check_models
from halteres.agent.tool import Caller
from halteres.config import environ
from halteres.config.discovery import in_file_name
from halteres.config.operator_policy import load_policy
from halteres.config.program import EnvironmentProgram
from halteres.config.resolution import Resolved
from halteres.config.settings import Settings
from halteres.errors import HalteresError
from halteres.models import model_folder
from halteres.next_step import NextStep
from halteres.runs.directory import RunAmbiguous, RunNotFound, find_run
from halteres.runs.planning.checks import MissingKey
from halteres.runs.planning.models import found_model, models_home
from halteres.runs.reading.named_weights import CONFIG, weights_of
from halteres.runs.servers import ready_within_s, sampler_keys, service_arguments

LOCAL = "local:"  # what the names of this machine's models begin with in answers
MODEL_WITHIN_S = 600.0  # how long one model may take (seed 002)
ENDING_S = 15.0  # what it may take to end an environment, and to say how it ended
# ... and a service of our own, beside the time that it may take to start
SERVICE_ENDING_S = 30.0
# so many models of an endpoint are tested side by side; those of this machine one after another
REMOTE_AT_ONCE = 4
LEAST_GROUP = 4  # of fewer answers it is chance whether their scores differ
DEFAULTS = {
    "qwen/qwen3-8b": ("Qwen3 8B", "small"),
    "z-ai/glm-4.7-flash": ("GLM-4.7 Flash", "medium"),
    "minimax/minimax-m2.5": ("MiniMax M2.5", "large"),
}
"""The endpoint's models that are tried where none is named: id -> name, scale (seed 002)."""

KEY, ADDRESS = "OPENROUTER_API_KEY", "OPENROUTER_BASE_URL"

Backend = Literal["local", "openrouter"]


class TestedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is tested."""

    __test__ = False  # for pytest: this is no class of tests

    model: str  # as answers name it: an endpoint's id, or "local:<name>"
    name: str  # for people
    scale: str  # small, medium, large, custom, local
    # as its server names it: a built-in name, a folder, a tinker:// path, an endpoint's id
    base: str
    # folder; empty: the base model is not here, and lengths are counted in characters
    tokenizer: str
    stem: str = ""  # of its files
    wandb_run: str = ""  # the seeds' name of the attempt
    run: str = ""  # id of the run whose weights they are; its service has them
    service_url: str | None = None  # of a service that has it, instead of one of our own
    is_relayed: bool = False  # that service speaks the Tinker API alone
    service: tuple[str, ...] = ()  # arguments of the run's own; else the request's
    problem: str = ""  # why it cannot be tried at all

    @property
    def is_local(self) -> bool:
        """Whether it is of this machine; else it is an endpoint's."""
        return self.scale == "local"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """request.json: one test."""

    draft: str  # handle
    # a foreign one knows `process`, and neither our fields nor free prompts
    program: EnvironmentProgram
    env: Mapping[str, Any]  # the environment's effective settings
    num_steps: int
    group_size: int
    models: tuple[TestedModel, ...]
    base_model: str  # the draft's; the one that would be trained
    created_at: float  # unix seconds
    prompts: tuple[str, ...] = ()
    max_tokens: int | None = None  # of one answer; None: as the environment has it
    temperature: float | None = None  # likewise
    service: tuple[str, ...] = ()  # arguments of a service of our own
    model_within_s: float = MODEL_WITHIN_S

    @property
    def arguments(self) -> Request:
        """Without what each test is given of its own."""
        models = tuple(msgspec.structs.replace(one, wandb_run="") for one in self.models)
        return msgspec.structs.replace(self, created_at=0.0, models=models)

    @property
    def rollouts(self) -> int:
        """Completions that each model is asked for."""
        return len(self.prompts) or self.num_steps * self.group_size

    @property
    def is_like_training(self) -> bool:
        """Whether what it finds is what training would: answers sampled, several of each task, none
        cut shorter.
        """
        own = self.env.get("max_new_tokens")
        is_cut = self.max_tokens is not None and (not isinstance(own, int) or self.max_tokens < own)
        is_greedy = self.temperature is not None and self.temperature <= 0
        return not (is_cut or is_greedy or self.prompts) and self.group_size >= LEAST_GROUP

    @property
    def within_s(self) -> float:
        """How long the whole test may take: the rest is for what does not end when it should."""
        num_local = sum(one.is_local for one in self.models)
        rounds = math.ceil((len(self.models) - num_local) / REMOTE_AT_ONCE)
        each_s = self.model_within_s + ENDING_S
        starts_s = sum(ready_within_s(self.service_of(one)) for one in self.models if one.is_local)
        return max(rounds * each_s, starts_s + num_local * (SERVICE_ENDING_S + each_s))

    def service_of(self, model: TestedModel) -> tuple[str, ...]:
        """Arguments of a service of our own for this model."""
        return model.service or self.service

    @property
    def sampler_keys(self) -> tuple[str, ...]:
        """The variables with the keys of those services' samplers."""
        every = (key for one in self.models for key in sampler_keys(self.service_of(one)))
        return tuple(dict.fromkeys(every))

    @property
    def success_above(self) -> float:
        """A score above it counts as success: the environment's own threshold, where it has one."""
        own = self.env.get("success_threshold")
        if isinstance(own, int | float):
            return float(own)
        return 0.0


def new_request(
    caller: Caller,
    draft: str,
    resolved: Resolved,
    models: Sequence[str] | None = None,
    backend: Backend | None = None,
    **limits: Any,
) -> Request:
    """A test of a draft, by its handle and its settings, not yet started; `limits` are further
    fields of it.

    Raises:
        TokenNeeded: the caller may not test these models.
        ModelMissing: its base model is not there, and no other was named. MissingKey: a key is.
    """
    if caller.is_open:
        check_models([name.removeprefix(LOCAL) for name in models or ()])
    settings, program = resolved.settings, resolved.environment
    what = "{} not set. Required for inference testing."
    if missing := [key for key in load_policy().require_keys.test if not environ.is_set(key)]:
        raise MissingKey(
            what.format(missing[0]), "Set it where these tools are started.", field=missing[0]
        )
    tested = models_to_test(program.name, settings, models, backend)
    if not all(one.is_local for one in tested) and not environ.is_set(KEY):
        why = "Set it where these tools are started, or test the local model, which needs none."
        reason = f"{KEY} must be set for other models; without a key"
        instead = NextStep("rl_test_inference", {"backend": "local"}, reason)
        raise MissingKey(what.format(KEY), why, instead, field=KEY)
    return Request(
        draft=draft,
        program=program,
        env=resolved.environment_settings,
        models=tested,
        base_model=settings.inference.model,
        created_at=time.time(),
        service=service_arguments(settings.inference),
        model_within_s=MODEL_WITHIN_S,
        **limits,
    )


def models_to_test(
    environment: str,
    settings: Settings,
    names: Sequence[str] | None = None,
    backend: Backend | None = None,
) -> tuple[TestedModel, ...]:
    """The models of a test. ModelMissing where none is named and the draft's base model is not
    there.
    """
    if names:
        found = [_named_model(name, settings, backend) for name in dict.fromkeys(names)]
    elif backend == "openrouter":
        found = [_remote(name, settings) for name in DEFAULTS]
    else:
        found = [_base(settings.inference.model, settings)]
    stems, models = Counter[str](), list[TestedModel]()
    for one in found:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", f"test_{environment}_{one.model}")[:120]
        stems[stem] += 1  # two names may come to the same file name
        if stems[stem] != 1:
            stem = f"{stem}.{stems[stem]}"
        wandb_run = f"test_inference_RSIAgent_{in_file_name(environment)}_{secrets.token_hex(4)}"
        models.append(msgspec.structs.replace(one, stem=stem, wandb_run=wandb_run))
    return tuple(models)


def _named_model(name: str, settings: Settings, backend: Backend | None) -> TestedModel:
    """Whatever is not there is tested too: it fails, and the others do not."""
    here, in_store = (
        TestedModel(model=name, name=name, scale="local", base=name, tokenizer=""),
        models_home(),
    )
    if backend != "openrouter" and _names_weights(name):
        try:
            found = weights_of(name)
            own = found.run.settings()
        except HalteresError as error:
            return msgspec.structs.replace(here, problem=f"{error.what} {error.why}".strip())
        run = found.run
        return msgspec.structs.replace(
            here,
            name=f"weights of run {run.run_id}",
            base=found.path,
            tokenizer=run.state().tokenizer,
            run=run.run_id,
            service=service_arguments(own.inference, lora_rank=own.trainer.lora_rank),
        )
    is_here = name == settings.inference.model or model_folder(name, in_store) is not None
    if not name.startswith(LOCAL) and (
        backend == "openrouter" or not (backend == "local" or is_here)
    ):
        return _remote(name, settings)
    model = name.removeprefix(LOCAL)
    try:
        return _base(model, settings)
    except HalteresError as error:
        return msgspec.structs.replace(
            here, model=LOCAL + model, name=model, base=model, problem=error.what
        )


def _names_weights(name: str) -> bool:
    """Whether it is one of the forms in which rl_get_results names weights: tinker://, an adapter
    folder, a run.
    """
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


def _base(model: str, settings: Settings) -> TestedModel:
    url, found = found_model(settings.inference.model_copy(update={"model": model}))
    return TestedModel(
        model=LOCAL + model,
        name=model,
        scale="local",
        base=found.name,
        tokenizer=found.tokenizer,
        service_url=url,
        is_relayed=found.is_relayed,
    )


def _remote(model: str, settings: Settings) -> TestedModel:
    """Prompts are counted with the base model's tokenizer, nobody else's is here; without it, in
    characters.
    """
    tokenizer = str(model_folder(settings.inference.model, models_home()) or "")
    if not tokenizer:
        with contextlib.suppress(HalteresError):  # an endpoint's model is tested without it too
            tokenizer = found_model(settings.inference)[1].tokenizer
    name, scale = DEFAULTS.get(model, (model, "custom"))
    if not (tokenizer and Path(tokenizer).is_dir()):
        tokenizer = ""
    return TestedModel(model=model, name=name, scale=scale, base=model, tokenizer=tokenizer)
