"""What every engine refuses of a training request, and the loss inputs of a request that is sound.

Owns: a loss as a request asks for it, completed; the rules for a datum and its loss inputs, and the sentences that name
what breaks them; thresholds per token.
Never: changes anything: a request is checked whole before its first effect, so a bad datum poisons nobody.

N tokens of a datum, K targets of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from halteres.engine.checks import array, check_tokens, check_vocabulary, first, tokens_of
from halteres.engine.loss_graphs.validation import check_custom
from halteres.engine.protocol import Array, CustomLoss, Datum, DType, LossSpec, ModelInfo
from halteres.errors import InvalidData
from halteres.losses import CLIP_HIGH, CLIP_LOW, CUSTOM, LossKind, complete_settings, find_kind

TARGETS = "target_tokens"
MAX_SEQUENCE_RATIO = 2.0
"""Above it stable_reinforce weighs a sequence no more."""
SEQUENCES = "sampled_sequences"
"""Int32 among a loss's inputs: `Datum.sequences`, or who has none, 1 where a token seems sampled."""


def settled(spec: LossSpec) -> Mapping[str, float]:
    """The loss's settings, defaults filled in.

    Raises:
        InvalidData: there is no such loss, or a setting is unknown or unusable; the message names it.
    """
    settings = complete_settings(spec.name, spec.config)
    _check_graph(spec)
    return settings


def _check_graph(spec: LossSpec) -> None:
    if (spec.name == CUSTOM) != (spec.custom is not None):
        raise InvalidData(
            f"The loss '{spec.name}' was sent {'with' if spec.custom else 'without'} a graph.",
            "The loss 'custom' has one, no other has.",
            "Make one with create_custom_loss and send its id.",
        )
    if spec.custom is not None:
        check_custom(spec.custom)


MAX_TARGETS = 256
"""Targets of one token."""

_SIZES = {"float32": 4, "int64": 8, "int32": 4}


def check_pass(data: tuple[Datum, ...], loss: LossSpec, model: ModelInfo) -> Mapping[str, float]:
    """Refuse a training request that cannot be computed; return the loss's settings.

    Raises:
        InvalidData: the loss or a setting of it is unknown, or a datum is empty, too long, misshapen, not finite or
            out of vocabulary; the message names the datum and the input.
    """
    config = settled(loss)
    if not data:
        raise InvalidData("The request holds no datum.", next="Send at least one.")
    kind = find_kind(loss.name)
    for index, datum in enumerate(data):
        where = f"Datum {index}"
        check_tokens(tokens_of(datum.tokens), f"{where}: model_input", model)
        shape = _check_targets(datum, kind, where, model)
        if loss.custom is not None:
            _check_custom(datum, loss.custom, shape, where)
        else:
            for name in kind.inputs:
                _check_floats(datum, name, shape, where)
            _check_thresholds(datum, kind, config, where)
            _check_mask(datum, kind, where)
            _check_sequences(datum, kind, where)
    return config


def inputs_of(datum: Datum, loss: LossSpec, config: Mapping[str, float]) -> dict[str, np.ndarray]:
    """What the loss reads of a checked datum beside its targets.

    Of the losses that the Tinker API names: float32, shaped as the targets, thresholds among them where the loss has
    some, one per token, and int32 `SEQUENCES` where it reads them. Of a custom loss: the arrays as they came.
    """
    if loss.custom is not None:
        return {name: array(datum.inputs[name]) for name, _ in loss.custom.inputs[1:]}
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
    """Per token, as the datum says; else one sequence of all tokens with an advantage or a sampler's log-probability:
    prompts have neither."""
    if datum.sequences is not None:
        return np.frombuffer(datum.sequences, np.int32)
    sampled = [array(datum.inputs[name]) != 0 for name in ("advantages", "logprobs")]
    return np.any(sampled, axis=0).astype(np.int32)


def _check_targets(datum: Datum, kind: LossKind, where: str, model: ModelInfo) -> tuple[int, ...]:
    value, length = _input(datum, TARGETS, where), len(datum.tokens) // 4
    wide = len(value.shape) == 2 and value.shape[0] == length
    if wide and not kind.wide:
        raise InvalidData(
            f"{where}: '{TARGETS}' has shape {list(value.shape)}, several targets per token.",
            "Only cross_entropy and custom losses understand that.",
            f"Send shape [{length}].",
        )
    if wide and not 1 <= value.shape[1] <= MAX_TARGETS:
        raise InvalidData(
            f"{where}: '{TARGETS}' has {value.shape[1]} targets per token.",
            f"There may be 1 to {MAX_TARGETS}.",
            "Send the most likely ones.",
        )
    _check_array(value, TARGETS, "int64", value.shape if wide else (length,), where)
    _check_target_tokens(array(value), kind, f"{where}: '{TARGETS}'", model)
    return value.shape


def _check_target_tokens(targets: np.ndarray, kind: LossKind, what: str, model: ModelInfo) -> None:
    """A negative one is the habit of those who mask with -100, which says nothing here."""
    masks = [name for name in ("weights", "advantages") if name in kind.inputs]
    if masks and (targets < 0).any():
        hint = f"To leave a position out, give it 0 in '{masks[0]}' and any token id of the vocabulary as target."
        check_vocabulary(targets, what, model, hint)
    check_vocabulary(targets, what, model)


def _check_custom(datum: Datum, custom: CustomLoss, shape: tuple[int, ...], where: str) -> None:
    (_, rank), *others = custom.inputs
    if len(shape) != rank:
        raise InvalidData(
            f"{where}: '{TARGETS}' has shape {list(shape)}.",
            f"The custom loss takes logprobs of rank {rank}, and they are shaped as the targets.",
        )
    for name, rank in others:
        value = _input(datum, name, where)
        rows = value.shape[:1] if rank else ()
        if len(value.shape) != rank or rows not in ((), shape[:1]):
            wanted = ["a scalar, shape []", f"shape [{shape[0]}]", f"shape [{shape[0]}, K]"][rank]
            raise InvalidData(
                f"{where}: '{name}' has shape {list(value.shape)}.", f"The custom loss declared rank {rank}: {wanted}."
            )
        _check_array(value, name, value.dtype, value.shape, where)


def _check_thresholds(datum: Datum, kind: LossKind, config: Mapping[str, float], where: str) -> None:
    given = [name for name in (CLIP_LOW, CLIP_HIGH) if name in datum.inputs] if kind.clips else []
    for name in given:
        _check_floats(datum, name, (len(datum.tokens) // 4,), where)
    if given:
        wrong = _threshold(datum, CLIP_LOW, config) > _threshold(datum, CLIP_HIGH, config)
        if wrong.any():
            raise InvalidData(
                f"{where}: '{CLIP_LOW}' is above '{CLIP_HIGH}' at position {first(wrong)}.",
                "Both are ratios, given per token or as settings.",
            )


def _check_mask(datum: Datum, kind: LossKind, where: str) -> None:
    name = "sequence_ratio_mask"
    if name in kind.inputs and not array(datum.inputs[name]).any():
        raise InvalidData(
            f"{where}: '{name}' is 0 everywhere.",
            "The sequence's ratio is the mean over the tokens where it is not.",
            "Set it to 1 on the sampled tokens.",
        )


def _check_sequences(datum: Datum, kind: LossKind, where: str) -> None:
    if not kind.sequences:
        return
    found, advantages = _sequences(datum), array(datum.inputs["advantages"])
    if len(found) != len(advantages) or not ((found >= 0) & (found <= len(found))).all():
        raise InvalidData(f"{where}: the numbers of its {len(found)} targets' sequences cannot be used.")
    stray = (found == 0) & (advantages != 0)
    if stray.any():
        raise InvalidData(
            f"{where}: 'advantages' is not 0 at position {first(stray)}, which no sampled span covers.",
            "This loss trains sampled tokens alone.",
            "Give it the advantage 0, or name the sequence it was sampled in (Datum.with_provenance).",
        )


def _check_floats(datum: Datum, name: str, shape: tuple[int, ...], where: str) -> None:
    value = _input(datum, name, where)
    _check_array(value, name, "float32", shape, where)


def _input(datum: Datum, name: str, where: str) -> Array:
    if (value := datum.inputs.get(name)) is None:
        raise InvalidData(
            f"{where} has no loss function input '{name}'.", f"It has: {', '.join(sorted(datum.inputs)) or 'none'}."
        )
    return value


def _check_array(value: Array, name: str, dtype: DType, shape: tuple[int, ...], where: str) -> None:
    if value.dtype != dtype or value.shape != shape:
        raise InvalidData(
            f"{where}: '{name}' is {value.dtype} of shape {list(value.shape)}.",
            f"It must be {dtype} of shape {list(shape)}"
            + (", one value per input token." if len(shape) == 1 else f", as '{TARGETS}'."),
        )
    if len(value.data) != math.prod(shape) * _SIZES[dtype]:
        raise InvalidData(f"{where}: '{name}' holds {len(value.data)} bytes, which is not its shape {list(shape)}.")
    finite = np.isfinite(array(value))
    if not finite.all():
        raise InvalidData(
            f"{where}: '{name}' holds a NaN or infinite value.",
            f"First at position {first(~finite)}.",
        )
