"""What every engine refuses, whatever holds its weights.

Owns: the rules for a training datum and a sampling request, and the sentences that name what breaks them.
Never: changes anything: a request is checked whole before its first effect, so a bad datum poisons nobody.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from halteres.engine.protocol import Array, Datum, ModelInfo, SamplingParams
from halteres.errors import InvalidData, UserError, nearest

LOSS_INPUTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cross_entropy": {"target_tokens": "int64", "weights": "float32"},
        "importance_sampling": {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32"},
    }
)
"""For each loss, its per-token inputs and their dtype. Source: spec of the Tinker API, forward_backward.

The one place that says which losses there are; each engine maps these names to its own formulas.
"""


class LossNotFinite(UserError):
    """A loss or its gradient is NaN or infinite: training has diverged, and nothing of the request counts.

    Only the text reaches a client of the Tinker API: it holds "is not finite".
    """

    code = "nan_loss"


def array(value: Array) -> np.ndarray:
    """A read-only numpy view of a wire array."""
    return np.frombuffer(value.data, value.dtype).reshape(value.shape)


def tokens_of(data: bytes) -> np.ndarray:
    """Wire tokens as int32, shape (N,)."""
    return np.frombuffer(data, np.int32)


def check_loss(name: str) -> None:
    """Refuse a loss that is not computed.

    Raises:
        InvalidData: there is none of this name; the message names those that there are.
    """
    if name not in LOSS_INPUTS:
        guess, known = nearest(name, LOSS_INPUTS), sorted(LOSS_INPUTS)
        hint = f"Did you mean '{guess}'?" if guess else ""
        why = f"Computed so far: {' and '.join(known)}."
        raise InvalidData(f"There is no loss '{name}'.", why, hint, did_you_mean=guess, allowed=known)


def check_pass(data: tuple[Datum, ...], loss: str, model: ModelInfo) -> None:
    """Refuse a training request that cannot be computed.

    Raises:
        InvalidData: the loss is unknown, or a datum is empty, too long, misshapen, not finite or out of vocabulary.
    """
    check_loss(loss)
    if not data:
        raise InvalidData("The request holds no datum.", next="Send at least one.")
    for index, datum in enumerate(data):
        where = f"Datum {index}"
        _check_tokens(tokens_of(datum.tokens), f"{where}: model_input", model)
        for name, dtype in LOSS_INPUTS[loss].items():
            _check_input(datum, name, dtype, where, model)


def check_sampling(prompt: bytes, num_samples: int, params: SamplingParams, model: ModelInfo) -> int:
    """Refuse a sampling request that cannot be answered; return how many tokens a sequence may have.

    Raises:
        InvalidData: the prompt or a parameter is out of range; the message names it.
    """
    tokens = tokens_of(prompt)
    _check_tokens(tokens, "The prompt", model)
    room = model.max_context_length - len(tokens)
    limit = room if params.max_tokens is None else params.max_tokens
    for name, good, rule in (
        ("num_samples", num_samples >= 1, "at least 1"),
        ("max_tokens", limit >= 1 or params.max_tokens is None, "at least 1"),
        ("temperature", params.temperature >= 0 and math.isfinite(params.temperature), "0 (greedy) or above"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
    ):
        if not good:
            raise InvalidData(f"{name} is out of range.", f"It must be {rule}.")
    if room < 1:
        raise InvalidData(
            f"The prompt of {len(tokens)} tokens leaves no room for an answer.",
            f"The model reads {model.max_context_length} tokens, prompt and answer together.",
            "Shorten the prompt.",
        )
    return min(limit, room)


def _check_tokens(tokens: np.ndarray, what: str, model: ModelInfo) -> None:
    if len(tokens) == 0:
        raise InvalidData(f"{what} is empty.", next="Send at least one token.")
    if len(tokens) > model.max_context_length:
        raise InvalidData(
            f"{what} has {len(tokens)} tokens.", f"The model reads {model.max_context_length}.", "Shorten it."
        )
    _check_vocabulary(tokens, what, model)


def _check_input(datum: Datum, name: str, dtype: str, where: str, model: ModelInfo) -> None:
    value = datum.inputs.get(name)
    if value is None:
        raise InvalidData(
            f"{where} has no loss function input '{name}'.", f"It has: {', '.join(sorted(datum.inputs))}."
        )
    length = len(datum.tokens) // 4
    if value.dtype != dtype or value.shape != (length,):
        raise InvalidData(
            f"{where}: '{name}' is {value.dtype} of shape {list(value.shape)}.",
            f"It must be {dtype} of shape [{length}], one value per input token.",
        )
    if len(value.data) != length * np.dtype(dtype).itemsize:
        raise InvalidData(f"{where}: '{name}' holds {len(value.data)} bytes, which is not its shape {[length]}.")
    values = array(value)
    if name == "target_tokens":
        _check_vocabulary(values, f"{where}: '{name}'", model)
    elif not np.isfinite(values).all():
        raise InvalidData(
            f"{where}: '{name}' holds a NaN or infinite value.", f"First at position {_first(~np.isfinite(values))}."
        )


def _check_vocabulary(tokens: np.ndarray, what: str, model: ModelInfo) -> None:
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        at = _first(outside)
        raise InvalidData(
            f"{what} holds token {int(tokens[at])} at position {at}.",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}.",
            "Use the model's own tokenizer.",
        )


def _first(mask: np.ndarray) -> int:
    return int(np.argmax(mask))
