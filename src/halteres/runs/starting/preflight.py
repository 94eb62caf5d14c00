"""What must be true before a run begins: keys, disk, model, memory, environment, batch, rewards,
caps, and the checkpoint that it goes on from.

Each check is named and has figures and a sentence; all are made, whichever fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from halteres.config import environ
from halteres.config.operator_policy import Policy, PolicyCap, how_to_unlock, over_cap
from halteres.config.problem import Problem, refusal
from halteres.config.program import EnvironmentProgram, describe, program_of
from halteres.config.settings import ENV_WIRING, Settings
from halteres.documents import DocumentError, read_json_lines
from halteres.errors import Conflict, HalteresError, InvalidConfig, NotFound, UserError, nearest
from halteres.models import model_folder
from halteres.models.shape import ModelShape, adapter_numbers
from halteres.next_step import NextStep
from halteres.observe.metrics import Row
from halteres.process import alive
from halteres.rewards.components import read_rubric
from halteres.rewards.model_folder import RESULT, ModelFolder, read_model_folder
from halteres.runs.directory import RunDirectory, active_runs, runs_home
from halteres.runs.reading.failures import DiskFull
from halteres.runs.starting import resources
from halteres.runs.starting.resources import Workload, workload_of
from halteres.runs.starting.run_models import (
    FIELDS,
    LISTS,
    RUBRIC_FILES,
    RunModel,
    components_of,
    given_model,
    own_model,
    reward_folders,
    server_bytes,
)

T = TypeVar("T")
FREE_BYTES = 256 * 1024 * 1024
"""What a run needs at least: logs, journal and checkpoints of the built-in model take about a tenth
of it.
"""

ROLES_END_WITHIN_S = 15.0  # of a run whose supervisor was killed

MODEL = "inference.model"

# tokens: a chat's own marks and one short question take as many; no answer fits beside them
LEAST_LENGTH = 32

LARGE_MODEL, HIGH_RATE = 20_000_000, 1e-3
"""Parameters of a model that has much to forget, and a rate of LoRA that is for smaller ones, as
the default is.
"""


class MissingKey(UserError):
    """A variable that the operator's policy asks for is not set."""

    code = "missing_key"


class PreflightFailed(UserError):
    """The run cannot begin: its folder cannot be made, or its environment lacks a package."""

    code = "preflight_failed"


class TooLarge(PreflightFailed):
    """The model does not fit into the memory that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must be true, and whether it is."""

    name: str
    ok: bool = True
    found: str = ""  # what was found, a phrase
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # with which a run is refused; a failed check without one is advice
    failure: HalteresError | None = None

    @property
    def warning(self) -> str:
        """What a failed check says that no run is refused for; else empty."""
        return "" if self.ok or self.failure else f"{self.name}: {self.found}; {self.remedy}"

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer has it, without what is empty."""
        words = {
            "found": self.found,
            "problem": self.failure.sentence if self.failure else "",
            "remedy": self.remedy,
        }
        return {
            "check": self.name,
            "ok": self.ok,
            **self.figures,
            **{k: v for k, v in words.items() if v},
        }


def attempt(name: str, work: Callable[[], T]) -> tuple[Check, T | None]:
    """A check that holds if `work` succeeds, and its result."""
    try:
        return Check(name=name), work()
    except HalteresError as error:
        return Check(name=name, ok=False, failure=error), None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    run: RunDirectory
    checkpoint: dict[str, Any]  # name, step, state_path

    @property
    def step(self) -> int:
        """Optimiser steps that are done."""
        return self.checkpoint["step"]

    @property
    def wiring(self) -> dict[str, Any]:
        """What the trainer is given."""
        names = ("name", "step", "state_path", "version")
        return {name: self.checkpoint[name] for name in names if name in self.checkpoint}

    def metrics(self) -> list[Row]:
        """The old run's metrics up to here."""
        return [row for row in self.run.metrics() if row.get("step", self.step + 1) <= self.step]


def resume_point(old: RunDirectory, settings: Settings, service_url: str | None) -> ResumePoint:
    """The newest checkpoint of `old`, if a run with these settings can go on from it."""
    state = old.state()
    if state.kind == "reward":
        arguments = {"model": str(old.path / RESULT), "data": "HELD_OUT"}
        evaluate = NextStep("rl_evaluate_reward_model", arguments, "It is complete")
        following = evaluate if state.status == "completed" else state.resume("Go on with it")
        raise Conflict(f"Run {old.run_id} trains a reward model, no policy.", next=following)
    if not state.terminal:
        stop = NextStep("rl_stop_training", {"run_id": old.run_id}, "Stop it first")
        raise Conflict(f"Run {old.run_id} is still {state.status}.", next=stop)
    # A run whose supervisor was killed has processes that are just ending; their files must be at
    # rest.
    ends = time.monotonic() + ROLES_END_WITHIN_S
    while living := {
        role: str(facts["pid"]) for role, facts in state.processes.items() if alive(facts)
    }:
        if time.monotonic() > ends:
            raise Conflict(
                f"Processes of run {state.run_id} are still alive: {', '.join(living)}.",
                "Its supervisor is gone, and they have not ended by themselves.",
                f"End them (pid {', '.join(living.values())}), then resume.",
            )
        time.sleep(0.1)
    checkpoint = old.newest_checkpoint()
    if checkpoint is None:
        raise NotFound(
            f"Run {old.run_id} has no checkpoint.",
            f"It ended at step {state.step}.",
            f"Start anew with its environment, {state.environment}.",
            environment=state.environment,
        )
    _check_settings(
        old.settings(), settings, checkpoint["step"], has_completed=state.status == "completed"
    )
    if state.service_given and service_url is None:
        raise NotFound(
            f"The checkpoints of run {old.run_id} are in the service at "
            f"{state.urls.get('service')}.",
            "It used a service that it had not started.",
            f"Set TINKER_BASE_URL={state.urls.get('service')} where it is started.",
        )
    if service_url is not None and not state.service_given:
        raise NotFound(
            f"The service at {service_url} does not have the checkpoints of run {old.run_id}.",
            "That run started a service of its own.",
            "Start it where TINKER_BASE_URL is not set, and name no service.",
        )
    return ResumePoint(run=old, checkpoint=checkpoint)


def _check_settings(before: Settings, now: Settings, step: int, *, has_completed: bool) -> None:
    """Raise where the settings do not fit. All steps done and the run not completed: its last
    evaluation and its results are left to do.
    """

    def made_with(field: str, old: object, new: object) -> Problem:
        return Problem(
            field=field, got=new, rule=f"the checkpoint was made with {old!r}", suggest=(old,)
        )

    problems: list[Problem] = []
    old, new = before.inference.model, now.inference.model
    folders = [model_folder(model, environ.home() / "models") or model for model in (old, new)]
    if str(folders[0]) != str(folders[1]):
        problems.append(made_with("inference.model", old, new))
    if before.trainer.lora_rank != now.trainer.lora_rank:
        problems.append(
            made_with("trainer.lora_rank", before.trainer.lora_rank, now.trainer.lora_rank)
        )
    concludes = not has_completed and before.trainer.total_steps == now.trainer.total_steps == step
    if now.trainer.total_steps <= step and not concludes:
        rule = f"the checkpoint is at step {step}: nothing is left to do"
        more = step + before.trainer.total_steps
        problems.append(
            Problem(
                field="trainer.total_steps", got=now.trainer.total_steps, rule=rule, suggest=(more,)
            )
        )
    if problems:
        raise refusal(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that somebody wants to start."""

    settings: Settings
    policy: Policy = field(default_factory=Policy)
    service_url: str | None = None  # a service to use instead of starting one
    resume: RunDirectory | None = None
    is_open: bool = False  # it is started without the control server's token

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
    settings, policy = plan.settings, plan.policy
    checks = [attempt("variables", environ.check)[0]]
    device = attempt("device", lambda: resources.check_device(settings.inference.device))[0]
    checks += [device] if device.failure is not None and not plan.service_url else []
    # It brings the web server, which tools that only read need not load.
    from halteres.loopback import is_local

    if plan.service_url and not is_local(plan.service_url):
        checks.append(attempt("proxy", environ.check_proxies)[0])
    if policy.require_keys.start:
        checks.append(attempt("keys", lambda: check_keys(policy))[0])
    point: ResumePoint | None = None
    if (old := plan.resume) is not None:
        check, point = attempt("checkpoint", lambda: resume_point(old, settings, plan.service_url))
        checks.append(
            replace(check, figures={"step": point.step}, found=f"of run {old.run_id}")
            if point is not None
            else check
        )
    inference, url = settings.inference, plan.service_url
    has_model, model = attempt(
        "model present", lambda: given_model(inference, url) if url else own_model(inference)
    )
    shape = model.shape if model else None
    reward_checks, reward_models = examine_reward_models(settings.env)
    model_checks = [
        has_model,
        *([_memory(plan, shape, server_bytes(reward_models))] if model else []),
    ]
    for check in model_checks:
        failure = check.failure
        if failure is not None and failure.details.get("field") == MODEL and MODEL in policy.lock:
            failure.next = how_to_unlock(MODEL, policy)  # not for whoever starts a run to change
    described, environment = attempt("environment", lambda: _environment(settings))
    checks += [
        *model_checks,
        _disk(plan, shape),
        described,
        attempt("batch", lambda: check_batch(settings))[0],
    ]
    checks += [*_advice(settings, shape), *reward_checks, *examine_components(settings.env)]
    if policy.caps.max_steps is not None:
        checks.append(attempt("steps allowed", lambda: check_steps(plan))[0])
    if plan.is_open or policy.caps.max_concurrent_runs is not None:
        checks.append(
            attempt("runs allowed", lambda: check_concurrency(policy, is_open=plan.is_open))[0]
        )
    ground = None
    if model and environment and not any(check.failure for check in checks):
        ground = Ground(environment=environment, model=model, resume=point)
    return Examined(checks=tuple(checks), ground=ground)


def check_concurrency(policy: Policy, *, is_open: bool = False) -> None:
    """PolicyCap where as many runs go on as the policy allows; `is_open`: to a start without the
    token.
    """
    name, cap = policy.caps.at_once(is_open=is_open)
    active = [run.run_id for run in active_runs()]
    if cap is None or len(active) < cap:
        return
    runs = "run" if cap == 1 else "runs"
    without_token = " for a start without the token" if name == "max_open_runs" else ""
    stop = f", or stop it: halteres runs stop {active[-1]}" if active else ""
    raise PolicyCap(
        f"The policy '{policy.name}' allows {cap} {runs} at once{without_token}.",
        f"Active: {', '.join(active) or 'none'}.",
        f"Wait for one to end{stop}",
        active_runs=active,
        cap=name,
        limit=cap,
    )


def check_steps(plan: Plan) -> None:
    """PolicyCap where the run has more steps than the policy allows."""
    if (problem := over_cap(plan.policy, plan.settings.trainer.total_steps)) is not None:
        raise refusal([problem], f"Set trainer.total_steps to {problem.limit:g} or less.")


def check_batch(settings: Settings) -> None:
    """InvalidConfig where a batch is not made of whole groups."""
    batch, group = settings.env.get("batch_size"), settings.env.get("group_size")
    if isinstance(batch, int) and isinstance(group, int) and group > 0 and batch % group:
        rule = f"must be a multiple of group_size {group}"
        raise refusal([Problem(field="env.batch_size", got=batch, rule=rule)])


def check_keys(policy: Policy) -> None:
    """MissingKey where a variable is not set that the policy asks for to start."""
    needed = policy.require_keys.start
    missing = [name for name in needed if not environ.is_set(name)]
    if missing:
        raise MissingKey(
            f"{missing[0]} not set. Add it to ~/.hermes/.env, or export it.",
            f"The policy '{policy.name}' asks for {', '.join(needed)}.",
            "Set it where these tools are started.",
            field=missing[0],
            missing=missing,
        )


def _memory(plan: Plan, shape: ModelShape | None, beside: int) -> Check:
    """Of the GPU where the engine will use one; `beside`: bytes of the run's reward server."""
    machine, work = resources.look(plan.settings.inference.device), plan.demands
    name = "gpu memory" if machine.gpu and shape else "memory"
    free = (machine.model_memory if shape else machine.memory).free
    batch_bytes = resources.batch_bytes(work)
    needed = resources.OTHERS_BYTES + batch_bytes
    if shape is not None:
        needed = resources.need(shape, work, on_gpu=machine.gpu is not None).total
    needed += beside if name == "memory" else 0  # a reward server computes on the CPU
    figures = {"need_gb": resources.gb(needed), "free_gb": resources.gb(free)}
    if free is None or needed <= free:
        return Check(name=name, figures=figures)
    what = (
        f"Too little {name}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free."
    )
    if name == "memory" and batch_bytes > needed / 2:  # it is the batch that does not fit
        why = f"A batch is {work.batch_size:,} sequences of up to {work.positions:,} tokens."
        failure = TooLarge(what, why, "Lower env.batch_size.", field="env.batch_size", **figures)
    else:
        rewards = f" The run's reward models take {beside / 1e9:.1f} GB of it." if beside else ""
        why = f"The model is '{plan.settings.inference.model}'.{rewards}"
        fix = "Take a smaller inference.model, or end what else uses the memory."
        failure = TooLarge(what, why, fix, field=MODEL, **figures)
    return Check(name=name, ok=False, figures=figures, failure=failure)


def _disk(plan: Plan, shape: ModelShape | None) -> Check:
    home = runs_home()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    disk, needed, trainer = shutil.disk_usage(there), FREE_BYTES, plan.settings.trainer
    free = disk.free
    # /proc and the like have none
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK) or disk.total == 0:
        why = f"{there} {'takes no new files' if there.is_dir() else 'is no folder'}."
        failure = PreflightFailed(
            f"The folder {home} cannot be made.", why, "Set HALTERES_HOME to a folder of yours."
        )
        return Check(name="disk", ok=False, failure=failure)
    if shape is not None:  # checkpoints: weights and two moments each
        intervals = (trainer.checkpoint_every, trainer.eval_every)
        count = 2 + sum(trainer.total_steps // every for every in intervals if every)
        needed += count * 3 * resources.NUMBER * adapter_numbers(shape, trainer.lora_rank)
    figures = {"need_gb": resources.gb(needed), "free_gb": resources.gb(free)}
    if free >= needed:
        return Check(name="disk", figures=figures)
    failure = DiskFull(
        f"Too little room in {home}.",
        f"{free / 1e6:.0f} MB are free; a run needs {needed / 1e6:.0f} MB.",
        "Make room, or set HALTERES_HOME to another disk.",
        **figures,
    )
    return Check(name="disk", ok=False, figures=figures, failure=failure)


def _environment(settings: Settings) -> EnvironmentProgram:
    environment = program_of(settings.run)
    values = {name: value for name, value in settings.env.items() if name not in ENV_WIRING}
    description = describe(environment, values)
    if description.missing:  # it may have been installed meanwhile
        description = describe(environment, values, afresh=True)
    if description.problems:
        raise refusal(description.problems)
    for missing in description.missing:
        what = f"The environment {environment.name} needs the package {missing.package}."
        raise PreflightFailed(
            what,
            f"{environment.interpreter} does not have it.",
            missing.fix,
            package=missing.package,
        )
    data = settings.env.get("dataset")
    if isinstance(data, str) and os.path.isabs(data) and not os.path.exists(data):
        raise refusal(
            [Problem(field="env.dataset", got=data, rule="there is no such file or folder")]
        )
    if isinstance(data, str) and os.path.isabs(data) and not description.is_foreign:
        check_lines(Path(data))
    if description.is_foreign and settings.trainer.deterministic:
        rule = (
            "an environment of atroposlib's draws and samples in an order of its own, which "
            "cannot be repeated"
        )
        raise refusal([Problem(field="trainer.deterministic", got=True, rule=rule)])
    return replace(environment, is_foreign=description.is_foreign)


def check_lines(data: Path) -> None:
    """Refuse a data set whose lines are not JSON: the environment would fail at them as soon as it
    begins.
    """
    files = [data] if data.suffix == ".jsonl" else []
    if data.is_dir():
        # Other files of a folder are not read.
        files = [file for file in (data / "train.jsonl", data / "test.jsonl") if file.exists()]
    for file in files:
        try:
            for _ in read_json_lines(file):
                pass
        except OSError as error:
            problem = Problem(
                field="env.dataset", got=str(file), rule=f"it cannot be read: {error.strerror}"
            )
            raise refusal([problem]) from error
        except DocumentError as error:
            raise refusal([Problem(field="env.dataset", got=str(file), rule=str(error))]) from error


def _advice(settings: Settings, shape: ModelShape | None) -> Iterator[Check]:
    """What no run is refused for: no room for prompts beside their answers, a large model at a
    small one's rate.
    """
    longest, answer = settings.env.get("max_token_length"), settings.env.get("max_new_tokens")
    if isinstance(longest, int) and isinstance(answer, int) and 0 < longest <= answer:
        found = (
            f"prompt and answer together stay below max_token_length {longest}; "
            f"max_new_tokens is {answer}"
        )
        fix = "raise max_token_length above max_new_tokens by the length of a prompt"
        yield Check(name="room for answers", ok=longest > LEAST_LENGTH, found=found, remedy=fix)
    rate = settings.trainer.learning_rate
    if shape is not None and shape.parameters >= LARGE_MODEL and rate >= HIGH_RATE:
        found = (
            f"{rate:g} suits the built-in model of 0.9 M parameters; this model has "
            f"{shape.parameters / 1e6:.0f} M"
        )
        fix = (
            "set trainer.learning_rate to 3e-4 or less, from 1,000 M parameters on to 1e-4 or less"
        )
        yield Check(name="learning rate", ok=False, found=found, remedy=fix)


def examine_reward_models(env: Mapping[str, Any]) -> tuple[list[Check], list[ModelFolder]]:
    """A check per folder that an environment's settings name as a reward model, and those that are
    one.
    """
    checks, models = list[Check](), list[ModelFolder]()
    for folder in reward_folders(env):
        check, model = attempt("reward model", lambda folder=folder: read_model_folder(folder))
        if model is not None:
            models.append(model)
        if check.failure is not None:
            field = next(name for name in FIELDS if folder in reward_folders({name: env.get(name)}))
            check.failure.details.setdefault("field", f"env.{field}")
        checks.append(replace(check, found=str(model.path) if model else ""))
    return checks, models


def examine_components(env: Mapping[str, Any]) -> list[Check]:
    """A check per function in a file and per rubric, which the environment would fail at as soon as
    it begins.

    A function of a module is the environment's to find: its interpreter and its folder are others.
    """
    checks = list[Check]()
    for name in LISTS:
        for component in components_of(env.get(name)):
            function, rubric = component.get("function"), component.get("rubric")
            if isinstance(function, str) and function.rpartition(":")[0].endswith(".py"):
                checks.append(
                    attempt("reward function", lambda given=function: _check_function(given))[0]
                )
            if rubric and (
                not isinstance(rubric, str) or "\n" in rubric or rubric.endswith(RUBRIC_FILES)
            ):
                checks.append(attempt("rubric", lambda given=rubric: read_rubric(given))[0])
            for failure in (check.failure for check in checks if check.failure):
                failure.details.setdefault("field", f"env.{name}")
    return checks


def _check_function(function: str) -> None:
    place, _, name = function.rpartition(":")
    file = Path(place).expanduser()
    try:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except FileNotFoundError as error:
        beside = nearest(file.name, [one.name for one in file.parent.glob("*.py")])
        next = (
            f"Did you mean {file.parent / beside}?" if beside else "Name the file that defines it."
        )
        raise NotFound(
            f"There is no file {file} for the reward function '{name}'.", next=next
        ) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidConfig(
            f"The reward function '{function}' cannot be read.", f"{error}.", "Mend it."
        ) from error
    if not re.search(rf"\b{re.escape(name)}\b|import \*", source):
        defined = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        why, guess = f"It defines {', '.join(defined) or 'none'}.", nearest(name, defined)
        next = f"Did you mean '{guess}'?" if guess else ""
        raise InvalidConfig(f"There is no function '{name}' in {file}.", why, next)
