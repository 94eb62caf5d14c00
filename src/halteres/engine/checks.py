"""What every engine refuses, whatever holds its weights.

Owns: the rules for tokens and for a sampling request, and the sentences that name what breaks them (`datums` has the
rules for training data, `losses` those for a loss and its settings).
Never: changes anything: a request is checked whole before its first effect.
"""

from __future__ import annotations

import numpy as np

from halteres.engine.protocol import Array, ModelInfo, SamplingParams, Wanted
from halteres.engine.wants import check_wanted
from halteres.errors import InvalidData, UserError

MAX_SAMPLES = 4096
"""Sequences of one sampling request."""

MAX_TEMPERATURE = 1e6

MAX_STOPS, MAX_STOP_BYTES = 64, 1024
"""Stop strings of one request, and the length of each: after every token the text of so many tokens is looked at."""

STOP_RULE = f"strings of 1 to {MAX_STOP_BYTES} bytes; an empty list stops at nothing but the limit"


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


def check_sampling(
    prompt: bytes,
    num_samples: int,
    params: SamplingParams,
    model: ModelInfo,
    wanted: Wanted = Wanted(),  # noqa: B008 - frozen
) -> int:
    """Refuse a sampling request that cannot be answered; return how many tokens a sequence may have.

    Raises:
        InvalidData: the prompt, a parameter or what is wanted is out of range; the message names it.
    """
    tokens = tokens_of(prompt)
    check_tokens(tokens, "The prompt", model)
    room = model.max_context_length - len(tokens)
    limit = room if params.max_tokens is None else params.max_tokens
    for name, good, rule in (
        ("num_samples", 1 <= num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
        ("max_tokens", limit >= 1 or params.max_tokens is None, "at least 1"),
        ("temperature", 0 <= params.temperature <= MAX_TEMPERATURE, f"0 (greedy) to {MAX_TEMPERATURE:g}"),
        ("top_p", 0 < params.top_p <= 1, "above 0, at most 1"),
        ("stop", len(params.stop_strings) <= MAX_STOPS, f"at most {MAX_STOPS} strings"),
        ("stop", all(1 <= bytes_of(stop) <= MAX_STOP_BYTES for stop in params.stop_strings), STOP_RULE),
    ):
        if not good:
            raise InvalidData(f"{name} is out of range.", f"It must be {rule}.")
    if room < 1:
        raise InvalidData(
            f"The prompt of {len(tokens)} tokens leaves no room for an answer.",
            f"The model reads {model.max_context_length} tokens, prompt and answer together.",
            "Shorten the prompt.",
        )
    check_wanted(wanted, len(tokens), num_samples, min(limit, room), model)
    return min(limit, room)


def bytes_of(text: str) -> int:
    """Its length in UTF-8; half of a surrogate pair, which JSON can carry, counts like any other character."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_tokens(tokens: np.ndarray, what: str, model: ModelInfo) -> None:
    """Refuse a sequence that is empty, too long or out of vocabulary; `what` begins the sentence.

    Raises:
        InvalidData: as said.
    """
    if len(tokens) == 0:
        raise InvalidData(f"{what} is empty.", next="Send at least one token.")
    if len(tokens) > model.max_context_length:
        raise InvalidData(
            f"{what} has {len(tokens)} tokens.", f"The model reads {model.max_context_length}.", "Shorten it."
        )
    check_vocabulary(tokens, what, model)


def check_vocabulary(tokens: np.ndarray, what: str, model: ModelInfo) -> None:
    """Refuse token ids that the model does not have, whatever their shape.

    Raises:
        InvalidData: it names the first of them and its position.
    """
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        raise InvalidData(
            f"{what} holds token {int(tokens[outside][0])} at position {first(outside)}.",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}.",
            "Use the model's own tokenizer.",
        )


def first(mask: np.ndarray) -> str:
    """Where the first true value lies, as a sentence says it."""
    return ", ".join(map(str, np.argwhere(mask)[0]))
