"""What must be true before a run begins: keys, disk, memory, environment, rewards, caps.

Each check is named and has figures and a sentence.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from halteres.config import environ
from halteres.config.discovery import BUILTIN_FOLDER
from halteres.config.operator_policy import Policy, PolicyCap, over_cap
from halteres.config.problem import Problem, refusal
from halteres.config.program import EnvironmentProgram, describe
from halteres.config.resolution import Resolved
from halteres.config.settings import ENV_WIRING, Settings
from halteres.documents import DocumentError, read_json_lines
from halteres.environments.cage import cage_missing, try_cage
from halteres.errors import (
    EnvironmentFailed,
    HalteresError,
    InvalidConfig,
    NotFound,
    UserError,
    nearest,
)
from halteres.models import model_folder
from halteres.models.shape import ModelShape, adapter_numbers
from halteres.models.training_defaults import (
    HIGH_RATE,
    HUGE_MODELS_RATE,
    LARGE_MODEL,
    LARGE_MODELS_RATE,
    proposed_rate,
)
from halteres.rewards.components import read_rubric
from halteres.rewards.model_folder import ModelFolder, read_model_folder
from halteres.runs.directory import active_runs, runs_home
from halteres.runs.planning import resources
from halteres.runs.planning.models import (
    FIELDS,
    LISTS,
    RUBRIC_FILES,
    CriticModel,
    RunModel,
    components_of,
    critic_model,
    models_home,
    reward_folders,
    tokenizer_folder,
)
from halteres.runs.planning.resources import Machine, gb, multiplies_bfloat16, workload_of
from halteres.runs.reading.failures import DiskFull

T = TypeVar("T")
FREE_BYTES = 256 * 1024 * 1024
"""What a run needs at least: logs, journal and checkpoints of the built-in model take about a tenth
of it.
"""

MODEL = "inference.model"
AGENT = BUILTIN_FOLDER / "agent_program.py"

# tokens: a chat's own marks and one short question take as many, and leave no room for an answer
LEAST_LENGTH = 32


def proposed_settings(shape: ModelShape) -> dict[str, Any]:
    """Settings of a run, by name, that a base model of this shape wants in place of the defaults,
    which are the built-in model's.
    """
    if shape.parameters < LARGE_MODEL:
        return {}
    found: dict[str, Any] = {"learning_rate": proposed_rate(shape.parameters, "rl")}
    if multiplies_bfloat16():
        found["dtype"] = "bfloat16"
    return found


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
        if self.ok or self.failure:
            return ""
        return f"{self.name}: {self.found}; {self.remedy}"

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


def check_concurrency(policy: Policy, *, is_open: bool = False) -> None:
    """PolicyCap where as many runs go on as the policy allows; `is_open`: to a start without the
    token.
    """
    name, cap = policy.caps.at_once(is_open=is_open)
    active = [run.run_id for run in active_runs()]
    if cap is None or len(active) < cap:
        return
    runs = "runs"
    if cap == 1:
        runs = "run"
    whose = ""
    if name == "max_open_runs":
        whose = " for a start without the token"
    stop = ""
    if active:
        stop = f", or stop it: halteres runs stop {active[-1]}"
    raise PolicyCap(
        f"The policy '{policy.name}' allows {cap} {runs} at once{whose}.",
        f"Active: {', '.join(active) or 'none'}.",
        f"Wait for one to end{stop}",
        active_runs=active,
        cap=name,
        limit=cap,
    )


def check_steps(settings: Settings, policy: Policy) -> None:
    """PolicyCap where the run has more steps than the policy allows."""
    problem = over_cap(policy, settings.trainer.total_steps)
    if problem is not None:
        raise refusal([problem], f"Set trainer.total_steps to {problem.limit:g} or less.")


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


def check_memory(
    settings: Settings, here: Machine, shape: ModelShape | None, rewards_bytes: int
) -> Check:
    """Whether a run fits: into the GPU's memory where the engine will use one.

    Args:
        settings: of the run.
        here: this machine.
        shape: of the base model; None where a service elsewhere has it.
        rewards_bytes: what the run's own reward server and critic need.
    """
    work = workload_of(settings)
    is_on_gpu = here.gpu is not None
    name, free = "memory", here.memory.free
    batch_bytes = resources.batch_bytes(work)
    needed = resources.OTHERS_BYTES + batch_bytes
    if shape is not None:
        free = here.model_memory.free
        needed = resources.need(shape, work, on_gpu=is_on_gpu).total
        if is_on_gpu:
            name = "gpu memory"
            needed += int(work.vllms * work.vllm_memory * (here.model_memory.total or 0))
    if name == "memory":
        # a reward server and a critic compute on the CPU
        needed += rewards_bytes
    figures = {"need_gb": gb(needed), "free_gb": gb(free)}
    if free is None or needed <= free:
        return Check(name=name, figures=figures)
    what = _too_little(name, needed, free)
    if name == "memory" and batch_bytes > needed / 2:  # it is the batch that does not fit
        why = f"A batch is {work.batch_size:,} sequences of up to {work.positions:,} tokens."
        failure = TooLarge(what, why, "Lower env.batch_size.", field="env.batch_size", **figures)
    else:
        why = f"The model is '{settings.inference.model}'."
        if rewards_bytes:
            why += f" Its reward models and critic take {rewards_bytes / 1e9:.1f} GB of it."
        fix = "Take a smaller inference.model, or end what else uses the memory."
        failure = TooLarge(what, why, fix, field=MODEL, **figures)
    return Check(name=name, ok=False, figures=figures, failure=failure)


def _too_little(name: str, needed: int, free: int) -> str:
    return (
        f"Too little {name}: about {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free."
    )


def check_rewards_memory(
    settings: Settings, here: Machine, shape: ModelShape | None, rewards_bytes: int
) -> list[Check]:
    """Whether the reward models and the critic of a run, which compute on the CPU, fit there where
    a GPU holds the policy. Elsewhere `check_memory` counts them.

    Args:
        settings: of the run.
        here: this machine.
        shape: of the base model; None where a service elsewhere has it.
        rewards_bytes: what the run's own reward server and critic need.
    """
    free = here.memory.free
    if here.gpu is None or shape is None or not rewards_bytes or free is None:
        return []
    batch_bytes = resources.batch_bytes(workload_of(settings))
    needed = resources.OTHERS_BYTES + batch_bytes + rewards_bytes
    figures = {"need_gb": gb(needed), "free_gb": gb(free)}
    if needed <= free:
        return [Check(name="memory", figures=figures)]
    failure = TooLarge(
        _too_little("memory", needed, free),
        "The run's reward models and its critic compute on the CPU.",
        "Take smaller ones, or end what else uses the memory.",
        **figures,
    )
    return [Check(name="memory", ok=False, figures=figures, failure=failure)]


def checkpoint_bytes(
    settings: Settings, shape: ModelShape | None, critic: CriticModel | None = None
) -> int:
    """What the checkpoints of a run take on the disk: weights and two moments each.

    Args:
        settings: of the run.
        shape: of the base model; None: a service elsewhere has it, and keeps its checkpoints.
        critic: of the run, whose states are always kept here.
    """
    trainer = settings.trainer
    kept = [shape, critic.shape if critic is not None else None]
    intervals = (trainer.checkpoint_every, trainer.eval_every)
    count = 2 + sum(trainer.total_steps // every for every in intervals if every)
    numbers = sum(adapter_numbers(one, trainer.lora_rank) for one in kept if one is not None)
    return count * 3 * resources.NUMBER * numbers


def check_disk(kept_bytes: int) -> Check:
    """Whether there is a folder for runs, and room in it for one that keeps so many bytes of
    weights.
    """
    home = runs_home()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    disk = shutil.disk_usage(there)
    free, needed = disk.free, FREE_BYTES + kept_bytes
    # /proc and the like have none
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK) or disk.total == 0:
        why = f"{there} {'takes no new files' if there.is_dir() else 'is no folder'}."
        failure = PreflightFailed(
            f"The folder {home} cannot be made.", why, "Set HALTERES_HOME to a folder of yours."
        )
        return Check(name="disk", ok=False, failure=failure)
    figures = {"need_gb": gb(needed), "free_gb": gb(free)}
    if free >= needed:
        return Check(name="disk", figures=figures)
    failure = DiskFull(
        f"Too little room in {home}.",
        f"{free / 1e6:.0f} MB are free; a run needs {needed / 1e6:.0f} MB.",
        "Make room, or set HALTERES_HOME to another disk.",
        **figures,
    )
    return Check(name="disk", ok=False, figures=figures, failure=failure)


def check_environment(resolved: Resolved) -> EnvironmentProgram:
    """The environment, if it can be run with these settings.

    Raises:
        InvalidConfig: what it says of its settings, or its data, cannot be used, or there is no
            cage for its scorer.
        PreflightFailed: its Python lacks a package.
    """
    settings, environment = resolved.settings, resolved.environment
    description = resolved.description
    if description.missing:
        # it may have been installed meanwhile
        values = {name: one for name, one in settings.env.items() if name not in ENV_WIRING}
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
    check_cage(resolved)
    return environment


def check_cage(resolved: Resolved) -> None:
    """Refuse a cage for scorers, where it is asked for, that this machine or this environment does
    not have; one is started with the environment's Python, its file and its model's folder.

    Raises:
        InvalidConfig: it does not.
    """
    description, given = resolved.description, resolved.settings.env.get("cage")
    policy = description.config.get("cage", given)
    if policy != "on":
        return
    rule = None
    if description.is_foreign:
        rule = (
            "an environment of atroposlib's scores in the process that samples, and its scorer "
            "cannot be separated from it; an environment of ours has `score` for that"
        )
    elif (missing := cage_missing()) is not None:
        rule = f"this machine has no cages for scorers: {missing}"
    elif (failure := cage_failure(resolved)) is not None:
        rule = f"the cage for its scorers does not start: {failure}"
    if rule is not None:
        raise refusal([Problem(field="env.cage", got=policy, rule=rule)])


def cage_failure(resolved: Resolved) -> str | None:
    """Why the cage of the environment's scorers does not start; None: it does."""
    readable = [resolved.environment.path]
    folder = model_folder(resolved.settings.inference.model, models_home())
    if folder is not None:
        readable.append(folder)
    try:
        return try_cage(resolved.environment.interpreter, *readable)
    except EnvironmentFailed as failure:
        return str(failure)


def check_lines(data: Path) -> None:
    """Refuse a data set whose lines are not JSON: the environment would fail at them as soon as it
    begins.
    """
    files = []
    if data.suffix == ".jsonl":
        files = [data]
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


def advice(
    settings: Settings,
    shape: ModelShape | None,
    here: Machine | None,
    service_url: str | None,
) -> Iterator[Check]:
    """What no run is refused for: no room for prompts next to their answers, a temperature that
    nothing corrects, more tokens than the model reads, a large model at a small one's rate or in
    float32.

    Args:
        here: this machine, where it could be looked at.
        service_url: of a service elsewhere, on a machine that is not known.
    """
    longest, answer = settings.env.get("max_token_length"), settings.env.get("max_new_tokens")
    if isinstance(longest, int) and isinstance(answer, int) and 0 < longest <= answer:
        found = (
            f"prompt and answer together stay below max_token_length {longest}; "
            f"max_new_tokens is {answer}"
        )
        fix = "raise max_token_length above max_new_tokens by the length of a prompt"
        yield Check(name="room for answers", ok=longest > LEAST_LENGTH, found=found, remedy=fix)
    temperature = settings.env.get("temperature")
    is_corrected = service_url is None and settings.corrects_temperature
    if isinstance(temperature, int | float) and temperature != 1 and not is_corrected:
        found = (
            f"answers are sampled at temperature {temperature:g}, and no ratio corrects that "
            "another distribution is trained: the gradient is biased"
        )
        fix = "set env.temperature to 1"
        if service_url is None and temperature > 0:
            fix += ", or trainer.loss to importance_sampling"
        yield Check(name="temperature", ok=False, found=found, remedy=fix)
    if shape is not None and isinstance(longest, int) and longest > shape.context:
        found = f"prompt and answer may have {longest} tokens, and the model reads {shape.context}"
        fix = f"set env.max_token_length to {shape.context} or less"
        yield Check(name="context", ok=False, found=found, remedy=fix)
    if shape is None or shape.parameters < LARGE_MODEL:
        return
    rate = settings.trainer.learning_rate
    if rate >= HIGH_RATE:
        found = (
            f"{rate:g} suits the built-in model of 0.9 M parameters; this model has "
            f"{shape.parameters / 1e6:.0f} M"
        )
        fix = (
            f"set trainer.learning_rate to {LARGE_MODELS_RATE:g} or less, from 1,000 M parameters "
            f"on to {HUGE_MODELS_RATE:g} or less"
        )
        yield Check(name="learning rate", ok=False, found=found, remedy=fix)
    is_on_cpu = service_url is None and here is not None and here.gpu is None
    is_float32 = settings.inference.dtype in ("auto", "float32")
    if is_on_cpu and is_float32 and multiplies_bfloat16():
        found = "float32, and this processor multiplies bfloat16 in hardware"
        fix = "set inference.dtype to bfloat16: shorter steps, half the memory for the weights"
        yield Check(name="dtype", ok=False, found=found, remedy=fix)


def check_relay(resolved: Resolved, model: RunModel | None) -> Iterator[Check]:
    """What a run needs, and does without, whose service speaks the Tinker API alone: a relay of its
    own samples that by the SDK. Nothing of any other run.
    """
    if model is None or not model.is_relayed:
        return
    settings, description = resolved.settings, resolved.description
    yield attempt("tokenizer", lambda: tokenizer_folder(model.tokenizer, settings="env"))[0]
    problems: list[Problem] = []
    alone = "the service speaks the Tinker API alone"
    if settings.trainer.deterministic:
        rule = f"{alone}, and nothing says that it draws the same tokens for the same seed again"
        problems.append(Problem(field="trainer.deterministic", got=True, rule=rule))
    if resolved.environment.path == AGENT:
        rule = f"{alone}, and programs play over the gateway of a service of Halteres"
        problems.append(Problem(field="run.environment", got=resolved.environment.name, rule=rule))
    longest = description.config.get("max_token_length", settings.env.get("max_token_length"))
    if model.context and isinstance(longest, int) and longest > model.context:
        rule = f"the service's model reads {model.context} tokens"
        problems.append(Problem(field="env.max_token_length", got=longest, rule=rule))
    if problems:
        failure = refusal(problems)
        yield Check(name="sampling", ok=False, failure=failure)
        return
    found = f"{alone}: a relay of the run's own samples it by the SDK"
    fix = (
        "expect it to compute otherwise than what trains: importance is truncated, unless "
        "trainer.correction says otherwise"
    )
    yield Check(name="sampling", ok=False, found=found, remedy=fix)


def examine_reward_models(env: Mapping[str, Any]) -> tuple[list[Check], list[ModelFolder]]:
    """A check for each folder that an environment's settings name as a reward model, and the reward
    models that were found.
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


def examine_critic(
    settings: Settings, model: RunModel | None
) -> tuple[list[Check], CriticModel | None]:
    """A check of the critic, where advantages are made by one, and the model that it begins
    from.
    """
    if not settings.trainer.uses_critic or model is None:
        return [], None
    check, critic = attempt("critic", lambda: critic_model(settings.trainer, model))
    if critic is not None:
        check = replace(check, found=str(critic.folder))
    return [check], critic


def examine_components(env: Mapping[str, Any]) -> list[Check]:
    """A check for each reward function in a file, and for each rubric: with a wrong one the
    environment would fail as soon as it begins.

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
        next = "Name the file that defines it."
        if beside:
            next = f"Did you mean {file.parent / beside}?"
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
        next = ""
        if guess:
            next = f"Did you mean '{guess}'?"
        raise InvalidConfig(f"There is no function '{name}' in {file}.", why, next)
