"""What a training on a file will be: its settings, its rows as tokens, its steps, and everything
that it needs. The plan is a `RunPlan`, of a run without an environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from halteres.config.file_training import (
    FileTraining,
    ResolvedFile,
    effective,
    resolve_file_training,
)
from halteres.config.files import Sources
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig
from halteres.models.shape import ModelShape
from halteres.models.training_defaults import rate_for
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.checks import (
    Check,
    attempt,
    check_disk,
    check_memory,
    checkpoint_bytes,
)
from halteres.runs.planning.estimate import Estimate, estimate_on_file
from halteres.runs.planning.models import (
    RunModel,
    given_model,
    models_home,
    own_model,
    tokenizer_folder,
)
from halteres.runs.planning.plan import (
    Effort,
    RunPlan,
    cap_checks,
    check_time,
    machine,
    machine_is_busy,
    place_checks,
    resume_check,
    unlocking,
    with_model,
)
from halteres.runs.planning.resources import Machine
from halteres.tokenizer import load_tokenizer
from halteres.training.file_data import FileData, check_digest, read_data, with_digest

RATE = "trainer.learning_rate"

EVALUATIONS, CHECKPOINTS = 8, 10
"""How often at most held-out rows are evaluated after the first step, and checkpoints written,
where nothing else was asked for.
"""

_MADE_WITH = ("trainer.learning_rate", "trainer.lora_rank", "trainer.max_token_trainer_length")
"""Settings that may have been proposed for the base model: a run that goes on keeps them."""

_BATCHES_DEPEND_ON = (
    "run.seed",
    "data.eval_data",
    "data.hold_out",
    "data.most_held_out",
    "data.batch_size",
    "data.packing",
)
"""Settings that say which rows make the batch of a step: a run that goes on keeps them."""


def plan_file_run(
    resolved: ResolvedFile,
    *,
    resume: RunDirectory | None = None,
    resume_step: int | None = None,
    service_url: str | None = None,
    is_open: bool = False,
    effort: Effort = "none",
) -> RunPlan:
    """Look at everything that a training on a file needs. Nothing is changed, nothing raised.

    Args:
        resolved: its settings, from `resolve_file_training`.
        resume: a run to go on from.
        resume_step: the step of its checkpoint; None: its newest.
        service_url: a training service to use instead of starting one; the run never stops it.
        is_open: the run is started without the control server's token.
        effort: for an estimate of time and memory.
    """
    policy, settings, training = resolved.policy, resolved.settings, resolved.training
    service_url = (service_url or "").rstrip("/") or None
    variables, here = attempt("variables", lambda: machine(settings.inference.device))
    checks = [variables, *place_checks(settings, here, policy, service_url)]

    has_model, model = attempt("model present", lambda: _model(settings, service_url))
    checks.append(unlocking(has_model, policy))
    shape = model.shape if model else None
    settings, sources = with_proposals(resolved, shape)
    data: FileData | None = None
    if model is not None:
        has_data, data = attempt("data", lambda: _data(training, settings, model))
        if data is not None:
            settings = with_steps(settings, training, data, resolved.sources)
            training = _with_tokenizer(with_digest(training, data))
            has_data = replace(has_data, figures=data_figures(data))
        checks.append(has_data)
        checks += [
            Check(name="data", ok=False, found=warning, remedy="see to these rows")
            for warning in (data.warnings if data else ())
        ]
    if data is not None:
        checks.append(attempt("steps", lambda: _check_warmup(settings))[0])

    point = None
    if resume is not None:
        check, point = resume_check(resume, resume_step, settings, service_url)
        checks.append(check)
    if here is not None and model is not None and service_url is None:
        checks.append(unlocking(check_memory(settings, here, shape, 0), policy))
    checks.append(check_disk(checkpoint_bytes(settings, shape)))
    checks += cap_checks(settings, policy, is_open)

    plan = RunPlan(
        settings=with_model(settings, model, service_url),
        sources=sources,
        policy=policy,
        service_url=service_url,
        is_open=is_open,
        environment=None,
        training=training,
        model=model,
        resume=point,
        checks=tuple(checks),
        busy=machine_is_busy(here, service_url),
    )
    if effort == "none" or plan.refusal is not None:
        return plan
    # a check would have failed
    assert data and model and here  # noqa: S101 - for the type checker
    expected = _estimate(plan, data, model, here, effort)
    return replace(plan, estimate=expected, checks=(*checks, *check_time(settings, expected)))


def resolve_resumed(
    run: RunDirectory, edits: Sequence[str] = (), changes: dict[str, Any] | None = None
) -> ResolvedFile:
    """The settings of a training on a file that is gone on from: its own, with edits."""
    settings, training = run.settings(), FileTraining.read(run.path)
    base = ResolvedFile(
        settings=settings,
        training=training,
        sources=dict.fromkeys((*run.own_settings(inherited=True), *_MADE_WITH), "resume"),
    )
    resolved = resolve_file_training(training.method, None, edits, changes=changes, base=base)
    before, now = _values(base), _values(resolved)
    kept: list[str] = [*_BATCHES_DEPEND_ON]
    if resolved.training.too_long == "drop":
        # it says which rows are left out
        kept.append("trainer.max_token_trainer_length")
    for key in kept:
        if before.get(key) != now.get(key):
            raise InvalidConfig(
                f"{key} cannot be changed in a run that goes on.",
                "Which rows make the batch of a step depends on it.",
                "Start a new run.",
                field=key,
            )
    return resolved


def _values(resolved: ResolvedFile) -> dict[str, Any]:
    return {key: value for key, value, _ in effective(resolved)}


def with_proposals(resolved: ResolvedFile, shape: ModelShape | None) -> tuple[Settings, Sources]:
    """The settings with what suits the base model where nothing else was given."""
    settings, sources = resolved.settings, dict(resolved.sources)
    changes: dict[str, Any] = {}
    rate = rate_for(settings.inference.model, models_home(), resolved.training.method)
    if rate is not None and not resolved.is_given(RATE):
        changes["learning_rate"] = rate
        sources[RATE] = "model"
    if shape is not None:
        longest = min(settings.trainer.max_token_trainer_length, shape.context)
        changes["max_token_trainer_length"] = longest
    trainer = settings.trainer.model_copy(update=changes)
    return settings.model_copy(update={"trainer": trainer}), sources


def with_steps(
    settings: Settings, training: FileTraining, data: FileData, given: Sources
) -> Settings:
    """The settings with the number of steps that the epochs come to, and evaluations and
    checkpoints spread over them, where nothing else was given.
    """
    changes: dict[str, Any] = {}
    total = settings.trainer.total_steps
    source = given.get("trainer.total_steps")
    # of a run that goes on, other epochs are other steps
    has_other_epochs = source == "resume" and given.get("data.epochs") == "edit"
    if source is None or has_other_epochs:
        changes["total_steps"] = total = data.steps(training)
    if "trainer.eval_every" not in given:
        changes["eval_every"] = ceil(total / EVALUATIONS)
    if "trainer.checkpoint_every" not in given:
        changes["checkpoint_every"] = max(10, total // CHECKPOINTS)
    trainer = settings.trainer.model_copy(update=changes)
    return settings.model_copy(update={"trainer": trainer})


def data_figures(data: FileData) -> Row:
    """What a check says of the rows."""
    lengths = sorted(row.longest for row in data.train)
    return {
        "rows": len(data.train),
        "held_out": len(data.held_out),
        "dropped": data.num_dropped,
        "tokens": data.num_tokens,
        "answer_tokens": data.num_answers,
        "tokens_median": lengths[len(lengths) // 2],
        "tokens_longest": lengths[-1],
    }


def _model(settings: Settings, service_url: str | None) -> RunModel:
    if service_url is None:
        return own_model(settings.inference)
    return given_model(settings.inference, service_url)


def _data(training: FileTraining, settings: Settings, model: RunModel) -> FileData:
    """The rows as the run will have them. Raises as `read_data`, and NotFound without a
    tokenizer.
    """
    folder = tokenizer_folder(training.tokenizer or model.tokenizer)
    data = read_data(
        training, load_tokenizer(str(folder)), settings.trainer.max_token_trainer_length
    )
    check_digest(data, training)
    return data


def _with_tokenizer(training: FileTraining) -> FileTraining:
    """The training with its tokenizer's folder, by which the trainer finds it too."""
    if training.tokenizer is None:
        return training
    return training.model_copy(update={"tokenizer": str(tokenizer_folder(training.tokenizer))})


def _check_warmup(settings: Settings) -> None:
    """InvalidConfig where the warm-up has as many steps as the run."""
    if settings.trainer.warmup_steps >= settings.trainer.total_steps:
        raise InvalidConfig(
            f"warmup_steps is {settings.trainer.warmup_steps}, and the run has "
            f"{settings.trainer.total_steps} steps.",
            "",
            "Set trainer.warmup_steps lower.",
            field="trainer.warmup_steps",
        )


def _estimate(
    plan: RunPlan, data: FileData, model: RunModel, here: Machine, effort: Effort
) -> Estimate | None:
    training, settings = plan.training, plan.settings
    assert training is not None  # noqa: S101 - for the type checker
    tokens = data.num_tokens / len(data.train) * training.batch_size
    return estimate_on_file(
        settings,
        model,
        here,
        tokens_per_step=tokens,
        held_out_tokens=sum(row.num_tokens for row in data.held_out),
        forwards=2 if training.method == "dpo" else 0,
        first_step=plan.first_step,
        service_url=plan.service_url,
        may_measure=effort == "measured",
    )
