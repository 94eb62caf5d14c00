"""What must be true before a run begins: keys, disk, model, memory, environment, batch, caps, ports.

Each check is named and has figures and a sentence; all are made, whichever fails. One process at a time may start a
run, so that two cannot both be the last one that a cap allows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.config.policies import Policy, PolicyCap, how_to_unlock, over_cap
from halteres.config.problem import Problem, refusal
from halteres.config.program import EnvironmentProgram, describe, program_of
from halteres.config.settings import ENV_WIRING, Settings
from halteres.errors import NotFound, UserError
from halteres.models.shape import ModelShape
from halteres.runs import lock
from halteres.runs.directory import RunDirectory, active_runs, list_runs
from halteres.runs.reading.failures import DiskFull
from halteres.runs.starting import footprint, machine
from halteres.runs.starting.base_model import RunModel, given_model, own_model
from halteres.runs.starting.check import Check, attempt
from halteres.runs.starting.footprint import Workload, workload_of
from halteres.runs.starting.resume import ResumePoint, resume_point
from halteres.runs.starting.reward_models import examine_components, examine_reward_models, server_bytes
from halteres.runs.state import read_state

FREE_BYTES = 256 * 1024 * 1024
"""What a run needs at least: logs, journal and checkpoints of the built-in model take about a tenth of it."""

MODEL = "inference.model"

ROOM, LEAST_LENGTH = "room for answers", 32
"""Tokens: a chat's own marks and one short question take as many; no answer fits beside them."""

RATE, LARGE_MODEL, HIGH_RATE = "learning rate", 20_000_000, 1e-3
"""Parameters of a model that has much to forget, and a rate of LoRA that is for smaller ones, as the default is."""


class MissingKey(UserError):
    """A variable that the operator's policy asks for is not set."""

    code = "missing_key"


class TooLarge(UserError):
    """The model does not fit into the memory that is free."""

    code = "preflight_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that somebody wants to start."""

    settings: Settings
    home: Path  # of all runs
    policy: Policy = field(default_factory=Policy)
    service_url: str | None = None  # a service to use instead of starting one
    resume: RunDirectory | None = None

    @property
    def demands(self) -> Workload:
        """What it asks of the engine."""
        return workload_of(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a run stands on, found and checked."""

    environment: EnvironmentProgram
    model: RunModel
    resume: ResumePoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Every finding about a plan."""

    checks: tuple[Check, ...]
    ground: Ground | None  # None where a check failed that a run is refused for

    @property
    def warnings(self) -> list[str]:
        """What the run is not refused for."""
        return [check.warning for check in self.checks if check.warning]

    def demand(self) -> Ground:
        """The ground. Raises the first failure; `checks` in its details tells all findings."""
        for failure in (check.failure for check in self.checks if check.failure):
            failure.details.setdefault("checks", [check.facts for check in self.checks])
            raise failure
        assert self.ground is not None, "no check failed"  # noqa: S101 - for the type checker
        return self.ground


def examine(plan: Plan) -> Examined:
    """Look at everything. Nothing is changed, nothing raised."""
    checks = [attempt("variables", environ.check)[0]]
    if plan.policy.require_keys.start:
        checks.append(attempt("keys", lambda: check_keys(plan.policy))[0])
    resumable, point = attempt("checkpoint", lambda: _point(plan))
    checks += [_told(resumable, point)] if plan.resume else []
    has_model, model = attempt("model present", lambda: _model(plan))
    shape = model.shape if model else None
    rewards, reward_models = examine_reward_models(plan.settings.env)
    fits = [_memory(plan, shape, server_bytes(reward_models))] if model else []
    checks += [*(_held(plan.policy, check) for check in (has_model, *fits)), _disk(plan, shape)]
    described, environment = attempt("environment", lambda: _environment(plan.settings))
    checks += [described, attempt("batch", lambda: check_batch(plan.settings))[0], *_room(plan.settings), *_caps(plan)]
    checks += [*_rate(plan.settings, shape), *rewards, *examine_components(plan.settings.env)]
    ground = None
    if model and environment and not any(check.failure for check in checks):
        ground = Ground(environment=environment, model=model, resume=point)
    return Examined(checks=tuple(checks), ground=ground)


def check_concurrency(policy: Policy) -> None:
    """PolicyCap where as many runs go on as the policy allows."""
    cap, active = policy.caps.max_concurrent_runs, [run.run_id for run in active_runs()]
    if cap is not None and len(active) >= cap:
        raise PolicyCap(
            f"The policy '{policy.name}' allows {cap} {'run' if cap == 1 else 'runs'} at once.",
            f"Active: {', '.join(active)}.",
            f"Wait for one to end, or stop it: halteres runs stop {active[-1]}",
            active_runs=active,
            cap="max_concurrent_runs",
            limit=cap,
        )


def check_batch(settings: Settings) -> None:
    """InvalidConfig where a batch is not made of whole groups."""
    batch, group = settings.env.get("batch_size"), settings.env.get("group_size")
    if isinstance(batch, int) and isinstance(group, int) and group > 0 and batch % group:
        rule = f"must be a multiple of group_size {group}"
        raise refusal([Problem(field="env.batch_size", got=batch, rule=rule)])


def check_keys(policy: Policy) -> None:
    """MissingKey where a variable is not set that the policy asks for to start."""
    asked = policy.require_keys.start
    missing = [name for name in asked if not environ.is_set(name)]
    if missing:
        raise MissingKey(
            f"{missing[0]} not set. Add it to ~/.hermes/.env, or export it.",
            f"The policy '{policy.name}' asks for {', '.join(asked)}.",
            "Set it where these tools are started.",
            field=missing[0],
            missing=missing,
        )


def _model(plan: Plan) -> RunModel:
    asked = plan.settings.inference
    return given_model(asked, plan.service_url) if plan.service_url else own_model(asked)


def _memory(plan: Plan, shape: ModelShape | None, beside: int) -> Check:
    """Of the GPU where the engine will use one; `beside`: bytes of the run's reward server."""
    there = machine.look()
    name = "gpu memory" if there.gpu and shape else "memory"
    free = (there.model_memory if shape else there.memory).free
    needed = footprint.without_weights() + footprint.batch_bytes(plan.demands)
    if shape is not None:
        needed = footprint.need(shape, plan.demands, on_gpu=there.gpu is not None).total
    needed += beside if name == "memory" else 0  # a reward server computes on the CPU
    figures = {"need_gb": machine.gb(needed), "free_gb": machine.gb(free)}
    if free is None or needed <= free:
        return Check(name=name, figures=figures)
    if name == "memory" and footprint.batch_bytes(plan.demands) > needed / 2:
        return Check(name=name, ok=False, figures=figures, failure=_too_many(plan, needed, free, figures))
    told = f" The run's reward models take {beside / 1e9:.1f} GB of it." if beside else ""
    failure = TooLarge(
        f"Too little {name}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free.",
        f"The model is '{plan.settings.inference.model}'.{told}",
        "Take a smaller inference.model, or end what else uses the memory.",
        field="inference.model",
        **figures,
    )
    return Check(name=name, ok=False, figures=figures, failure=failure)


def _held(policy: Policy, check: Check) -> Check:
    """A model that the policy holds is not for whoever starts a run to change: the operator is told how."""
    failure = check.failure
    if failure is not None and failure.details.get("field") == MODEL and MODEL in policy.lock:
        failure.next = how_to_unlock(MODEL, policy)
    return check


def _too_many(plan: Plan, needed: float, free: float, figures: Mapping[str, Any]) -> TooLarge:
    """It is the batch that does not fit."""
    work = plan.demands
    return TooLarge(
        f"Too little memory: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free.",
        f"A batch is {work.batch_size:,} sequences of up to {work.positions:,} tokens.",
        "Lower env.batch_size.",
        field="env.batch_size",
        **figures,
    )


def _room(settings: Settings) -> list[Check]:
    """Whether prompts have room beside their answers: advice, for how long prompts are nobody knows yet."""
    longest, answer = settings.env.get("max_token_length"), settings.env.get("max_new_tokens")
    if not isinstance(longest, int) or not isinstance(answer, int) or not 0 < longest <= answer:
        return []
    found = f"prompt and answer together stay below max_token_length {longest}; max_new_tokens is {answer}"
    remedy = "raise max_token_length above max_new_tokens by the length of a prompt"
    return [Check(name=ROOM, ok=longest > LEAST_LENGTH, found=found, remedy=remedy)]


def _rate(settings: Settings, shape: ModelShape | None) -> list[Check]:
    """Whether the built-in model's learning rate meets a large model."""
    rate = settings.trainer.learning_rate
    if shape is None or shape.parameters < LARGE_MODEL or rate < HIGH_RATE:
        return []
    found = f"{rate:g} suits the built-in model of 0.9 M parameters; this model has {shape.parameters / 1e6:.0f} M"
    remedy = "set trainer.learning_rate to 3e-4 or less, from 1,000 M parameters on to 1e-4 or less"
    return [Check(name=RATE, ok=False, found=found, remedy=remedy)]


def _disk(plan: Plan, shape: ModelShape | None) -> Check:
    there = next(folder for folder in (plan.home, *plan.home.parents) if folder.exists())
    free, needed = shutil.disk_usage(there).free, FREE_BYTES + _checkpoints(plan, shape)
    figures = {"need_gb": machine.gb(needed), "free_gb": machine.gb(free)}
    if free >= needed:
        return Check(name="disk", figures=figures)
    failure = DiskFull(
        f"Too little room in {plan.home}.",
        f"{free / 1e6:.0f} MB are free; a run needs {needed / 1e6:.0f} MB.",
        "Make room, or set HALTERES_HOME to another disk.",
        **figures,
    )
    return Check(name="disk", ok=False, figures=figures, failure=failure)


def _checkpoints(plan: Plan, shape: ModelShape | None) -> int:
    """Bytes of a run's checkpoints: weights and two moments each."""
    if shape is None:
        return 0
    trainer = plan.settings.trainer
    count = 2 + sum(trainer.total_steps // every for every in (trainer.checkpoint_every, trainer.eval_every) if every)
    return count * 3 * footprint.NUMBER * footprint.adapter_numbers(shape, trainer.lora_rank)


def _environment(settings: Settings) -> EnvironmentProgram:
    """It must be there and accept these settings."""
    environment = program_of(settings.run)
    told = describe(environment, {name: value for name, value in settings.env.items() if name not in ENV_WIRING})
    if told.problems:
        raise refusal(told.problems)
    if told.is_foreign and settings.trainer.deterministic:
        rule = "an environment of atroposlib's draws and samples in an order of its own, which cannot be repeated"
        raise refusal([Problem(field="trainer.deterministic", got=True, rule=rule)])
    return replace(environment, is_foreign=told.is_foreign)


def _caps(plan: Plan) -> list[Check]:
    caps = plan.policy.caps
    asked: Sequence[tuple[str, object, Callable[[], None]]] = (
        ("steps allowed", caps.max_steps, lambda: _check_steps(plan)),
        ("runs allowed", caps.max_concurrent_runs, lambda: check_concurrency(plan.policy)),
    )
    return [attempt(name, work)[0] for name, cap, work in asked if cap is not None]


def _check_steps(plan: Plan) -> None:
    problem = over_cap(plan.policy, plan.settings.trainer.total_steps)
    if problem is not None:
        raise refusal([problem], f"Set trainer.total_steps to {problem.limit:g} or less.")


def _point(plan: Plan) -> ResumePoint | None:
    return resume_point(plan.resume, plan.settings, plan.service_url) if plan.resume else None


def _told(check: Check, point: ResumePoint | None) -> Check:
    if point is None:
        return check
    return Check(name=check.name, figures={"step": point.step}, found=f"of run {point.run.run_id}")


LOCK = ".starting"
WITHIN_S = 30.0
"""Making a run takes milliseconds; going on from one with large checkpoints may take seconds."""


@contextmanager
def admitting(home: Path) -> Iterator[None]:
    """Hold the lock while the block runs.

    Raises:
        NotReady: somebody else held it all the time.
        OSError: the folder of all runs cannot be made or written.
    """
    home.mkdir(parents=True, exist_ok=True)
    with lock.locked(home / LOCK, WITHIN_S, "Another run is just being started."):
        yield


def run_of_key(key: str | None) -> RunDirectory | None:
    """The run that was started with this key; None where there is none, or no key."""
    if not key:
        return None
    return next((run for run in list_runs() if _key(run) == key), None)


def _key(run: RunDirectory) -> str | None:
    try:
        return read_state(run.path / "run.json").idempotency_key
    except NotFound:  # removed while we looked
        return None
