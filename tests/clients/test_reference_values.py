"""Our estimators and losses beside those of TRL 1.16 and tinker-cookbook 0.6.1, number by number.

Both are called as they are, in environments of their own, with rewards and log-probabilities that
are given to them. What differs on purpose is named by the test that undoes it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training.fakes import FakePolicy

from halteres.config.settings import Estimator, TrainerSettings
from halteres.engine.checks import complete_loss
from halteres.engine.protocol import LossSpec
from halteres.engine.torch.losses import LOSSES, PerToken
from halteres.engine.torch.micro_batches import Example as Row
from halteres.engine.torch.micro_batches import MicroBatch
from halteres.models import TINY, builtin_path
from halteres.training.advantages import estimate
from halteres.training.datums import Example
from halteres.training.logprob_mismatch import agreement
from halteres.training.objective import Objective
from halteres.training.policy import SentCall
from halteres.training.turns import returns, turns_of
from halteres.types import Batch, Group, Span

from .conftest import ROOT
from .test_cookbook import REQUIREMENTS

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
GROUP, LONGEST, BETA, GAMMA = 4, 3, 0.1, 0.9
RANDOM = np.random.default_rng(0)

LENGTHS = [3, 2, 1, 3, 2, 2, 3, 1]
"""Sampled tokens of each answer."""

REWARDS = RANDOM.normal(0, 1, len(LENGTHS)).round(3).tolist()
LOGPROBS = RANDOM.normal(-2, 1, (len(LENGTHS), LONGEST))
SAMPLED = LOGPROBS + RANDOM.normal(0, 0.3, LOGPROBS.shape)
REFERENCE = SAMPLED + RANDOM.normal(0, 0.2, LOGPROBS.shape)
MASK = (np.arange(LONGEST) < np.array(LENGTHS)[:, None]).astype(int)

TRL_LOSSES: dict[str, dict[str, Any]] = {
    "importance_sampling": {"loss_type": "dr_grpo", "epsilon": 1.0, "epsilon_high": 1e9},
    "ppo": {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    "ppo by token": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "ppo by episode": {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.1,
        "epsilon_high": 0.05,
    },
}


def ran(python: str, program: str, folder: Path, asked: dict[str, Any], **variables: str) -> Any:
    """What a program answers to these questions."""
    questions, answers = folder / "questions.json", folder / "answers.json"
    questions.write_text(json.dumps(asked))
    environment = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        **variables,
    }
    command = [python, HERE / program, questions, answers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(answers.read_text())


@pytest.fixture(scope="module")
def trl(client_python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trl")
    rewards = np.array(REWARDS).reshape(-1, GROUP)
    asked = {
        "model": str(builtin_path(TINY)),
        "scratch": str(folder),
        "group": GROUP,
        "beta": BETA,
        "rewards": REWARDS,
        "advantages": (rewards - rewards.mean(axis=1, keepdims=True)).ravel().tolist(),
        "logprobs": LOGPROBS.tolist(),
        "sampled": SAMPLED.tolist(),
        "reference": REFERENCE.tolist(),
        "mask": MASK.tolist(),
        "losses": TRL_LOSSES,
    }
    return ran(
        client_python("trl", "torch", "trl==1.16.*", "peft", "datasets"),
        "trl_values.py",
        folder,
        asked,
    )


def answers_of(lengths: list[int]) -> Batch:
    """Groups of answers to a prompt of one token; the reference's log-probabilities are with
    them.
    """
    groups: list[Group] = []
    for first in range(0, len(lengths), GROUP):
        those = range(first, first + GROUP)
        groups.append(
            Group(
                tokens=tuple((1, *range(2, 2 + lengths[i])) for i in those),
                masks=tuple((-100, *range(2, 2 + lengths[i])) for i in those),
                scores=tuple(REWARDS[i] for i in those),
                logprobs=tuple((1.0, *SAMPLED[i, : lengths[i]].tolist()) for i in those),
                versions=((0, 0),) * GROUP,
                ref_logprobs=tuple((0.0, *REFERENCE[i, : lengths[i]].tolist()) for i in those),
            )
        )
    return Batch(groups=tuple(groups))


@pytest.mark.parametrize("estimator", ["group_std", "group_mean", "rloo"])
def test_advantages_are_trls(trl: Any, estimator: Estimator) -> None:
    """TRL adds 1e-4 to the standard deviation (ddof 1, as ours); where scores are equal, we say 0
    instead.
    """
    ours = estimate(turns_of(answers_of(LENGTHS)), estimator)
    if estimator == "group_std":
        deviations = np.array(REWARDS).reshape(-1, GROUP).std(axis=1, ddof=1).repeat(GROUP)
        ours = ours * deviations / (deviations + 1e-4)
    assert trl[estimator] == pytest.approx(ours.tolist(), rel=1e-6)


async def test_a_kl_penalty_in_the_reward_is_that_of_trls_rloo(trl: Any) -> None:
    """k1, the sampler's minus the reference's log-probability, summed over an answer, before the
    baseline.
    """
    config = TrainerSettings(
        advantage="rloo", kl_coef=BETA, kl_in="reward", reference="environment"
    )
    found = await Objective(config, FakePolicy()).training_batch(
        answers_of([LONGEST] * len(LENGTHS))
    )
    assert trl["rloo_kl"] == pytest.approx(found.advantages_K.tolist(), rel=1e-5)


async def loss_of(
    name: str, examples: tuple[Example, ...], **config: float
) -> tuple[float, np.ndarray]:
    """The loss as the torch engine sums it, and its gradient by log-probability."""
    spec = LossSpec(name=name, config=config)
    settings = complete_loss(spec)
    rows: list[Row] = []
    for example in examples:
        inputs = {
            "advantages": example.advantages_N,
            "logprobs": example.logprobs_N,
            "sequence_ratio_mask": example.actions_N.astype(np.float32),
            **{
                key: np.full(len(example.tokens_N), value, np.float32)
                for key, value in settings.items()
            },
        }
        rows.append(Row(example.tokens_N, example.targets_N, inputs))
    batch = MicroBatch.of(rows, torch.device("cpu"))
    logprobs = torch.zeros(batch.rows, batch.length)
    logprobs[: len(LENGTHS), :LONGEST] = torch.from_numpy(LOGPROBS).float()
    value = PerToken(LOSSES[name], settings).value(logprobs, batch, True)
    assert value.gradient is not None
    return value.total, value.gradient[: len(LENGTHS), :LONGEST].double().numpy()


@pytest.mark.parametrize(
    ("theirs", "loss", "weighting", "config", "scale"),
    [
        ("importance_sampling", "importance_sampling", "token", {}, len(LENGTHS) * LONGEST),
        (
            "ppo",
            "ppo",
            "token",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            len(LENGTHS) * LONGEST,
        ),
        (
            "ppo by token",
            "ppo",
            "token",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            sum(LENGTHS),
        ),
        (
            "ppo by episode",
            "ppo",
            "episode",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
            sum(LENGTHS),
        ),
        (
            "cispo",
            "cispo",
            "token",
            {"clip_low_threshold": 0.0, "clip_high_threshold": 1.1},
            sum(LENGTHS),
        ),
        (
            "gspo",
            "gspo",
            "episode",
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05},
            sum(LENGTHS),
        ),
    ],
)
async def test_losses_are_trls_but_for_its_means(
    trl: Any, theirs: str, loss: str, weighting: Any, config: dict[str, float], scale: float
) -> None:
    """Ours are sums, TRL's are means; `scale` is what theirs are divided by.

    dr_grpo: answers times the longest allowed; dapo and cispo: tokens; grpo, gspo: a mean over
    answers of means over tokens, which is our `weighting: episode` over the number of tokens. TRL
    counts distances from 1, we ratios (but of its cispo, whose only bound is a ratio).
    """
    config_ = TrainerSettings(
        advantage="group_mean", loss=loss, loss_config=config, weighting=weighting
    )
    found = await Objective(config_, FakePolicy()).training_batch(answers_of(LENGTHS))
    total, gradient = await loss_of(loss, found.examples.useful, **config)
    assert total == pytest.approx(scale * trl["losses"][theirs]["value"], rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(
        gradient, scale * np.array(trl["losses"][theirs]["gradient"]), rtol=2e-4, atol=2e-5
    )


def episodes() -> list[list[list[dict[str, Any]]]]:
    """Two groups of two episodes; the second turn's prompt continues the first's answer."""
    random = np.random.default_rng(1)
    made: list[list[list[dict[str, Any]]]] = []
    for group in range(2):
        made.append([])
        for episode in range(2):
            prompt, turns = [1, 2 + group], []
            for _ in range(1 + episode):
                action = random.integers(3, 9, 2).tolist()
                lp = random.normal(-1, 0.3, 2).round(3).tolist()
                turns.append(
                    {
                        "prompt": prompt,
                        "action": action,
                        "logprobs": lp,
                        "reward": float(random.normal()),
                    }
                )
                prompt = [*prompt, *action, 7]
            made[-1].append(turns)
    return made


EPISODES = episodes()


def batch_of(groups: list[list[list[dict[str, Any]]]]) -> Batch:
    made: list[Group] = []
    for group in groups:
        tokens = [[*turns[-1]["prompt"], *turns[-1]["action"]] for turns in group]
        logprobs = [[1.0] * len(row) for row in tokens]
        spans: list[Span] = []
        for e, turns in enumerate(group):
            for turn in turns:
                start, stop = len(turn["prompt"]), len(turn["prompt"]) + 2
                logprobs[e][start:stop] = turn["logprobs"]
                spans.append(Span(sequence=e, start=start, stop=stop, reward=turn["reward"]))
        made.append(
            Group(
                tokens=tuple(map(tuple, tokens)),
                masks=tuple(
                    tuple(-100 if lp == 1.0 else t for t, lp in zip(*row, strict=True))
                    for row in zip(tokens, logprobs, strict=True)
                ),
                scores=tuple(sum(turn["reward"] for turn in turns) for turns in group),
                logprobs=tuple(map(tuple, logprobs)),
                versions=((0, 0),) * len(group),
                spans=tuple(spans),
            )
        )
    return Batch(groups=tuple(made))


TOKENS_OF = [[len(turns[-1]["prompt"]) + 2 for turns in group] for group in EPISODES]
BASE = [RANDOM.normal(-1, 0.3, n - 1).round(3).tolist() for group in TOKENS_OF for n in group]
TRAINING = [RANDOM.normal(-1, 0.3, n - 1).round(3).tolist() for group in TOKENS_OF for n in group]


@pytest.fixture(scope="module")
def cookbook(client_python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [ROOT / "scripts" / "sources", "tinker-cookbook", "0.6.1"]
    sources = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    ).stdout.strip()
    asked = {
        "groups": EPISODES,
        "reference": BASE,
        "training": TRAINING,
        "beta": BETA,
        "gamma": GAMMA,
        "rewards": REWARDS,
    }
    python = client_python("cookbook", *REQUIREMENTS)
    return ran(
        python, "cookbook_values.py", tmp_path_factory.mktemp("cookbook"), asked, PYTHONPATH=sources
    )


class Referred(FakePolicy):
    """A learner whose base model's log-probabilities are given."""

    def reference(self, examples: Any) -> SentCall[Any]:
        rows = tuple(np.array(row, np.float32) for row in BASE)
        return replace_answer(super().reference(examples), rows)


def replace_answer(promise: SentCall[Any], answer: Any) -> SentCall[Any]:
    return SentCall(promise, "reference", lambda _: answer)


async def test_advantages_and_datums_are_the_cookbooks(cookbook: Any) -> None:
    """Its rewards are float32; its `mask` says what an advantage of 0 says here."""
    config = TrainerSettings(advantage="group_mean")
    found = await Objective(config, FakePolicy()).training_batch(batch_of(EPISODES))
    for ours, theirs in zip(found.examples.useful, cookbook["data"], strict=True):
        assert ours.targets_N.tolist() == theirs["target_tokens"]
        assert ours.logprobs_N.tolist() == pytest.approx(theirs["logprobs"], abs=1e-6)
        assert ours.advantages_N.tolist() == pytest.approx(theirs["advantages"], abs=1e-6)
        assert ours.actions_N.tolist() == [bool(one) for one in theirs["mask"]]


async def test_a_kl_penalty_in_the_loss_is_the_cookbooks_but_for_its_mean(cookbook: Any) -> None:
    """It adds the mean penalty of the batch back, so that the sum over tokens stays; ours is the
    penalty alone.
    """
    config = TrainerSettings(advantage="group_mean", kl_coef=BETA, kl_in="loss")
    found = await Objective(config, Referred()).training_batch(batch_of(EPISODES))
    assert found.kl_reference == pytest.approx(cookbook["kl"], abs=1e-6)
    for ours, theirs in zip(found.examples.useful, cookbook["penalised"], strict=True):
        expected = np.array(theirs["advantages"]) - BETA * cookbook["kl"] * np.array(theirs["mask"])
        assert ours.advantages_N.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


async def test_agreement_is_the_cookbooks(cookbook: Any) -> None:
    found = await Objective(TrainerSettings(advantage="group_mean"), FakePolicy()).training_batch(
        batch_of(EPISODES)
    )
    ours = agreement(
        found.examples.useful, [np.array(row, np.float32) for row in TRAINING], version=0
    )
    for name in ("kl_sample_train_v1", "kl_sample_train_v2"):
        assert ours[name] == pytest.approx(cookbook["agreement"][f"optim/{name}"], abs=1e-6)


def test_returns_are_the_cookbooks_discounted_sums(cookbook: Any) -> None:
    turns = turns_of(batch_of([EPISODES[0][:1]]))
    one_episode = replace(
        turns,
        rewards_K=np.array(REWARDS),
        episode_K=np.zeros(len(REWARDS), np.int64),
        spans_K=turns.spans_K,
    )
    assert returns(one_episode, GAMMA).tolist() == pytest.approx(cookbook["returns"], abs=1e-12)
