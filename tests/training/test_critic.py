"""The trainer's side of the critic: what is asked of it and when, what its values become, what its
failures are called.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halteres.config.settings import Settings, TrainerSettings
from halteres.errors import InvalidData, NotReady
from halteres.observe.metrics import read_rows
from halteres.training.advantages import standardised
from halteres.training.batch_source import Trajectories
from halteres.training.critic import Critic
from halteres.training.failures import CriticFailed, LossNotFinite
from halteres.training.folder import RunFolder
from halteres.training.loop import close, train
from halteres.training.objective import Objective, TrainingBatch
from halteres.training.report import Report
from halteres.types import Batch, Span

from .fakes import REGISTRATION, FakeCritic, FakePolicy, FakeServer, batch, stopping

GAE: dict[str, Any] = {"advantage": "gae", "gamma": 0.5, "gae_lambda": 0.5}


def settings(**changes: Any) -> TrainerSettings:
    plain = {"total_steps": 4, "checkpoint_every": 2, "eval_every": 0}
    return TrainerSettings(**{**GAE, **plain, **changes})


async def objective_of(
    config: TrainerSettings, given: Batch, policy: FakePolicy | None = None, value: float = 0.0
) -> TrainingBatch:
    critic = Critic(FakeCritic(value), config, seed=0, step=0)
    return await Objective(config, policy or FakePolicy(), critic).training_batch(given)


async def run(
    folder: Path, process: FakeCritic, policy: FakePolicy | None = None, **changes: Any
) -> Critic:
    config = settings(**changes)
    folder.mkdir(exist_ok=True)
    server = FakeServer(lambda version: batch([0.0, 1.0], [1.0, 1.0], version=version))
    report = Report(RunFolder(folder))
    critic = Critic(process, config, seed=7, step=0)
    policy = policy or FakePolicy(calls=process.calls)
    source = Trajectories(server, REGISTRATION, stopping(folder))
    done = await train(policy, source, report, Settings(trainer=config), 0, critic)
    await close(policy, report, done, "all steps are done", critic=critic)
    return critic


def two_turns() -> Batch:
    """Two episodes of two sampled tokens, each token a turn of its own."""
    (group,) = batch([1.0, 0.0]).groups
    spans = tuple(
        Span(sequence=s, start=2 + t, stop=3 + t, reward=r)
        for s, t, r in ((0, 0, 0.25), (0, 1, 0.75), (1, 0, 0.0), (1, 1, 0.0))
    )
    return Batch(groups=(replace(group, spans=spans),))


async def test_the_values_become_advantages_of_tokens_whitened_over_the_batch() -> None:
    """By hand, of values 0.2, γ and λ ½: δ = 0.25 + 0.1 - 0.2 and 0.75 - 0.2; -0.1 and -0.2."""
    found = await objective_of(settings(), two_turns(), value=0.2)
    assert found.values is not None
    raw = [0.15 + 0.25 * 0.55, 0.55, -0.1 - 0.25 * 0.2, -0.2]
    np.testing.assert_allclose(found.values.advantages_M, raw)
    np.testing.assert_allclose(found.values.returns_M, [one + 0.2 for one in raw])
    whitened = standardised(np.array(raw))
    trained = [one.advantages_N[one.actions_N].tolist() for one in found.examples.useful]
    np.testing.assert_allclose(np.concatenate(trained), whitened, rtol=1e-6)
    np.testing.assert_allclose(found.advantages_K, whitened)


async def test_a_kl_penalty_in_the_reward_is_a_reward_of_each_token() -> None:
    policy = FakePolicy()
    policy.divergence = 0.25
    without = await objective_of(settings(gae_lambda=1.0, gamma=1.0), two_turns())
    found = await objective_of(
        settings(gae_lambda=1.0, gamma=1.0, kl_coef=0.4), two_turns(), policy
    )
    assert found.values is not None and without.values is not None
    np.testing.assert_allclose(
        found.values.returns_M, without.values.returns_M - [0.2, 0.1, 0.2, 0.1], atol=1e-7
    )
    assert found.kl_reference == pytest.approx(0.25)


async def test_weighting_shares_a_turns_advantage_among_its_tokens() -> None:
    """Turns of one and of three tokens, two on average: they count 2/1 and 2/3."""
    (group,) = batch([1.0]).groups
    one = replace(
        group,
        tokens=((1, 2, 3, 1, 4, 5, 6),),
        masks=((-100, -100, 3, -100, 4, 5, 6),),
        logprobs=((1.0, 1.0, -0.5, 1.0, -0.5, -0.5, -0.5),),
        spans=(
            Span(sequence=0, start=2, stop=3, reward=0.5),
            Span(sequence=0, start=4, stop=7, reward=0.5),
        ),
    )
    found = [
        (await objective_of(settings(weighting=weighting), Batch(groups=(one,)))).examples.useful
        for weighting in ("token", "turn")
    ]
    plain_N, shared_N = (only.advantages_N[only.actions_N] for (only,) in found)
    np.testing.assert_allclose(shared_N, plain_N * [2, 2 / 3, 2 / 3, 2 / 3], rtol=1e-6)


async def test_masked_episodes_and_sequences_that_are_too_long_are_not_shown_to_the_critic() -> (
    None
):
    (group,) = batch([0.0, 1.0, 1.0]).groups
    masked = replace(group, overrides=({}, {"set_advantage_to_zero": True}, {}))
    process, config = FakeCritic(), settings()
    critic = Critic(process, config, seed=0, step=0)
    found = await Objective(config, FakePolicy(), critic).training_batch(Batch(groups=(masked,)))
    assert found.values is not None
    await critic.update(found.values)
    assert [one.tokens for one in process.updates[0].sequences] == [[1, 2, 3], [1, 2, 5]]
    assert [one.rows for one in process.updates[0].sequences] == [[1, 2], [1, 2]]


async def test_a_step_asks_for_values_learns_beside_the_policy_and_keeps_its_state_first(
    tmp_path: Path,
) -> None:
    process = FakeCritic(0.5)
    critic = await run(tmp_path, process)
    assert critic.step == 4
    assert process.calls[:5] == [
        "values 0",
        "forward_backward",
        "optim_step",
        "update 1",
        "publish 1",
    ]
    saves = [call for call in process.calls if "save" in call or "keep" in call]
    assert saves == ["keep 2", "save step-000002", "keep 4", "save final"]
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert (row["critic/loss"], row["critic/clipped"], row["critic/gradient_norm"]) == (
        0.5,
        0.25,
        1.0,
    )
    assert row["critic/explained_variance"] == pytest.approx(0.0, abs=1.0)
    assert row["critic/advantage_abs"] > 0


async def test_epochs_and_minibatches_of_the_critic_are_the_policys_unless_said(
    tmp_path: Path,
) -> None:
    process, own = FakeCritic(), FakeCritic()
    several = {"loss": "ppo", "epochs": 2, "minibatches": 2}
    await run(tmp_path / "same", process, **several)
    await run(tmp_path / "own", own, critic_epochs=3, critic_learning_rate=0.01, critic_clip=0.7)
    first, other = process.updates[0], own.updates[0]
    assert [len(one) for one in first.minibatches] == [2, 2, 2, 2]
    assert sorted(first.minibatches[0] + first.minibatches[1]) == [0, 1, 2, 3]
    assert (first.learning_rate, first.clip) == (TrainerSettings().learning_rate, 0.2)
    assert [sorted(one) for one in other.minibatches] == [[0, 1, 2, 3]] * 3
    assert (other.learning_rate, other.clip) == (0.01, 0.7)


async def test_warm_up_steps_train_the_critic_alone(tmp_path: Path) -> None:
    process = FakeCritic()
    policy = FakePolicy(calls=process.calls)
    await run(tmp_path, process, policy, critic_warmup_steps=2)
    assert policy.version == 2 and [one.step for one in process.updates] == [1, 2, 3, 4]
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["train/updates"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    assert not any(row["train/skipped"] for row in rows)


async def test_a_critic_that_does_not_answer_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    process = FakeCritic()
    process.fails = NotReady("http://there/values cannot be reached.", "Connection refused.")
    with pytest.raises(CriticFailed, match=r"critic.*'values'.*refused.*logs/critic\.log"):
        await run(tmp_path, process)
    assert not (tmp_path / "metrics.jsonl").exists(), "no step was taken"


async def test_a_refused_update_ends_the_run_and_a_failed_pass_ends_the_update(
    tmp_path: Path,
) -> None:
    process, policy = FakeCritic(), FakePolicy()

    def refuse() -> float:
        raise LossNotFinite("The loss is nan.")

    policy.loss = refuse
    with pytest.raises(LossNotFinite):
        await run(tmp_path, process, policy)

    class Refusing(FakeCritic):
        async def update(self, request: Any) -> Any:
            raise InvalidData("http://there/update answered 422.", "It is at step 3.")

    with pytest.raises(CriticFailed, match=r"'update'.*It is at step 3"):
        await run(tmp_path / "refused", Refusing())


async def test_a_batch_without_sampled_tokens_asks_for_no_values_and_counts_as_an_update() -> None:
    process, config = FakeCritic(), settings(max_token_trainer_length=8)
    critic = Critic(process, config, seed=0, step=0)
    (group,) = batch([0.0, 1.0]).groups
    longer = replace(
        group,
        tokens=((1, *[2] * 8),) * 2,
        masks=((-100, *[2] * 8),) * 2,
        logprobs=((1.0, *[-0.5] * 8),) * 2,
    )
    found = await Objective(config, FakePolicy(), critic).training_batch(Batch(groups=(longer,)))
    assert found.values is not None and found.examples.useful == ()
    await critic.update(found.values)
    assert process.calls == ["update 1"] and process.updates[0].minibatches == []
