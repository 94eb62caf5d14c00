"""The objective: KL penalties, corrections for older data, the environment's own advantages,
minibatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from halteres.config.settings import Settings, TrainerSettings
from halteres.errors import InvalidData
from halteres.training.datums import Example, Row
from halteres.training.logprob_mismatch import agreement
from halteres.training.objective import Objective, TrainingBatch, corrected
from halteres.training.policy import SentCall, learning_rate, minibatches
from halteres.types import Batch, Span

from .fakes import FakePolicy, batch, example

KL = {"kl_coef": 0.5, "advantage": "group_mean"}


async def trained(
    config: TrainerSettings, given: Batch, policy: FakePolicy | None = None
) -> TrainingBatch:
    return await Objective(config, policy or FakePolicy()).training_batch(given)


def advantages(found: TrainingBatch) -> list[list[float]]:
    """Of the sampled tokens of every sequence that is trained on."""
    return [one.advantages_N[one.actions_N].tolist() for one in found.examples.useful]


async def test_without_options_the_advantages_of_a_group_are_those_of_its_scores() -> None:
    found = await trained(TrainerSettings(advantage="group_mean"), batch([0.0, 1.0]))
    assert advantages(found) == [[-0.5, -0.5], [0.5, 0.5]]
    assert found.kl_reference is None and found.share_corrected is None


async def test_a_kl_penalty_in_the_reward_is_taken_off_before_the_baseline() -> None:
    """Two sampled tokens, each 0.25 nats above the reference: 2 x 0.25 x 0.5 off every score, which
    cancels.
    """
    policy = FakePolicy()
    policy.divergence = 0.25
    found = await trained(TrainerSettings(**KL), batch([0.0, 1.0]), policy)
    assert found.kl_reference == pytest.approx(0.25)
    assert advantages(found) == [[-0.5, -0.5], [0.5, 0.5]]
    assert found.turns.scores_E.tolist() == [0.0, 1.0], "what is told of scores knows no penalty"
    found = await trained(
        TrainerSettings(**{**KL, "advantage": "reinforce"}), batch([0.0, 1.0]), policy
    )
    assert advantages(found) == [[-0.25, -0.25], [0.75, 0.75]]


async def test_the_implicit_reward_gap_is_how_much_further_better_answers_were_made_likely() -> (
    None
):
    """Nats per token: in the first group the better answer is 0.5 likelier than by the reference,
    the worse one 0.1 less likely; in the second group no answer is better.
    """
    (first, second) = batch([0.0, 1.0], [1.0, 1.0]).groups
    own = ((0.0, 0.0, -0.4, -0.15), (0.0, 0.0, -1.0, -0.75))
    groups = (replace(first, ref_logprobs=own), replace(second, ref_logprobs=own))
    found = await trained(TrainerSettings(**KL, reference="environment"), Batch(groups=groups))
    assert found.implicit_reward_gap == pytest.approx(0.6)
    equal = await trained(TrainerSettings(**KL), batch([1.0, 1.0]))
    assert equal.implicit_reward_gap is None, "no answer is better"
    without = await trained(TrainerSettings(advantage="group_mean"), batch([0.0, 1.0]))
    assert without.implicit_reward_gap is None, "no reference is asked"


async def test_an_answer_too_long_for_its_reference_is_left_out_of_the_implicit_reward_gap() -> (
    None
):
    """The only better answer is too long: nothing is known of how far it has moved, which is not
    0.
    """
    (group,) = batch([0.0, 1.0]).groups
    tokens, logprobs = (group.tokens[0], (1, *[2] * 8)), (group.logprobs[0], (1.0, *[-0.5] * 8))
    masks = (group.masks[0], (-100, *[2] * 8))
    longer = replace(group, tokens=tokens, masks=masks, logprobs=logprobs)
    policy = FakePolicy()
    policy.divergence = 0.25
    found = await trained(
        TrainerSettings(**KL, max_token_trainer_length=8), Batch(groups=(longer,)), policy
    )
    assert found.implicit_reward_gap is None


async def test_a_masked_rollout_is_not_pulled_either() -> None:
    (group,) = batch([0.0, 1.0, 1.0]).groups
    masked = replace(group, overrides=({}, {"set_advantage_to_zero": True}, {}))
    policy = FakePolicy()
    policy.divergence = 0.25
    for settings in ({"loss": "dro"}, {**KL, "kl_in": "loss"}):
        found = await trained(TrainerSettings(**settings), Batch(groups=(masked,)), policy)  # type: ignore[arg-type]
        assert len(found.examples.useful) == 2


async def test_a_batch_of_nothing_but_too_long_sequences_asks_the_reference_nothing() -> None:
    policy = FakePolicy()
    (group,) = batch([0.0, 1.0]).groups
    longer = replace(
        group,
        tokens=((1, *[2] * 8),) * 2,
        masks=((-100, *[2] * 8),) * 2,
        logprobs=((1.0, *[-0.5] * 8),) * 2,
    )
    found = await trained(
        TrainerSettings(**KL, max_token_trainer_length=8), Batch(groups=(longer,)), policy
    )
    assert (policy.calls, found.examples.useful) == ([], ())


async def test_what_rewards_lack_of_the_score_the_last_turn_earns_unless_they_are_values_of_states() -> (
    None
):
    (group,) = batch([1.0, 0.0]).groups
    spans = tuple(
        Span(sequence=s, start=2 + t, stop=3 + t, reward=r)
        for s, t, r in ((0, 0, 0.25), (0, 1, 0.5), (1, 0, 0.0))
    )
    given = Batch(groups=(replace(group, spans=spans),))
    by_rewards = await trained(TrainerSettings(advantage="reinforce", gamma=0.0), given)
    assert by_rewards.advantages_K.tolist() == [0.25, 0.75, 0.0]
    by_states = await trained(
        TrainerSettings(advantage="reinforce", gamma=0.0, turn_rewards="states"), given
    )
    assert by_states.advantages_K.tolist() == [0.25, 0.25, 0.0]


async def test_a_kl_penalty_in_the_loss_is_taken_off_every_token() -> None:
    """Also where scores say nothing: that batch still pulls the policy to its reference."""
    policy = FakePolicy()
    policy.divergence = 0.25
    found = await trained(TrainerSettings(**KL, kl_in="loss"), batch([1.0, 1.0]), policy)
    assert advantages(found) == [[-0.125, -0.125]] * 2


async def test_the_reference_may_be_what_the_environment_sends() -> None:
    given = batch([0.0, 1.0])
    (group,) = given.groups
    referred = replace(group, ref_logprobs=((0.0, 0.0, -0.75, -0.5),) * 2)
    policy = FakePolicy()
    config = TrainerSettings(**KL, reference="environment")
    found = await trained(config, Batch(groups=(referred,)), policy)
    assert found.kl_reference == pytest.approx(0.25) and policy.calls == []
    with pytest.raises(InvalidData, match=r"no ref_logprobs of its own.*trainer\.reference"):
        await trained(config, given)


async def test_the_environments_own_advantages_are_trained_on_where_they_are_asked_for() -> None:
    (group,) = batch([0.0, 1.0]).groups
    own = replace(group, advantages=((9.0, 9.0, 1.0, 2.0), (9.0, 9.0, 3.0, 4.0)))
    config = TrainerSettings(advantage="environment")
    assert advantages(await trained(config, Batch(groups=(own,)))) == [[1.0, 2.0], [3.0, 4.0]]
    masked = replace(own, overrides=({}, {"set_advantage_to_zero": True}))
    assert advantages(await trained(config, Batch(groups=(masked,)))) == [[1.0, 2.0]]
    with pytest.raises(InvalidData, match="no advantages of its own"):
        await trained(config, batch([0.0, 1.0]))


@pytest.mark.parametrize(
    ("correction", "drift", "factor"),
    [
        ("truncate", np.log(1.5), 1.5),
        ("truncate", np.log(4.0), 2.0),
        ("truncate", -np.log(4.0), 0.25),
        ("mask", np.log(1.5), 1.5),
        ("mask", np.log(4.0), 0.0),
        ("mask", -np.log(4.0), 0.0),
    ],
)
async def test_tokens_of_an_older_version_count_by_their_importance(
    correction: str, drift: float, factor: float
) -> None:
    policy = FakePolicy(version=3)
    policy.drift = drift
    config = TrainerSettings(advantage="group_mean", correction=correction, max_staleness=1)  # type: ignore[arg-type]
    found = await trained(config, batch([0.0, 1.0], version=2), policy)
    assert policy.calls == ["forward"]
    expected = [-0.5 * factor] * 2 + [0.5 * factor] * 2 if factor else []
    assert [*chain(*advantages(found))] == pytest.approx(expected)
    for one in found.examples.useful:  # the loss's own ratio starts from the present policy
        assert one.logprobs_N[one.actions_N].tolist() == pytest.approx(
            [-0.5 + drift, -0.25 + drift]
        )


async def test_tokens_sampled_at_another_temperature_count_by_their_importance_also_of_the_present_version() -> (
    None
):
    """The penalty, too, is of the present policy's log-probability then: 0.25 + log 1.5 nats above
    the reference.
    """
    policy = FakePolicy(version=3)
    policy.drift, policy.tempered = np.log(1.5), True
    given = batch([0.0, 1.0], version=3)
    corrected = await trained(
        TrainerSettings(advantage="group_mean", correction="truncate", loss="ppo"), given, policy
    )
    assert [*chain(*advantages(corrected))] == pytest.approx([-0.75] * 2 + [0.75] * 2)
    (group,) = given.groups
    referred = Batch(groups=(replace(group, ref_logprobs=((0.0, 0.0, -0.75, -0.5),) * 2),))
    config = TrainerSettings(**KL, reference="environment", correction="truncate")
    assert (await trained(config, referred, policy)).kl_reference == pytest.approx(
        0.25 + np.log(1.5)
    )
    by_its_own_ratio = await trained(TrainerSettings(advantage="group_mean"), given, policy)
    assert advantages(by_its_own_ratio) == [[-0.5, -0.5], [0.5, 0.5]]
    assert by_its_own_ratio.examples.useful[0].logprobs_N.tolist() == [0.0, -0.5, -0.25]


@pytest.mark.parametrize(
    ("temperature", "trainer", "corrected"),
    [
        (1.0, {}, False),
        (0.7, {}, True),
        (1.3, {"loss": "cispo"}, True),
        (0, {}, False),
        (0.7, {"loss": "ppo"}, False),
        (0.7, {"loss": "ppo", "correction": "truncate"}, True),
        (0.7, {"loss": "cross_entropy"}, False),
    ],
)
def test_a_temperature_is_corrected_where_a_ratio_weighs_every_token(
    temperature: float, trainer: dict[str, object], corrected: bool
) -> None:
    """A loss that clips the ratio would leave tokens out by how they were sampled; greedy answers
    have no ratio.
    """
    settings = Settings(env={"temperature": temperature}, trainer=TrainerSettings(**trainer))  # type: ignore[arg-type]
    assert settings.corrects_temperature is corrected


@pytest.mark.parametrize("config", [{"kl_coef": 0.1}, {"correction": "mask"}, {"loss": "ppo"}])
async def test_log_probabilities_are_asked_for_where_the_loss_the_penalty_or_the_correction_reads_them(
    config: dict[str, object],
) -> None:
    (group,) = batch([0.0, 1.0]).groups
    bare = Batch(groups=(replace(group, logprobs=()),))
    found = await trained(TrainerSettings(advantage="group_mean", loss="cross_entropy"), bare)
    assert advantages(found) == [[-0.5, -0.5], [0.5, 0.5]]
    with pytest.raises(InvalidData, match="log-probabilities for 0"):
        await trained(TrainerSettings(**{"loss": "cross_entropy", **config}), bare)  # type: ignore[arg-type]


async def test_data_of_the_present_version_needs_no_correction_and_no_further_pass() -> None:
    policy = FakePolicy(version=3)
    config = TrainerSettings(correction="truncate", max_staleness=1)
    assert (await trained(config, batch([0.0, 1.0], version=3), policy)).share_corrected is None
    assert policy.calls == []


async def test_tokens_of_the_present_version_are_corrected_where_the_sampler_is_not_exact() -> None:
    """They were drawn by something that computes other probabilities. What is compared stays the
    sampler's.
    """
    policy = FakePolicy(version=3)
    policy.drift, policy.exact = np.log(1.5), False
    given = batch([0.0, 1.0], version=3)
    config = corrected(TrainerSettings(advantage="group_mean"), exact=False, given=False)
    found = await trained(config, given, policy)
    assert policy.calls == ["forward"]
    assert [*chain(*advantages(found))] == pytest.approx([-0.75] * 2 + [0.75] * 2)
    for one in found.examples.useful:
        assert one.logprobs_N[one.actions_N].tolist() == pytest.approx(
            [-0.5 + np.log(1.5), -0.25 + np.log(1.5)]
        )
        assert one.sampled_N[one.actions_N].tolist() == [-0.5, -0.25]
    passed = [one.logprobs_N for one in found.examples.useful]
    assert agreement(found.examples.useful, passed, 3)["kl_sample_train_v1"] == pytest.approx(
        -np.log(1.5)
    )


@pytest.mark.parametrize(
    ("settings", "exact", "given", "correction"),
    [
        ({}, False, False, "truncate"),
        ({}, True, False, "none"),
        ({}, False, True, "none"),
        ({"correction": "mask"}, False, True, "mask"),
        ({"correction": "mask"}, True, True, "mask"),
        ({"loss": "ppo"}, False, False, "truncate"),
        # it reads no log-probabilities, and groups may have none
        ({"loss": "cross_entropy"}, False, False, "none"),
    ],
)
def test_importance_is_truncated_where_the_sampler_is_not_exact_unless_a_correction_was_given(
    settings: dict[str, Any], exact: bool, given: bool, correction: str
) -> None:
    config = TrainerSettings(**settings)
    assert corrected(config, exact=exact, given=given).correction == correction
    assert TrainerSettings().correction == "none"


async def test_a_sequence_that_is_too_long_is_not_asked_of_the_reference_either() -> None:
    (group,) = batch([0.0, 1.0]).groups
    longer = replace(
        group,
        tokens=(group.tokens[0], (1, *[2] * 8)),
        masks=(group.masks[0], (-100, *[2] * 8)),
        logprobs=(group.logprobs[0], (1.0, *[-0.5] * 8)),
    )
    asked: list[int] = []

    class Asked(FakePolicy):
        def reference(self, examples: Sequence[Example]) -> SentCall[tuple[Row, ...]]:
            asked.extend(len(one.tokens_N) for one in examples)
            return super().reference(examples)

    config = TrainerSettings(**KL, max_token_trainer_length=8)
    found = await trained(config, Batch(groups=(longer,)), Asked())
    assert (asked, found.examples.too_long, len(found.examples.useful)) == ([3], 1, 1)


def test_the_learning_rate_warms_up_and_goes_down() -> None:
    def rates(**changes: object) -> list[float]:
        config = TrainerSettings(learning_rate=1.0, total_steps=6, **changes)  # type: ignore[arg-type]
        return [round(learning_rate(config, step), 3) for step in range(1, 7)]

    assert rates() == [1.0] * 6
    assert rates(warmup_steps=2) == [0.333, 0.667, 1.0, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=2, schedule="linear") == [0.333, 0.667, 1.0, 0.75, 0.5, 0.25]
    assert rates(schedule="cosine") == [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]


def test_minibatches_hold_every_example_once_in_every_epoch_in_an_order_of_their_own() -> None:
    examples = [example([number, 1], [1.0, -0.5], 1.0) for number in range(10)]
    config = TrainerSettings(epochs=2, minibatches=3, loss="ppo")

    def drawn(step: int) -> list[list[int]]:
        return [
            [int(one.tokens_N[0]) for one in part]
            for part in minibatches(examples, config, 7, step)
        ]

    parts = drawn(1)
    assert [len(part) for part in parts] == [3, 3, 4] * 2
    assert sorted(chain(*parts[:3])) == sorted(chain(*parts[3:])) == list(range(10))
    assert parts[:3] != parts[3:] and drawn(1) == parts and drawn(2) != parts


def test_a_batch_is_one_pass_in_its_own_order_unless_asked_otherwise() -> None:
    examples = [example([number, 1], [1.0, -0.5], 1.0) for number in range(3)]
    assert list(minibatches(examples, TrainerSettings(), 7, 1)) == [examples]
    assert list(minibatches([], TrainerSettings(), 7, 1)) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "importance_samplng"}, "must be one of cross_entropy, importance_sampling"),
        ({"loss": "ppo", "loss_config": {"clip": 1}}, "The loss ppo has no setting 'clip'"),
        ({"loss": "ppo", "loss_config": {"clip_high_threshold": 0.1}}, "Both are ratios"),
        ({"max_staleness": 1}, "does not bound how far the policy may have moved"),
        ({"epochs": 2}, "does not bound"),
        ({"advantage": "environment", "kl_coef": 0.1}, "must be 'loss'"),
        ({"advantage": "environment", "weighting": "episode"}, "must be 'token'"),
        ({"advantage": "rebm"}, "should be"),
        ({"warmup_steps": 40}, r"must be below total_steps \(40\)"),
        ({"loss_config": {"beta": float("nan")}, "loss": "dro"}, "finite"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, object], told: str
) -> None:
    with pytest.raises(ValidationError, match=told):
        TrainerSettings(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_staleness": 1, "loss": "ppo"},
        {"max_staleness": 1, "correction": "truncate"},
        {"max_staleness": 1, "allow_unclipped_staleness": True},
        {"epochs": 2, "minibatches": 2, "loss": "stable_reinforce"},
    ],
)
def test_older_data_is_allowed_where_something_bounds_it(settings: dict[str, object]) -> None:
    TrainerSettings(**settings)  # type: ignore[arg-type]
