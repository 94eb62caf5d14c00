"""What every engine refuses, whatever holds its weights, and the errors that only engines raise.

A request is checked whole before its first effect, so that a bad datum poisons nobody. What breaks
a rule is an InvalidData whose message names it: the number, the datum and its input, the position.

N tokens of a datum, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from halteres.engine.folders import digest
from halteres.engine.protocol import (
    Adam,
    Array,
    Datum,
    DType,
    ExtraLogprobs,
    Grammar,
    LossSpec,
    ModelInfo,
    SamplingParams,
    Weights,
    WeightsDamaged,
)
from halteres.errors import Conflict, InvalidData, NotFound, ServerError, UserError
from halteres.losses import CLIP_HIGH, CLIP_LOW, LossKind, complete_settings, find_kind

MAX_SAMPLES = 4096  # sequences of one sampling request
MAX_TEMPERATURE = 1e6
LARGEST_PENALTY = 1e3  # of repetition; vLLM has no bound but what is finite
MAX_GRAMMAR_BYTES = 1 << 17

LARGEST = float(np.finfo(np.float32).max)  # of the numbers that weights are made of
MAX_STOPS, MAX_STOP_BYTES = 64, 1024
"""Stop strings of one request, and the length of each: after every token the text of so many tokens
is looked at.
"""

TEMPERATURE_RULE = f"0 (greedy) to {MAX_TEMPERATURE:g}"

STOP_RULE = f"strings of 1 to {MAX_STOP_BYTES} bytes; an empty list stops at nothing but the limit"

# values per position, of any kind; a smaller vocabulary is the bound for what is most likely
MAX_K = 256
MAX_VALUES = 1 << 25  # all values of one request together, each with its token id: 256 MiB
TARGETS = "target_tokens"

MAX_TARGETS = 256  # targets of one token
MAX_SEQUENCE_RATIO = 2.0  # above it stable_reinforce weighs a sequence no more
SEQUENCES = "sampled_sequences"
"""Int32 among a loss's inputs: `Datum.sequences`, or who has none, 1 where a token seems
sampled.
"""


class LossNotFinite(UserError):
    """A loss or its gradient is NaN or infinite: training has diverged, and nothing of the request
    counts.

    Of an error of a request only the text reaches a client of the Tinker API: it begins with the
    code.
    """

    code = "nan_loss"


def loss_not_finite(where: str, what: str = "loss", *, ratios: bool) -> LossNotFinite:
    """A loss, or its gradient, that is NaN or infinite; `ratios`: it compares with the sampler's
    log-probabilities.
    """
    overflowed = (
        "An importance ratio exp(logprob - sampler's logprob)"
        if ratios
        else "A weight times a logprob"
    )
    check = (
        "Check that 'logprobs' belong to these tokens"
        if ratios
        else "Check that 'weights' are not huge"
    )
    return LossNotFinite(
        f"The {what} is not finite{where}.",
        f"{overflowed} overflowed, or the adapter's weights have diverged. Nothing of this "
        "request was accumulated.",
        f"{check}; lower the learning rate and resume from a checkpoint.",
    )


class EngineOutOfMemory(ServerError):
    """The device or the machine had no memory left for one request; that request failed, the engine
    goes on.
    """

    code = "gpu_oom"


def out_of_memory(where: str, text: str) -> EngineOutOfMemory:
    """The error for a request whose work at `where` ended so; `text` is the library's own text."""
    first_line = text.strip().splitlines()[0].rstrip(".") if text.strip() else "no further words"
    return EngineOutOfMemory(
        f"The engine ran out of memory in {where}; this request was given up, others go on.",
        f"It said: {first_line}.",
        "Send shorter sequences, ask for fewer samples or fewer datums at once, or give the "
        "engine smaller "
        "micro-batches and caches.",
    )


def array(value: Array) -> np.ndarray:
    """A read-only numpy view of a wire array."""
    return np.frombuffer(value.data, value.dtype).reshape(value.shape)


def tokens_of(data: bytes) -> np.ndarray:
    """Wire tokens as int32, shape (N,)."""
    return np.frombuffer(data, np.int32)


def bytes_of(text: str) -> int:
    """Its length in UTF-8; half of a surrogate pair, which JSON can carry, counts like any other
    character.
    """
    return len(text.encode("utf-8", "surrogatepass"))


T = TypeVar("T")


def find_adapter(adapters: Mapping[str, T], name: str) -> T:
    """NotFound if the engine has none of this name."""
    if name not in adapters:
        raise NotFound(
            f"The engine holds no adapter '{name}'.",
            next="Create it, or load it from a checkpoint.",
        )
    return adapters[name]


def find_snapshot(snapshots: Mapping[str, T], name: str) -> T:
    """NotFound if the engine has none of this name."""
    if name not in snapshots:
        raise NotFound(
            f"The engine holds no snapshot '{name}'.",
            next="Take one, or load it from a checkpoint.",
        )
    return snapshots[name]


def check_new(adapters: Mapping[str, T], name: str) -> None:
    """Conflict if there is an adapter of this name."""
    if name in adapters:
        raise Conflict(
            f"The adapter '{name}' exists.", next="Drop it first or choose another name."
        )


def check_weights(source: Weights, folder: Path) -> None:
    """Refuse a folder that is not what was written. It reads the whole folder: not on an event
    loop.

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


def check_adam(adam: Adam) -> None:
    """Refuse an optimiser step that cannot be computed."""
    for name, value in msgspec.structs.asdict(adam).items():
        if not 0 <= value <= LARGEST:
            raise InvalidData(f"{name} is {value}.", f"It must be a number of 0 to {LARGEST:.3g}.")
    for name, value in (("beta1", adam.beta1), ("beta2", adam.beta2)):
        if value >= 1:
            raise InvalidData(f"{name} is {value}.", "It must be below 1.")


def check_sampling(
    prompt: bytes,
    num_samples: int,
    params: SamplingParams,
    model: ModelInfo,
    extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
) -> int:
    """Refuse a sampling request that cannot be answered; return how many tokens a sequence may
    have.
    """
    tokens = tokens_of(prompt)
    _check_tokens(tokens, "The prompt", model)
    room = model.max_context_length - len(tokens)
    limit = room if params.max_tokens is None else params.max_tokens
    lengths = [bytes_of(stop) for stop in params.stop_strings]
    stop = next((length for length in lengths if not 1 <= length <= MAX_STOP_BYTES), None)
    for name, value, good, rule in (
        *_ranges(params),
        ("num_samples", num_samples, 1 <= num_samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
        ("max_tokens", params.max_tokens, limit >= 1 or params.max_tokens is None, "at least 1"),
        (
            "temperature",
            params.temperature,
            0 <= params.temperature <= MAX_TEMPERATURE,
            TEMPERATURE_RULE,
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0, at most 1"),
        (
            "top_k",
            params.top_k,
            params.top_k >= -1,
            "-1 or 0 (off), or the number of tokens to choose from",
        ),
        (
            "stop",
            f"{len(lengths)} strings",
            len(lengths) <= MAX_STOPS,
            f"at most {MAX_STOPS} strings",
        ),
        ("stop", f"a string of {stop} bytes", stop is None, STOP_RULE),
    ):
        if not good:
            raise InvalidData(
                f"{name} is out of range: {value}.", f"It must be {rule}.", param=name
            )
    check_grammar(params.grammar)
    if room < 1:
        raise InvalidData(
            f"The prompt of {len(tokens)} tokens leaves no room for an answer.",
            f"The model reads {model.max_context_length} tokens, prompt and answer together.",
            "Shorten the prompt.",
        )
    _check_extra(extra, len(tokens), num_samples, min(limit, room), model)
    if flaw := model.lacks(params, extra):
        named = dict[str, str]()
        if params.grammar is not None and params.grammar.kind not in model.grammars:
            named["param"] = params.grammar.field
        raise InvalidData(
            f"{flaw} is not to be had of this sampler.",
            "It is another one than the engine that trains.",
            "Leave it out, or let the engine sample (`own` in inference.samplers).",
            **named,
        )
    return min(limit, room)


def _ranges(params: SamplingParams) -> Iterator[tuple[str, float, bool, str]]:
    """Of what shapes the distribution: name, value, whether it is good, and the rule."""
    min_p, repetition = params.min_p, params.repetition_penalty
    yield "min_p", min_p, 0 <= min_p <= 1, "0 (off) to 1"
    rule = f"above 0, at most {LARGEST_PENALTY:g}; 1 is off"
    yield "repetition_penalty", repetition, 0 < repetition <= LARGEST_PENALTY, rule
    rule = "-2 to 2; 0 is off"
    yield "presence_penalty", params.presence_penalty, abs(params.presence_penalty) <= 2, rule
    yield "frequency_penalty", params.frequency_penalty, abs(params.frequency_penalty) <= 2, rule


def check_grammar(grammar: Grammar | None) -> None:
    """Refuse one that is too large, before it is looked at."""
    if grammar is None or bytes_of(grammar.text) <= MAX_GRAMMAR_BYTES:
        return
    raise InvalidData(
        f"`{grammar.field}` has {bytes_of(grammar.text)} bytes.",
        f"{MAX_GRAMMAR_BYTES} are the limit.",
        "Send a smaller one.",
        param=grammar.field,
    )


def _check_extra(
    extra: ExtraLogprobs, prompt_length: int, num_samples: int, limit: int, model: ModelInfo
) -> None:
    """`limit` is how many tokens a sequence may have."""
    most_likely = min(MAX_K, model.vocab_size)
    for name, k, most in (
        ("topk_prompt_logprobs", extra.topk_prompt, most_likely),
        ("topk_sample_logprobs", extra.topk_sampled, most_likely),
        ("prompt_alt_tokens_k", extra.alternatives, MAX_K),
    ):
        if not 0 <= k <= most:
            raise InvalidData(
                f"{name} is {k}.", f"It must be 0 (none) to {most}.", "Ask for fewer."
            )
    if extra.targets is not None:
        _check_prompt_targets(extra.targets, prompt_length - 1, model)
    values = (
        extra.topk_prompt + extra.alternatives
    ) * prompt_length + extra.topk_sampled * num_samples * limit
    if values > MAX_VALUES:
        raise InvalidData(
            f"This request asks for {values} log-probabilities beside its tokens.",
            f"{MAX_VALUES} are the limit: positions of the prompt, and num_samples times "
            "max_tokens, each times its k.",
            "Ask for a smaller k, fewer samples, or set max_tokens.",
        )


def _check_prompt_targets(targets: Array, rows: int, model: ModelInfo) -> None:
    name = "target_prompt_logprobs"
    if targets.dtype != "int64" or len(targets.shape) != 2 or targets.shape[0] != rows:
        raise InvalidData(
            f"{name} is {targets.dtype} of shape {list(targets.shape)}.",
            f"It must be int64 of shape [{rows}, K]: row i scores position i + 1 of a prompt of "
            f"{rows + 1} tokens.",
        )
    columns = targets.shape[1]
    if not 1 <= columns <= MAX_K:
        raise InvalidData(
            f"{name} has {columns} columns.",
            f"It must have 1 to {MAX_K}.",
            "Ask in several requests.",
        )
    if len(targets.data) != rows * columns * 8:
        raise InvalidData(
            f"{name} holds {len(targets.data)} bytes, which is not its shape {list(targets.shape)}."
        )
    tokens = array(targets)
    next = "Use the model's own tokenizer; -1 skips a cell."
    _check_vocabulary(np.where(tokens == -1, 0, tokens), name, model, next)


def check_streamed(extra: ExtraLogprobs) -> None:
    """Refuse what a stream does not carry: anything of the prompt."""
    if extra.of_prompt:
        raise InvalidData(
            "A stream tells of sampled tokens alone.",
            "Log-probabilities of the prompt were asked for.",
            "Ask for them without streaming.",
        )


def complete_loss(spec: LossSpec) -> Mapping[str, float]:
    """The loss's settings, defaults filled in."""
    return complete_settings(spec.name, spec.config)


def check_pass(data: tuple[Datum, ...], loss: LossSpec, model: ModelInfo) -> Mapping[str, float]:
    """Refuse a training request that cannot be computed; return the loss's settings."""
    config = complete_loss(loss)
    if not data:
        raise InvalidData("The request holds no datum.", next="Send at least one.")
    kind = find_kind(loss.name)
    for index, datum in enumerate(data):
        where = f"Datum {index}"
        _check_tokens(tokens_of(datum.tokens), f"{where}: model_input", model)
        shape = _check_targets(datum, kind, where, model)
        _check_inputs(datum, kind, config, shape, where)
    return config


def inputs_of(datum: Datum, loss: LossSpec, config: Mapping[str, float]) -> dict[str, np.ndarray]:
    """What the loss reads of a checked datum beside its targets.

    float32, shaped as the targets, thresholds among them where the loss has some, one per token,
    and int32 `SEQUENCES` where it reads them.
    """
    kind = find_kind(loss.name)
    inputs = {name: array(datum.inputs[name]) for name in kind.inputs}
    if kind.clips:
        inputs |= {name: _threshold(datum, name, config) for name in (CLIP_LOW, CLIP_HIGH)}
    if kind.sequences:
        inputs[SEQUENCES] = _sequences(datum)
    return inputs


def _threshold(datum: Datum, name: str, config: Mapping[str, float]) -> np.ndarray:
    """Per token: the datum's own, else the setting."""
    if name in datum.inputs:
        return array(datum.inputs[name])
    return np.full(len(datum.tokens) // 4, config[name], np.float32)


def _sequences(datum: Datum) -> np.ndarray:
    """Per token, as the datum says; else one sequence of all tokens with an advantage or a
    sampler's log-probability: prompts have neither.
    """
    if datum.sequences is not None:
        return np.frombuffer(datum.sequences, np.int32)
    sampled = [array(datum.inputs[name]) != 0 for name in ("advantages", "logprobs")]
    return np.any(sampled, axis=0).astype(np.int32)


def _check_targets(datum: Datum, kind: LossKind, where: str, model: ModelInfo) -> tuple[int, ...]:
    value, length = _input(datum, TARGETS, where), len(datum.tokens) // 4
    wide = len(value.shape) == 2 and value.shape[0] == length
    if wide and not kind.multi_target:
        raise InvalidData(
            f"{where}: '{TARGETS}' has shape {list(value.shape)}, several targets per token.",
            "Only cross_entropy understands that.",
            f"Send shape [{length}].",
        )
    if wide and not 1 <= value.shape[1] <= MAX_TARGETS:
        raise InvalidData(
            f"{where}: '{TARGETS}' has {value.shape[1]} targets per token.",
            f"There may be 1 to {MAX_TARGETS}.",
            "Send the most likely ones.",
        )
    _check_array(value, TARGETS, "int64", value.shape if wide else (length,), where)
    targets, scale = (
        array(value),
        next((name for name in ("weights", "advantages") if name in kind.inputs), ""),
    )
    hint = "Use the model's own tokenizer."
    # the habit of those who mask with -100, which says nothing here
    if scale and (targets < 0).any():
        hint = (
            f"To leave a position out, give it 0 in '{scale}' and any token id of the "
            "vocabulary as target."
        )
    _check_vocabulary(targets, f"{where}: '{TARGETS}'", model, hint)
    return value.shape


def _check_inputs(
    datum: Datum, kind: LossKind, config: Mapping[str, float], shape: tuple[int, ...], where: str
) -> None:
    for name in kind.inputs:
        _check_array(_input(datum, name, where), name, "float32", shape, where)
    own_thresholds = (
        [name for name in (CLIP_LOW, CLIP_HIGH) if name in datum.inputs] if kind.clips else []
    )
    for name in own_thresholds:
        _check_array(_input(datum, name, where), name, "float32", (len(datum.tokens) // 4,), where)
    if own_thresholds:
        wrong = _threshold(datum, CLIP_LOW, config) > _threshold(datum, CLIP_HIGH, config)
        if wrong.any():
            raise InvalidData(
                f"{where}: '{CLIP_LOW}' is above '{CLIP_HIGH}' at position {_first(wrong)}.",
                "Both are ratios, given per token or as settings.",
            )
    mask = "sequence_ratio_mask"
    if mask in kind.inputs and not array(datum.inputs[mask]).any():
        raise InvalidData(
            f"{where}: '{mask}' is 0 everywhere.",
            "The sequence's ratio is the mean over the tokens where it is not.",
            "Set it to 1 on the sampled tokens.",
        )
    if kind.sequences:
        numbers, advantages = _sequences(datum), array(datum.inputs["advantages"])
        if (
            len(numbers) != len(advantages)
            or not ((numbers >= 0) & (numbers <= len(numbers))).all()
        ):
            raise InvalidData(
                f"{where}: the numbers of its {len(numbers)} targets' sequences cannot be used."
            )
        stray = (numbers == 0) & (advantages != 0)
        if stray.any():
            raise InvalidData(
                f"{where}: 'advantages' is not 0 at position {_first(stray)}, which no sampled "
                "span covers.",
                "This loss trains sampled tokens alone.",
                "Give it the advantage 0, or name the sequence it was sampled in "
                "(Datum.with_provenance).",
            )


def _input(datum: Datum, name: str, where: str) -> Array:
    if (value := datum.inputs.get(name)) is None:
        raise InvalidData(
            f"{where} has no loss function input '{name}'.",
            f"It has: {', '.join(sorted(datum.inputs)) or 'none'}.",
        )
    return value


def _check_array(value: Array, name: str, dtype: DType, shape: tuple[int, ...], where: str) -> None:
    if value.dtype != dtype or value.shape != shape:
        raise InvalidData(
            f"{where}: '{name}' is {value.dtype} of shape {list(value.shape)}.",
            f"It must be {dtype} of shape {list(shape)}"
            + (", one value per input token." if len(shape) == 1 else f", as '{TARGETS}'."),
        )
    if len(value.data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise InvalidData(
            f"{where}: '{name}' holds {len(value.data)} bytes, which is not its shape "
            f"{list(shape)}."
        )
    finite = np.isfinite(array(value))
    if not finite.all():
        raise InvalidData(
            f"{where}: '{name}' holds a NaN or infinite value.",
            f"First at position {_first(~finite)}.",
        )


def _check_tokens(tokens: np.ndarray, what: str, model: ModelInfo) -> None:
    if len(tokens) == 0:
        raise InvalidData(f"{what} is empty.", next="Send at least one token.")
    if len(tokens) > model.max_context_length:
        raise InvalidData(
            f"{what} has {len(tokens)} tokens.",
            f"The model reads {model.max_context_length}.",
            "Shorten it.",
        )
    _check_vocabulary(tokens, what, model)


def _check_vocabulary(
    tokens: np.ndarray, what: str, model: ModelInfo, next: str = "Use the model's own tokenizer."
) -> None:
    """Token ids of any shape; `next` ends the sentence."""
    outside = (tokens < 0) | (tokens >= model.vocab_size)
    if outside.any():
        raise InvalidData(
            f"{what} holds token {int(tokens[outside][0])} at position {_first(outside)}.",
            f"The vocabulary of {model.name} ends at {model.vocab_size - 1}.",
            next,
        )


def _first(mask: np.ndarray) -> str:
    return ", ".join(map(str, np.argwhere(mask)[0]))
