"""What every engine refuses, whatever holds its weights.

Owns: the rules for tokens, a sampling request (what it asks for beside tokens, too) and an optimiser step, and the
sentences that name what breaks them (`datums` has the rules for training data, a loss and its settings); the errors
that only engines raise.
Never: changes anything: a request is checked whole before its first effect.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from halteres.engine.folders import digest
from halteres.engine.protocol import Adam, Array, ModelInfo, SamplingParams, Wanted, Weights, WeightsDamaged
from halteres.errors import InvalidData, ServerError, UserError

MAX_SAMPLES = 4096
"""Sequences of one sampling request."""

MAX_TEMPERATURE = 1e6

LARGEST = float(np.finfo(np.float32).max)
"""Of the numbers that weights are made of."""

MAX_STOPS, MAX_STOP_BYTES = 64, 1024
"""Stop strings of one request, and the length of each: after every token the text of so many tokens is looked at."""

TEMPERATURE_RULE = f"0 (greedy) to {MAX_TEMPERATURE:g}"

STOP_RULE = f"strings of 1 to {MAX_STOP_BYTES} bytes; an empty list stops at nothing but the limit"


class LossNotFinite(UserError):
    """A loss or its gradient is NaN or infinite: training has diverged, and nothing of the request counts.

    Of an error of a request only the text reaches a client of the Tinker API: it begins with the code.
    """

    code = "nan_loss"


def loss_not_finite(where: str, what: str = "loss", *, ratios: bool) -> LossNotFinite:
    """A loss, or its gradient, that is NaN or infinite; `ratios`: it compares with the sampler's log-probabilities."""
    overflowed = "An importance ratio exp(logprob - sampler's logprob)" if ratios else "A weight times a logprob"
    check = "Check that 'logprobs' belong to these tokens" if ratios else "Check that 'weights' are not huge"
    return LossNotFinite(
        f"The {what} is not finite{where}.",
        f"{overflowed} overflowed, or the adapter's weights have diverged. Nothing of this request was accumulated.",
        f"{check}; lower the learning rate and resume from a checkpoint.",
    )


def check_weights(source: Weights, folder: Path) -> None:
    """Refuse weights that are not what their writer wrote. It reads the whole folder: not on an event loop.

    Raises:
        WeightsDamaged: a file is missing, cannot be read or is another than was written.
    """
    if source.sha256 is None:
        return
    try:
        found = digest(folder)
    except OSError as error:
        found = f"none: {error.strerror or error}"
    if found != source.sha256:
        raise WeightsDamaged(
            f"The weights {source.name} (policy version {source.version}) did not arrive whole.",
            f"{folder} has the digest {found}; {source.sha256} was written.",
            "They are written again where the trainer still has them; else publish new ones.",
        )


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
    lengths = [bytes_of(stop) for stop in params.stop_strings]
    stop = next((length for length in lengths if not 1 <= length <= MAX_STOP_BYTES), None)
    for name, came, good, rule in (
        ("num_samples", num_samples, 1 <= num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
        ("max_tokens", params.max_tokens, limit >= 1 or params.max_tokens is None, "at least 1"),
        ("temperature", params.temperature, 0 <= params.temperature <= MAX_TEMPERATURE, TEMPERATURE_RULE),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0, at most 1"),
        ("top_k", params.top_k, params.top_k >= -1, "-1 or 0 (off), or the number of tokens to choose from"),
        ("stop", f"{len(lengths)} strings", len(lengths) <= MAX_STOPS, f"at most {MAX_STOPS} strings"),
        ("stop", f"a string of {stop} bytes", stop is None, STOP_RULE),
    ):
        if not good:
            raise InvalidData(f"{name} is out of range: {came}.", f"It must be {rule}.")
    if room < 1:
        raise InvalidData(
            f"The prompt of {len(tokens)} tokens leaves no room for an answer.",
            f"The model reads {model.max_context_length} tokens, prompt and answer together.",
            "Shorten the prompt.",
        )
    check_wanted(wanted, len(tokens), num_samples, min(limit, room), model)
    return min(limit, room)


def check_adam(adam: Adam) -> None:
    """Refuse an optimiser step that cannot be computed.

    Raises:
        InvalidData: it names the number.
    """
    for name, value in msgspec.structs.asdict(adam).items():
        if not 0 <= value <= LARGEST:
            raise InvalidData(f"{name} is {value}.", f"It must be a number of 0 to {LARGEST:.3g}.")
    for name, value in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        if value >= 1:
            raise InvalidData(f"{name} is {value}.", "It must be below 1.")


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


def check_vocabulary(
    tokens: np.ndarray, what: str, model: ModelInfo, next: str = "Use the model's own tokenizer."
) -> None:
    """Refuse token ids that the model does not have, whatever their shape; `next` ends the sentence.

    Raises:
        InvalidData: it names the first of them and its position.
    """
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        raise InvalidData(
            f"{what} holds token {int(tokens[outside][0])} at position {first(outside)}.",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}.",
            next,
        )


def first(mask: np.ndarray) -> str:
    """Where the first true value lies, as a sentence says it."""
    return ", ".join(map(str, np.argwhere(mask)[0]))


MAX_K = 256
"""Values per position, of any kind; a smaller vocabulary is the bound for what is most likely."""

MAX_VALUES = 1 << 25
"""All values of one request together, each with its token id: 256 MiB."""


def check_wanted(wanted: Wanted, prompt_length: int, num_samples: int, limit: int, model: ModelInfo) -> None:
    """Refuse what cannot be computed, or not within bounds; `limit` is how many tokens a sequence may have.

    Raises:
        InvalidData: names what is out of range.
    """
    most_likely = min(MAX_K, model.vocab_size)
    for name, k, most in (
        ("topk_prompt_logprobs", wanted.topk_prompt, most_likely),
        ("topk_sample_logprobs", wanted.topk_sampled, most_likely),
        ("prompt_alt_tokens_k", wanted.alternatives, MAX_K),
    ):
        if not 0 <= k <= most:
            raise InvalidData(f"{name} is {k}.", f"It must be 0 (none) to {most}.", "Ask for fewer.")
    if wanted.targets is not None:
        _check_targets(wanted.targets, prompt_length - 1, model)
    values = (wanted.topk_prompt + wanted.alternatives) * prompt_length + wanted.topk_sampled * num_samples * limit
    if values > MAX_VALUES:
        raise InvalidData(
            f"This request asks for {values} log-probabilities beside its tokens.",
            f"{MAX_VALUES} are the limit: positions of the prompt, and num_samples times max_tokens, each times its k.",
            "Ask for a smaller k, fewer samples, or set max_tokens.",
        )


def check_streamed(wanted: Wanted) -> None:
    """Refuse what a stream cannot tell.

    Raises:
        InvalidData: something of the prompt is asked for.
    """
    if wanted.prompt_logprobs or wanted.topk_prompt or wanted.alternatives or wanted.targets is not None:
        raise InvalidData(
            "A stream tells of sampled tokens alone.",
            "Log-probabilities of the prompt were asked for.",
            "Ask for them without streaming.",
        )


def _check_targets(targets: Array, rows: int, model: ModelInfo) -> None:
    name = "target_prompt_logprobs"
    if targets.dtype != "int64" or len(targets.shape) != 2 or targets.shape[0] != rows:
        raise InvalidData(
            f"{name} is {targets.dtype} of shape {list(targets.shape)}.",
            f"It must be int64 of shape [{rows}, K]: row i scores position i + 1 of a prompt of {rows + 1} tokens.",
        )
    columns = targets.shape[1]
    if not 1 <= columns <= MAX_K:
        raise InvalidData(f"{name} has {columns} columns.", f"It must have 1 to {MAX_K}.", "Ask in several requests.")
    if len(targets.data) != rows * columns * 8:
        raise InvalidData(f"{name} holds {len(targets.data)} bytes, which is not its shape {list(targets.shape)}.")
    tokens = np.frombuffer(targets.data, np.int64)
    outside = (tokens < -1) | (tokens >= model.vocab_size)
    if outside.any():
        row, column = divmod(int(np.argmax(outside)), columns)
        raise InvalidData(
            f"{name} holds token {int(tokens[row * columns + column])} at [{row}, {column}].",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}; -1 skips a cell.",
            "Use the model's own tokenizer.",
        )


class EngineOutOfMemory(ServerError):
    """The device or the machine had no memory left for one request; that request failed, the engine goes on."""

    code = "gpu_oom"


def out_of_memory(where: str, said: str) -> EngineOutOfMemory:
    """The error for a request whose work at `where` ended so; `said` is the library's own text."""
    first = said.strip().splitlines()[0].rstrip(".") if said.strip() else "no further words"
    return EngineOutOfMemory(
        f"The engine ran out of memory in {where}; this request was given up, others go on.",
        f"It said: {first}.",
        "Send shorter sequences, ask for fewer samples or fewer datums at once, or give the engine smaller "
        "micro-batches and caches.",
    )
