"""The critic: its values, the loss that it learns by, and that each update is done once, whatever
is killed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halteres.clients.critic import STATE, CriticClient, Rows, Targets, UpdateRequest, step_name
from halteres.config.settings import TrainerSettings
from halteres.errors import Conflict, InvalidData, ServerError
from halteres.models import TINY
from halteres.rewards import RewardConfig, RewardModel, RewardTrainer
from halteres.rewards.critic import create_app
from halteres.rewards.torch.critic import (
    OPTIMISER,
    Critic,
    LossNotFinite,
    value_loss,
)
from halteres.rewards.training_plan import LoraSettings
from halteres.training import critic as training
from halteres.training.failures import CriticFailed
from halteres.training.gae import SampledTokens

from .standin_model import listening
from .torch_fixtures import sums, tiny

KEY = "tml-run-key"


def opened(place: Path, folder: Path | None = None, **changes: Any) -> Critic:
    return Critic.open(folder or tiny(), place, **{"rank": 4, "seed": 3, **changes})


def sequences(count: int = 5, seed: int = 0) -> list[Rows]:
    """Of several lengths; all but one begin alike."""
    random = np.random.default_rng(seed)
    start = random.integers(5, 200, 6).tolist()
    found: list[Rows] = []
    for number in range(count):
        own = random.integers(5, 200, int(random.integers(3, 9))).tolist()
        tokens = own if number == 0 else start + own
        found.append(Rows(tokens=tokens, rows=list(range(1, len(tokens), 2))))
    return found


def request(step: int, critic: Critic, goal: float = 1.0, epochs: int = 2) -> UpdateRequest:
    """Two minibatches in each epoch; every place is to be worth `goal`."""
    asked = sequences()
    values = critic.values(critic.step, asked)
    targets = [
        Targets(tokens=one.tokens, rows=one.rows, values=own, returns=[goal] * len(own))
        for one, own in zip(asked, values, strict=True)
    ]
    order = [[0, 3], [1, 2, 4]] * epochs
    return UpdateRequest(
        step=step, sequences=targets, minibatches=order, learning_rate=0.02, clip=0.5
    )


def reward_model(folder: Path, **settings: Any) -> Path:
    config = RewardConfig(
        output_dir=str(folder), max_steps=2, learning_rate=1e-2, disable_tqdm=True, **settings
    )
    RewardTrainer(TINY, config, train_dataset=sums(16)).train()
    return folder


def test_on_a_base_model_every_value_is_0_until_it_has_learnt(tmp_path: Path) -> None:
    found = opened(tmp_path).values(0, sequences())
    assert [len(own) for own in found] == [len(one.rows) for one in sequences()]
    assert {value for own in found for value in own} == {0.0}


@pytest.mark.parametrize("lora", [None, LoraSettings(r=4, lora_alpha=8)], ids=["whole", "adapter"])
def test_from_a_reward_model_a_value_is_its_score_of_what_stands_before(
    tmp_path: Path, lora: LoraSettings | None
) -> None:
    folder = reward_model(tmp_path / "model", lora=lora)
    model, asked = RewardModel.load(folder), sequences()
    critic = opened(tmp_path / "critic", folder)
    found = critic.values(0, asked)
    network = model.network
    with torch.inference_mode():
        for one, own in zip(asked, found, strict=True):
            prefixes = [np.array(one.tokens[: row + 1], np.int64) for row in one.rows]
            scores = network.outputs(prefixes, share=False).squeeze(-1).tolist()
            assert own == pytest.approx(scores, abs=1e-5)
    assert len({value for own in found for value in own}) > 10
    critic.update(request(1, critic))
    again = opened(tmp_path / "critic", folder)
    assert again.values(1, asked) == critic.values(1, asked) != found


def test_the_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    """The reference is written as cases, in float64, without a maximum."""
    random = np.random.default_rng(1)
    values, sampled, returns = (random.normal(size=200) for _ in range(3))
    clip = 0.4

    def reference(v: float, old: float, goal: float) -> tuple[float, float, bool]:
        """Loss, slope by v, and whether the clip raised it."""
        if abs(v - old) <= clip:
            return (v - goal) ** 2 / 2, v - goal, False
        bounded = old + math.copysign(clip, v - old)
        if abs(bounded - goal) > abs(v - goal):
            return (bounded - goal) ** 2 / 2, 0.0, True
        return (v - goal) ** 2 / 2, v - goal, False

    expected = [reference(*one) for one in zip(values, sampled, returns, strict=True)]
    values_M = torch.tensor(values, requires_grad=True)
    loss_M, raised_M = value_loss(values_M, torch.tensor(sampled), torch.tensor(returns), clip)
    loss_M.sum().backward()
    assert values_M.grad is not None
    assert loss_M.tolist() == pytest.approx([one[0] for one in expected], rel=1e-12)
    assert values_M.grad.tolist() == pytest.approx([one[1] for one in expected], rel=1e-12)
    assert raised_M.tolist() == [one[2] for one in expected]
    assert 0 < raised_M.sum() < 200


def test_an_update_takes_the_steps_of_its_minibatches_and_tells_their_means(
    tmp_path: Path,
) -> None:
    """The first loss is half the squared error of zeros: (1 - 0)² / 2, whatever the order."""
    critic = opened(tmp_path)
    once = UpdateRequest(
        step=1,
        sequences=request(1, critic).sequences,
        minibatches=[[0, 1, 2, 3, 4]],
        learning_rate=0.02,
        clip=0.5,
    )
    updated = critic.update(once)
    assert (updated.loss, updated.clipped) == (pytest.approx(0.5), 0.0)
    assert updated.gradient_norm is not None and updated.gradient_norm > 0
    losses: list[float] = []
    for step in range(2, 12):
        loss = critic.update(request(step, critic)).loss
        assert loss is not None
        losses.append(loss)
    assert losses[-1] < losses[0] / 4
    values = list(itertools.chain(*critic.values(11, sequences())))
    assert np.mean(values) == pytest.approx(1.0, abs=0.2)


def test_an_update_without_minibatches_counts_and_moves_nothing(tmp_path: Path) -> None:
    critic = opened(tmp_path)
    critic.update(request(1, critic))
    before = critic.values(1, sequences())
    nothing = UpdateRequest(step=2, sequences=[], minibatches=[], learning_rate=0.1, clip=0.2)
    updated = critic.update(nothing)
    assert (updated.step, updated.loss) == (2, None)
    assert critic.values(2, sequences()) == before


def test_micro_batches_change_no_more_than_rounding(tmp_path: Path) -> None:
    whole, parts = opened(tmp_path / "a"), opened(tmp_path / "b")
    parts.max_tokens_per_forward = 16
    assert len(parts._parts(sequences())) > len(whole._parts(sequences()))
    first, second = (critic.update(request(1, critic)) for critic in (whole, parts))
    assert first.loss == pytest.approx(second.loss, rel=1e-5)
    for one, other in zip(whole.values(1, sequences()), parts.values(1, sequences()), strict=True):
        assert one == pytest.approx(other, abs=2e-3)


def test_a_process_that_begins_again_goes_on_to_the_bit_and_repeats_no_update(
    tmp_path: Path,
) -> None:
    straight, broken = opened(tmp_path / "a"), opened(tmp_path / "b")
    for step in (1, 2):
        straight.update(request(step, straight))
    asked = request(1, broken)
    first = broken.update(asked)
    # killed before its answer came: it is asked again
    broken = opened(tmp_path / "b")
    assert broken.step == 1 and broken.update(asked) == first
    broken.update(request(2, broken))
    assert broken.values(2, sequences()) == straight.values(2, sequences())


def test_a_kept_state_is_a_critic_to_resume_from(tmp_path: Path) -> None:
    critic = opened(tmp_path / "a")
    critic.save(0)
    critic.update(request(1, critic))
    critic.save(1)
    before = critic.values(1, sequences())
    critic.update(request(2, critic))
    with pytest.raises(Conflict, match="asked for update 1, and is at 2"):
        critic.save(1)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / step_name(1)).rename(tmp_path / "b" / STATE)
    resumed = opened(tmp_path / "b")
    assert (resumed.step, resumed.values(1, sequences())) == (1, before)
    resumed.update(request(2, resumed))
    assert resumed.values(2, sequences()) == critic.values(2, sequences())


def test_what_is_out_of_step_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    critic = opened(tmp_path, step=4)
    with pytest.raises(Conflict, match="asked for update 3, and is at 4"):
        critic.values(3, sequences())
    with pytest.raises(Conflict, match="asked for update 4, and is at 5"):
        critic.update(request(4, critic))
    assert critic.step == 4 and not (tmp_path / STATE).exists()


def test_a_loss_that_is_not_finite_is_written_nowhere(tmp_path: Path) -> None:
    critic = opened(tmp_path)
    critic.update(request(1, critic))
    before = (tmp_path / STATE / OPTIMISER).read_bytes()
    with pytest.raises(LossNotFinite, match="critic_learning_rate"):
        critic.update(request(2, critic, goal=float("inf")))
    assert (tmp_path / STATE / OPTIMISER).read_bytes() == before
    assert opened(tmp_path).step == 1


async def test_a_value_that_is_not_finite_is_never_trained_on(tmp_path: Path) -> None:
    """JSON has neither NaN nor infinity: the process says so itself, and the trainer fails by it."""
    process = opened(tmp_path)
    head = process.network.trained()["score.modules_to_save.default.weight"]
    torch.nn.init.constant_(head, math.inf)
    tokens = SampledTokens(
        inputs_S=(np.array([5, 6, 7]),),
        sequence_M=np.array([0]),
        row_M=np.array([1]),
        turn_M=np.array([0]),
        episode_M=np.array([0]),
    )
    async with (
        listening(create_app(process)) as url,
        CriticClient(url, timeout_s=30) as client,
    ):
        critic = training.Critic(client, TrainerSettings(advantage="gae"), seed=0, step=0)
        with pytest.raises(CriticFailed, match=r"'values'.*not finite.*critic_learning_rate"):
            await critic.values(tokens)


@pytest.mark.parametrize("damage", ["cut", "missing", "other rank"])
def test_a_state_that_is_damaged_or_of_another_critic_is_refused(
    tmp_path: Path, damage: str
) -> None:
    critic = opened(tmp_path)
    critic.update(request(1, critic))
    file = tmp_path / STATE / OPTIMISER
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    if damage == "missing":
        file.unlink()
    rank = 8 if damage == "other rank" else 4
    with pytest.raises(InvalidData):
        opened(tmp_path, rank=rank)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[CriticClient]:
    async with (
        listening(create_app(opened(tmp_path), key=KEY)) as url,
        CriticClient(url.replace("http://", f"http://run:{KEY}@"), timeout_s=30) as one,
    ):
        yield one


async def test_all_of_it_goes_over_http(client: CriticClient, tmp_path: Path) -> None:
    asked: Sequence[Rows] = sequences()
    other = opened(tmp_path / "other")
    assert await client.values(0, asked) == other.values(0, list(asked))
    update = request(1, other)
    assert await client.update(update) == await client.update(update) == other.update(update)
    assert await client.values(1, asked) == other.values(1, list(asked))
    await client.save(1)
    assert ((tmp_path / step_name(1)) / OPTIMISER).is_file()
    assert await client.get("/health") == {"status": "ok", "step": 1}


async def test_refusals_come_with_their_sentences(client: CriticClient) -> None:
    with pytest.raises(InvalidData, match="422") as refused:
        await client.values(7, sequences())
    assert "asked for update 7, and is at 0" in refused.value.why
    with pytest.raises(InvalidData, match="cannot be read"):
        await client.post_when_ready("/values", {"step": 0, "sequences": [{"tokens": "x"}]})
    outside = [Rows(tokens=[1, 2], rows=[9])]
    with pytest.raises(ServerError):
        await client.values(0, outside)
    assert (await client.get("/health"))["step"] == 0
    async with CriticClient(client.root, timeout_s=5) as stranger:
        with pytest.raises(InvalidData) as unknown:
            await stranger.values(0, sequences())
    assert unknown.value.details["answered"] == 401
