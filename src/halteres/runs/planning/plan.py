"""What a run will be: `plan_run` makes a `RunPlan` of settings, once, and changes nothing.

Everything that a start looks at stands in the plan: the environment, the base model, the checkpoint
to go on from, every finding, and an estimate where one is asked for. Tools, command line and
`runs.start` write it out, and look at nothing themselves.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from halteres.config import environ
from halteres.config.file_training import FileTraining
from halteres.config.files import Sources
from halteres.config.operator_policy import Policy, how_to_unlock, load_policy
from halteres.config.program import EnvironmentProgram
from halteres.config.resolution import Resolved
from halteres.config.settings import InferenceSettings, Settings
from halteres.errors import Conflict, HalteresError, UserError
from halteres.files import sha256_of
from halteres.models.shape import ModelShape
from halteres.runs.directory import RunDirectory
from halteres.runs.planning import resources
from halteres.runs.planning.checks import (
    MODEL,
    Check,
    advice,
    attempt,
    check_concurrency,
    check_disk,
    check_environment,
    check_keys,
    check_memory,
    check_relay,
    check_rewards_memory,
    check_steps,
    checkpoint_bytes,
    examine_components,
    examine_critic,
    examine_reward_models,
)
from halteres.runs.planning.estimate import Estimate, estimate
from halteres.runs.planning.models import (
    CriticModel,
    RunModel,
    critic_bytes,
    given_model,
    own_model,
    server_bytes,
    with_absolute_folders,
)
from halteres.runs.planning.program_checks import examine_program
from halteres.runs.planning.resources import Machine
from halteres.runs.planning.resume_point import ResumePoint, resume_point
from halteres.short_texts import clipped

Effort = Literal["none", "remembered", "measured"]
"""What an estimate may cost: nothing, and there is none; what is known already; an engine that is
started and measured, up to twenty seconds, where its speed is not known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run before it begins."""

    settings: Settings  # as they will hold: models and files are called as they are from anywhere
    sources: Sources  # section.field -> where its value comes from, of what was given
    policy: Policy
    service_url: str | None  # of a service elsewhere; None: the run starts its own
    is_open: bool  # it is started without the control server's token
    # None: it is unusable, as a check says, or the run trains on a file
    environment: EnvironmentProgram | None
    model: RunModel | None  # None: it is unusable
    resume: ResumePoint | None  # None: from the base model on
    checks: tuple[Check, ...]  # every finding
    estimate: Estimate | None = None  # None: not asked for, or nothing was measured
    # None: the run trains by reinforcement learning
    training: FileTraining | None = None
    busy: str = ""  # a sentence, where others use the machine that its engine will compute on

    @property
    def first_step(self) -> int:
        """Optimiser steps that are done when it begins."""
        if self.resume:
            return self.resume.step
        return 0

    @property
    def warnings(self) -> list[str]:
        """What the run is not refused for."""
        return [check.warning for check in self.checks if check.warning]

    @property
    def refusal(self) -> HalteresError | None:
        """Why the run cannot begin, by the first check that failed; its details have every check.
        None: it can.
        """
        failure = next((check.failure for check in self.checks if check.failure), None)
        if failure is not None:
            failure.details.setdefault("checks", [check.facts for check in self.checks])
        return failure


class PlanChanged(Conflict):
    """What would start is not what a dry run has checked."""

    code = "plan_changed"


PARTS = ("settings", "environment's file", "checkpoint", "operator's policy")
"""What a run is made of, in the order of a fingerprint."""

DIGEST_LENGTH = 8  # hex digits of one part of a fingerprint


def fingerprint(plan: RunPlan) -> str:
    """A digest of each of `PARTS`, with `-` between. What was measured is no part of it, nor are
    files that the environment reads, such as tasks, data sets and reward functions.
    """
    settings: dict[str, Any] = {
        "settings": plan.settings.model_dump(mode="json"),
        "service": plan.service_url,
    }
    if plan.training is not None:
        settings["training"] = plan.training.model_dump(mode="json")
    file = None
    if plan.environment is not None:
        file = sha256_of(plan.environment.path)
    checkpoint = None
    if plan.resume is not None:
        checkpoint = [plan.resume.run.run_id, plan.resume.step]
    parts = (settings, file, checkpoint, plan.policy.model_dump(mode="json"))
    return "-".join(map(_digest, parts))


def _digest(part: Any) -> str:
    text = json.dumps(part, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def check_unchanged(plan: RunPlan, before: str) -> None:
    """That the plan is the one with this fingerprint.

    Raises:
        PlanChanged: it is another; `changed` names the parts.
        UserError: this is no fingerprint.
    """
    try:
        pairs = zip(PARTS, before.split("-"), fingerprint(plan).split("-"), strict=True)
        changed = [part for part, old, new in pairs if old != new]
    except ValueError as error:
        raise UserError(
            f"'{clipped(before, 80)}' is no plan of a dry run.",
            f"It has {len(PARTS)} parts.",
            "Give `plan` as the dry run answered it.",
            field="checked",
        ) from error
    if changed:
        why = f"Changed since: {' and '.join(f'the {part}' for part in changed)}."
        raise PlanChanged("What would start now is not what was checked.", why, changed=changed)


def plan_run(
    resolved: Resolved,
    *,
    resume: RunDirectory | None = None,
    resume_step: int | None = None,
    service_url: str | None = None,
    policy: Policy | None = None,
    is_open: bool = False,
    effort: Effort = "none",
) -> RunPlan:
    """Look at everything that a run with these settings needs. Nothing is changed, nothing raised.

    Args:
        resolved: its settings, and what its environment said of them.
        resume: a run to go on from.
        resume_step: the step of its checkpoint; None: its newest.
        service_url: a training service to use instead of starting one; the run never stops it.
        policy: what the operator locks and caps; default: the policy in force.
        is_open: the run is started without the control server's token.
        effort: for an estimate of time and memory.
    """
    policy = policy or load_policy()
    service_url = (service_url or "").rstrip("/") or None
    settings = with_absolute_folders(resolved.settings)
    resolved = replace(resolved, settings=settings)
    variables, here = attempt("variables", lambda: machine(settings.inference.device))
    checks = [variables, *place_checks(settings, here, policy, service_url)]

    point: ResumePoint | None = None
    if resume is not None:
        check, point = resume_check(resume, resume_step, settings, service_url)
        checks.append(check)

    models = examine_models(settings, service_url)
    model, shape = models.base, models.shape
    checks.append(unlocking(models.is_present, policy))
    if model is not None and here is not None:
        fits = check_memory(settings, here, shape, models.rewards_bytes)
        checks.append(unlocking(fits, policy))
        checks += check_rewards_memory(settings, here, shape, models.rewards_bytes)

    usable, environment = attempt("environment", lambda: check_environment(resolved))
    checks += [
        check_disk(checkpoint_bytes(settings, shape, models.critic)),
        usable,
        *advice(settings, shape, here, service_url),
        *models.others,
        *examine_components(settings.env),
        *examine_program(resolved),
        *check_relay(resolved, model),
    ]
    checks += cap_checks(settings, policy, is_open)

    plan = RunPlan(
        settings=with_critic(with_model(settings, model, service_url), models.critic),
        sources=resolved.sources,
        policy=policy,
        service_url=service_url,
        is_open=is_open,
        environment=environment,
        model=model,
        resume=point,
        checks=tuple(checks),
        busy=machine_is_busy(here, service_url),
    )
    if effort == "none" or plan.refusal is not None:
        return plan
    # a check would have failed
    assert environment and model and here  # noqa: S101 - for the type checker
    expected = estimate(
        settings,
        environment,
        model,
        here,
        first_step=plan.first_step,
        rewards_bytes=models.rewards_bytes,
        service_url=service_url,
        may_measure=effort == "measured",
    )
    return replace(plan, estimate=expected, checks=(*checks, *check_time(settings, expected)))


def check_time(settings: Settings, expected: Estimate | None) -> list[Check]:
    """Advice where a run would be ended before it can have done its steps."""
    limit = settings.run.max_minutes
    if limit is None or expected is None or expected.total_s.low / 60 <= limit:
        return []
    found = (
        f"the run takes {expected.total_s.low / 60:.3g} minutes at the least, by its estimate, and "
        f"max_minutes ends it after {limit:g}"
    )
    fix = "raise run.max_minutes, or lower trainer.total_steps"
    return [Check(name="max_minutes", ok=False, found=found, remedy=fix)]


def machine_is_busy(here: Machine | None, service_url: str | None) -> str:
    """Whether others use the machine that the run's own engine will compute on, as a sentence."""
    if here is None or service_url is not None:
        return ""
    return here.busy


def machine(device: str | None) -> Machine:
    """This machine, for a run with this device. InvalidConfig where a variable is wrong."""
    environ.check()
    return resources.this_machine(device)


def resume_check(
    resume: RunDirectory, step: int | None, settings: Settings, service_url: str | None
) -> tuple[Check, ResumePoint | None]:
    """Whether a run can go on from this one, and the checkpoint that it begins with."""
    check, point = attempt("checkpoint", lambda: resume_point(resume, settings, service_url, step))
    if point is not None:
        check = replace(check, figures={"step": point.step}, found=f"of run {resume.run_id}")
    return check, point


def place_checks(
    settings: Settings, here: Machine | None, policy: Policy, service_url: str | None
) -> list[Check]:
    """Checks of the place where the run is started: device, proxies, keys."""
    checks: list[Check] = []
    if here is not None and service_url is None:
        device, _ = attempt("device", lambda: here.check_device(settings.inference.device))
        if device.failure is not None:
            checks.append(device)
    # It brings the web server, which tools that only read need not load.
    from halteres.loopback import is_local

    if service_url is not None and not is_local(service_url):
        checks.append(attempt("proxy", environ.check_proxies)[0])
    if policy.require_keys.start:
        checks.append(attempt("keys", lambda: check_keys(policy))[0])
    return checks


def cap_checks(settings: Settings, policy: Policy, is_open: bool) -> list[Check]:
    """Checks of what the operator caps: steps, runs at once."""
    checks: list[Check] = []
    if policy.caps.max_steps is not None:
        checks.append(attempt("steps allowed", lambda: check_steps(settings, policy))[0])
    if is_open or policy.caps.max_concurrent_runs is not None:
        work = attempt("runs allowed", lambda: check_concurrency(policy, is_open=is_open))
        checks.append(work[0])
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModels:
    """The models that a run needs, as far as they were found."""

    base: RunModel | None
    is_present: Check  # of the base model
    critic: CriticModel | None
    rewards_bytes: int  # of memory, for the run's own reward server and its critic
    others: tuple[Check, ...]  # of reward models and the critic

    @property
    def shape(self) -> ModelShape | None:
        """Of the base model; None where it was not found, or a service elsewhere has it."""
        if self.base is None:
            return None
        return self.base.shape


def examine_models(settings: Settings, service_url: str | None) -> RunModels:
    """Look for the base model, the reward models and the critic. Nothing is raised."""
    is_present, base = attempt("model present", lambda: _model(settings.inference, service_url))
    reward_checks, reward_models = examine_reward_models(settings.env)
    critic_checks, critic = examine_critic(settings, base)
    return RunModels(
        base=base,
        is_present=is_present,
        critic=critic,
        rewards_bytes=server_bytes(reward_models)
        + critic_bytes(critic, settings.trainer.lora_rank),
        others=(*reward_checks, *critic_checks),
    )


def _model(inference: InferenceSettings, service_url: str | None) -> RunModel:
    if service_url is None:
        return own_model(inference)
    return given_model(inference, service_url)


def with_model(settings: Settings, model: RunModel | None, service_url: str | None) -> Settings:
    """The settings with their model by the name that means the same from any folder, if it lies on
    this disk.
    """
    if service_url is not None or model is None or settings.inference.model == model.name:
        return settings
    inference = settings.inference.model_copy(update={"model": model.name})
    return settings.model_copy(update={"inference": inference})


def with_critic(settings: Settings, critic: CriticModel | None) -> Settings:
    """The settings with the folder of their critic called as it is from anywhere, where one was
    given.
    """
    if critic is None or settings.trainer.critic is None:
        return settings
    trainer = settings.trainer.model_copy(update={"critic": str(critic.folder)})
    return settings.model_copy(update={"trainer": trainer})


def unlocking(check: Check, policy: Policy) -> Check:
    """Name in a failed check how the operator unlocks the model, where the policy holds it: the
    caller cannot change it.
    """
    failure = check.failure
    if failure is not None and failure.details.get("field") == MODEL and MODEL in policy.lock:
        failure.next = how_to_unlock(MODEL, policy)
    return check
