"""Learning rates and batches that suit a base model by its size, where none are set.

The defaults of a run are those of the built-in model. What is proposed for others was published or
measured:

sft   The Tinker cookbook's sweep over its models (`hyperparam_utils.get_lr`: Tulu 3, LoRA, 128 rows
      a batch) found 1e-3 best for most of up to 8 B parameters, 3e-4 for larger ones and for Llama
      of 8 B; its older formula gives 5.3e-4 for a Qwen of width 1,024. Batches are smaller here, so
      that the lower ones are proposed.
dpo   1e-5 in the cookbook's recipe (`train_dpo_cli`: Llama-3.2-1B, 256 pairs a batch), 5e-6 in
      TRL's script with LoRA. Below 1 B 5e-5, used on SmolLM2-135M (docs/algorithms/dpo.md).
rl    3e-4 was used on SmolLM2-135M (docs/own-model.md); from 1 B on others report 2e-5 to 1e-4.
      A batch of 64 answers in groups of 8 was used on SmolLM2-135M (recipes/smollm2), where a step
      of the built-in model's 256 would take four times as long.

The rank of LoRA is the same at every size: for reinforcement learning even rank 1 is reported to do
as well as full fine-tuning (Schulman et al., LoRA Without Regret, 2025), and 16 was used on
SmolLM2-135M.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halteres.models import TINY, model_folder
from halteres.models.shape import read_shape

Training = Literal["rl", "sft", "dpo"]

LARGE_MODEL, HIGH_RATE = 20_000_000, 1e-3
"""Parameters of a model that has much to forget, and a rate of LoRA that is for smaller ones, as
the default is.
"""

HUGE_MODEL, HUGEST_MODEL = 1_000_000_000, 8_000_000_000
"""Parameters from which lower rates are proposed."""

LARGE_MODELS_RATE, HUGE_MODELS_RATE = 3e-4, 1e-4
"""Of reinforcement learning, below and above."""

SLOW_MODEL = 100_000_000
"""Parameters from which a step takes long."""


@dataclass(frozen=True, slots=True)
class ProposedBatch:
    """Of one step of reinforcement learning."""

    answers: int
    group: int  # answers to one task


# of the built-in model, on benchmarks/learning_from_files.py
_TINY_RATES = {"sft": 2e-3, "dpo": 1e-3}

# of a name such as Qwen/Qwen3-8B, or SmolLM2-135M-Instruct; of a mixture all its parameters
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([MmBb])(?![A-Za-z0-9])")


def parameters_of(model: str, models_home: Path) -> int | None:
    """How many parameters a model has: by its files, or, where a service elsewhere has it, by its
    name; None where neither tells.

    >>> parameters_of("Qwen/Qwen3-0.6B", Path("nowhere"))
    600000000
    """
    folder = model_folder(model, models_home)
    if folder is not None:
        # one that is not whole has no weights to count: a service elsewhere may have them
        with suppress(OSError, ValueError):
            return read_shape(folder).parameters
    found = _SIZE.search(model)
    if found is None:
        return None
    unit = {"m": 1e6, "b": 1e9}[found[2].lower()]
    return int(float(found[1]) * unit)


def proposed_rate(parameters: int | None, training: Training) -> float | None:
    """The learning rate of LoRA with Adam; None: the default of the setting.

    Args:
        parameters: of the base model; None: unknown, but no small one.
        training: what it is trained by.
    """
    if parameters is not None and parameters < LARGE_MODEL:
        return _TINY_RATES.get(training)
    match training:
        case "sft":
            if parameters is None or parameters >= HUGEST_MODEL:
                return 3e-4
            return 5e-4
        case "dpo":
            if parameters is None or parameters >= HUGE_MODEL:
                return 1e-5
            return 5e-5
        case "rl":
            if parameters is None or parameters >= HUGE_MODEL:
                return HUGE_MODELS_RATE
            return LARGE_MODELS_RATE


def rate_for(model: str, models_home: Path, training: Training) -> float | None:
    """The same, of a model by its name or folder. None also where a run by reinforcement learning
    names a model that nothing is known of.
    """
    if model == TINY:
        return _TINY_RATES.get(training)
    parameters = parameters_of(model, models_home)
    if parameters is None and training == "rl":
        return None
    return proposed_rate(parameters, training)


def batch_for(model: str, models_home: Path) -> ProposedBatch | None:
    """The batch of reinforcement learning, of a model by its name or folder; None: the
    environment's default.
    """
    parameters = parameters_of(model, models_home)
    if parameters is None or parameters < SLOW_MODEL:
        return None
    return ProposedBatch(answers=64, group=8)
