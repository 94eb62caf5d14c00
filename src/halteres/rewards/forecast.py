"""What a training of a reward model will take, from its data and the base model's shape: steps,
memory, room on the disk. Nothing here loads weights or needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halteres.errors import InvalidData
from halteres.models.shape import ModelShape, NotWhole, read_shape
from halteres.rewards.model_folder import read_reward_file, template_for
from halteres.rewards.training_plan import (
    RenderedRows,
    RewardConfig,
    TrainingPlan,
    check_inputs,
    length_quantiles,
    objective_weights,
    render_rows,
)
from halteres.tokenizer import Tokenizer

# of a parameter in fp32: weight, gradient and two moments; a weight alone; of one that is trained,
# what a checkpoint has of it: the weight and two moments
ADAM_BYTES, FROZEN_BYTES, SAVED_BYTES = 16, 4, 12
PROCESS_BYTES = 500_000_000  # what torch and transformers take before any weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a training will take, from data and shape alone."""

    num_parameters: int | None  # None: no model of a family whose shape is known
    learning_rate: float | None
    batch_size: int | None  # rows
    num_rows: int
    num_held_out: int
    total_steps: int | None
    lengths: Mapping[str, int]  # tokens of a row's longer side: quantiles
    rows_too_long: int  # than max_length
    tokens_lost: int
    memory_gb: float | None  # about
    # about: of the finished model and of all checkpoints that are kept
    disk_gb: float | None
    warnings: tuple[str, ...]


def forecast(plan: TrainingPlan, folder: Path) -> Forecast:
    """What a training will take, without a weight of the base model in `folder`. It raises whatever
    the training would be refused for before its first step.
    """
    train, held_out, warnings = plan.preferences()
    try:
        shape = read_shape(folder)
    except NotWhole as error:
        next = "Download or save it again, or name another."
        raise InvalidData(f"The base model in {folder} is not whole.", f"{error}.", next) from error
    except (OSError, ValueError):  # a file is missing, or it is of an unknown family
        shape = None
    if shape is None:
        settings = plan.settings
    else:
        settings = plan.settings.settled(shape.parameters)
    stored = read_reward_file(folder)
    objective_weights(
        settings, stored.objective_weights if stored is not None else None, train, held_out
    )
    check_inputs(settings, train, held_out)
    tokenizer = Tokenizer(folder)
    how = {"max_length": settings.max_length, "truncation": settings.truncation}
    template = template_for(tokenizer, eos_token=settings.eos_token, **how)
    rendered = render_rows(train, template, tokenizer, settings.tie_policy)
    warnings = (*warnings, *rendered.report.alike_sentences(settings.max_length))
    if held_out is not None:
        render_rows(held_out, template, tokenizer, settings.tie_policy)
    if idle := rendered.report.ties_dropped:
        warnings = (
            *warnings,
            f"{train.source} holds rows that teach nothing, ties alone or of weight 0: {idle}.",
        )
    batch, num_rows = settings.per_device_train_batch_size, len(rendered.rows)
    steps, per_epoch = None, None
    if settings.max_steps > 0:
        steps = settings.max_steps
    if batch:
        per_epoch = math.ceil(num_rows / (batch * settings.gradient_accumulation_steps))
    if steps is None and per_epoch:
        steps = math.ceil(settings.num_train_epochs * per_epoch)
    memory_gb, disk_gb = None, None
    if shape is not None:
        memory_gb = round(_memory(shape, settings, rendered) / 1e9, 2)
        saved = _num_saved(settings, steps or 1, per_epoch or 1)
        disk_gb = round(_disk(shape, settings, saved) / 1e9, 2)
    return Forecast(
        num_parameters=shape.parameters if shape else None,
        learning_rate=settings.learning_rate,
        batch_size=batch,
        num_rows=num_rows,
        num_held_out=len(held_out.comparisons) if held_out else 0,
        total_steps=steps,
        lengths=length_quantiles(rendered.lengths),
        rows_too_long=rendered.report.rows_cut + rendered.report.rows_dropped,
        tokens_lost=rendered.report.tokens_lost,
        memory_gb=memory_gb,
        disk_gb=disk_gb,
        warnings=warnings,
    )


def _memory(shape: ModelShape, settings: RewardConfig, rendered: RenderedRows) -> float:
    """Bytes: weights with what trains them, and what a micro-batch keeps for its backward pass."""
    longest = max(len(text.tokens) for _, texts in rendered.rows for text in texts)
    texts_per_batch = max(len(texts) for _, texts in rendered.rows) * (
        settings.per_device_train_batch_size or 1
    )
    tokens = max(longest, min(settings.max_tokens_per_forward, longest * texts_per_batch))
    # numbers of one token
    layer = 8 * shape.width + 3 * shape.feed + 2 * shape.qkv + 2 * shape.heads * longest
    activations = 4 * tokens * layer * (1 if settings.gradient_checkpointing else shape.layers)
    weights = ADAM_BYTES * _num_trained(shape, settings)
    if settings.lora is not None:
        weights += FROZEN_BYTES * shape.parameters
    return weights + activations + PROCESS_BYTES


def _num_trained(shape: ModelShape, settings: RewardConfig) -> int:
    """Parameters that are trained: those of the adapter, or all."""
    if settings.lora is None:
        return shape.parameters
    return shape.layers * settings.lora.r * (6 * shape.width + 3 * shape.feed + shape.qkv)


def _num_saved(settings: RewardConfig, steps: int, per_epoch: int) -> int:
    """Checkpoints on the disk at once: one at least, for a training may be stopped at any step."""
    every = settings.save_steps
    if settings.save_strategy == "epoch":
        every = per_epoch
    saved = 0
    if settings.save_strategy != "no":
        saved = (steps - 1) // every
    # an old one goes once the newest is there
    if settings.save_total_limit is not None:
        saved = min(saved, settings.save_total_limit + 1)
    return max(1, saved)


def _disk(shape: ModelShape, settings: RewardConfig, num_saved: int) -> int:
    """Bytes of the finished model and of so many checkpoints."""
    return _num_trained(shape, settings) * (FROZEN_BYTES + SAVED_BYTES * num_saved)
