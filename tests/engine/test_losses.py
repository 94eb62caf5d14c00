"""The losses by name: every engine computes those that are accepted; settings and data that cannot
be used are told.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from contract.requirements import proves

from halteres.engine.checks import MAX_TARGETS, check_pass, complete_loss, inputs_of
from halteres.engine.protocol import Datum, LossSpec, ModelInfo
from halteres.engine.torch import losses
from halteres.errors import InvalidData
from halteres.losses import LOSSES

from .requests import array, packed

MODEL = ModelInfo(
    name="m",
    folder="/m",
    architecture="none",
    vocab_size=100,
    max_context_length=8,
    num_parameters=0,
    dtype="float32",
    device="cpu",
    threads=1,
)
SAMPLED = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce")


def datum(*, sequences: Any = None, **changes: Any) -> Datum:
    """Three tokens with every input that a loss may ask for; a change to None leaves one out."""
    inputs = {
        "target_tokens": array([5, 6, 7], "int64"),
        "weights": array([1, 0.5, -1]),
        "logprobs": array([-1, -2, -3]),
        "advantages": array([1, 0, -1]),
        "sequence_ratio_mask": array([0, 1, 1]),
    } | changes
    kept = {name: value for name, value in inputs.items() if value is not None}
    return Datum(
        tokens=packed([4, 5, 6]), inputs=kept, sequences=packed(sequences) if sequences else None
    )


def test_exactly_the_losses_that_are_accepted_are_computed() -> None:
    assert set(losses.LOSSES) == set(LOSSES)


def test_the_input_that_scales_a_loss_is_one_of_those_that_are_checked() -> None:
    for name, loss in losses.LOSSES.items():
        assert loss.scale in LOSSES[name].inputs


def test_settings_have_the_documented_defaults_and_thresholds_are_ratios() -> None:
    clip = {"clip_low_threshold", "clip_high_threshold"}
    assert complete_loss(LossSpec(name="ppo")) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 1.2,
    }
    assert complete_loss(LossSpec(name="cispo")) == {
        "clip_low_threshold": 0.0,
        "clip_high_threshold": 4.0,
    }
    assert complete_loss(LossSpec(name="dro")) == {"beta": 0.05}
    assert complete_loss(LossSpec(name="stable_reinforce")) == {"kl_coeff": 0.0}
    assert complete_loss(LossSpec(name="gspo")) == {
        "clip_low_threshold": 1 - 3e-4,
        "clip_high_threshold": 1 + 4e-4,
    }
    assert (
        complete_loss(LossSpec(name="cross_entropy"))
        == complete_loss(LossSpec(name="importance_sampling"))
        == {}
    )
    assert (
        complete_loss(LossSpec(name="ppo", config={"clip_high_threshold": 3.0}))[
            "clip_high_threshold"
        ]
        == 3.0
    )
    assert {name for name, kind in LOSSES.items() if kind.clips} == {"ppo", "cispo", "gspo"}
    assert all(clip <= set(complete_loss(LossSpec(name=name))) for name in ("ppo", "cispo", "gspo"))


@pytest.mark.parametrize(
    ("loss", "config", "says"),
    [
        ("ppo", {"clip_low_treshold": 0.9}, "no setting 'clip_low_treshold'.*clip_low_threshold"),
        (
            "importance_sampling",
            {"clip_low_threshold": 0.9},
            "no setting 'clip_low_threshold'.*none",
        ),
        ("cross_entropy", {"beta": 1}, "no setting 'beta'"),
        ("dro", {"beta": float("nan")}, "'beta' is nan"),
        ("dro", {"beta": -1}, "'beta' is -1"),
        ("cispo", {"clip_high_threshold": float("inf")}, "'clip_high_threshold' is inf"),
        (
            "ppo",
            {"clip_low_threshold": 2.0},
            "clip_low_threshold is 2, above clip_high_threshold, which is 1.2",
        ),
        ("gspo", {"clip_high_threshold": 0.5}, "above clip_high_threshold, which is 0.5"),
        ("custom", {}, "custom"),
        ("stable_reinforce", {"kl_coeff": -1}, "'kl_coeff' is -1"),
        ("stable_reinforce", {"kl_coef": 1}, "no setting 'kl_coef'.*kl_coeff"),
        ("pppo", {}, "Did you mean 'ppo'"),
    ],
)
def test_a_loss_or_setting_that_cannot_be_used_is_named(
    loss: str, config: dict[str, float], says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        check_pass((datum(),), LossSpec(name=loss, config=config), MODEL)


WIDE = {
    "target_tokens": array([[5, 6], [6, 6], [7, 8]], "int64"),
    "weights": array(np.ones((3, 2))),
}

MALFORMED = {
    "no target_tokens": (
        "cross_entropy",
        {"target_tokens": None},
        "no loss function input 'target_tokens'",
    ),
    "no weights": ("cross_entropy", {"weights": None}, "'weights'"),
    "weights of int": (
        "cross_entropy",
        {"weights": array([1, 1, 1], "int64")},
        "'weights' is int64",
    ),
    "targets of float": (
        "cross_entropy",
        {"target_tokens": array([5, 6, 7])},
        "'target_tokens' is float32",
    ),
    "narrow weights": (
        "cross_entropy",
        {"target_tokens": WIDE["target_tokens"]},
        r"'weights'.*shape \[3, 2\]",
    ),
    "wide weights": ("cross_entropy", {"weights": WIDE["weights"]}, r"'weights'.*shape \[3\]"),
    "wide target outside": (
        "cross_entropy",
        WIDE | {"target_tokens": array([[5, 6], [6, 100], [7, 8]], "int64")},
        "holds token 100 at position 1, 1",
    ),
    "too many targets": (
        "cross_entropy",
        {"target_tokens": array(np.zeros((3, MAX_TARGETS + 1)), "int64")},
        f"{MAX_TARGETS + 1} targets per token.*1 to {MAX_TARGETS}",
    ),
    "no targets": (
        "cross_entropy",
        {"target_tokens": array(np.zeros((3, 0)), "int64")},
        "0 targets per token",
    ),
    "three dimensions": (
        "cross_entropy",
        {"target_tokens": array(np.zeros((3, 1, 1)), "int64")},
        "'target_tokens'",
    ),
    "empty mask": (
        "gspo",
        {"sequence_ratio_mask": array([0, 0, 0])},
        "'sequence_ratio_mask' is 0 everywhere",
    ),
    "no mask": ("gspo", {"sequence_ratio_mask": None}, "'sequence_ratio_mask'"),
    "thresholds crossed": (
        "ppo",
        {"clip_low_threshold": array([0.5, 1.5, 0.5])},
        "'clip_low_threshold' is above 'clip_high_threshold' at position 1",
    ),
    "thresholds short": (
        "cispo",
        {"clip_high_threshold": array([2.0])},
        r"'clip_high_threshold'.*shape \[3\]",
    ),
    "an advantage outside": (
        "stable_reinforce",
        {"sequences": [0, 1, 1]},
        "'advantages' is not 0 at position 0.*span",
    ),
    "sequences short": ("stable_reinforce", {"sequences": [1, 1]}, "2 targets' sequences"),
    "sequences beyond": ("stable_reinforce", {"sequences": [1, 1, 4]}, "3 targets' sequences"),
    "sequences below": ("stable_reinforce", {"sequences": [1, 1, -1]}, "3 targets' sequences"),
    "bytes missing": (
        "ppo",
        {"logprobs": msgspec.structs.replace(array([1, 2, 3]), data=b"\0" * 8)},
        "8 bytes",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_datum_that_a_loss_cannot_use_is_named_with_its_input(case: str) -> None:
    loss, changes, says = MALFORMED[case]
    with pytest.raises(InvalidData, match="Datum 1") as caught:
        check_pass((datum(), datum(**changes)), LossSpec(name=loss), MODEL)
    with pytest.raises(InvalidData, match=says):
        raise caught.value


@proves("loss:stable_reinforce")
def test_without_provenance_tokens_with_an_advantage_or_a_samplers_logprob_are_one_sequence() -> (
    None
):
    changes = {"logprobs": array([0, -2, 0]), "advantages": array([0, 0, 3])}
    found = {
        tuple(sequences or ()): inputs_of(
            datum(sequences=sequences, **changes), LossSpec(name="stable_reinforce"), {}
        )
        for sequences in (None, [2, 1, 1])
    }
    assert {given: inputs["sampled_sequences"].tolist() for given, inputs in found.items()} == {
        (): [0, 1, 1],
        (2, 1, 1): [2, 1, 1],
    }


@pytest.mark.parametrize("loss", SAMPLED)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_tokens": WIDE["target_tokens"]}, "several targets per token"),
        ({"logprobs": None}, "'logprobs'"),
        (
            {"advantages": array([1, float("nan"), 0])},
            "'advantages' holds a NaN or infinite value. First at position 1",
        ),
        ({"logprobs": array([0, 0, -float("inf")])}, "First at position 2"),
    ],
)
def test_losses_of_sampled_tokens_have_one_finite_target_each(
    loss: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        check_pass((datum(**changes),), LossSpec(name=loss), MODEL)


def test_empty_and_overlong_requests_are_refused() -> None:
    with pytest.raises(InvalidData, match="no datum"):
        check_pass((), LossSpec(name="ppo"), MODEL)
    long = Datum(tokens=packed([1] * 9), inputs={})
    with pytest.raises(InvalidData, match=r"Datum 1: model_input has 9 tokens\. The model reads 8"):
        check_pass((datum(), long), LossSpec(name="ppo"), MODEL)


def test_thresholds_per_token_win_over_settings() -> None:
    loss = LossSpec(name="ppo", config={"clip_low_threshold": 0.7})
    one = datum(clip_high_threshold=array([1.5, 2.0, 2.5]))
    found = inputs_of(one, loss, check_pass((one,), loss, MODEL))
    assert found["clip_low_threshold"].tolist() == [np.float32(0.7)] * 3
    assert found["clip_high_threshold"].tolist() == [1.5, 2.0, 2.5]
