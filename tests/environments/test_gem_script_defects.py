"""What is wrong with GEM's example script for Tinker, A to O: in each place, what a run of games
does here instead.

A  equal returns were trained on as noise         I  turns that extend each other were trained apart
B  a failing sampler was asked for ever           J  the seed was never read
C  a single turn poisoned the weights             K lengths of batches and actions were taken for
                                                  granted
D  an exception in a game ended the run           L  no evaluation, no going on, no rates
E  failed episodes vanished                       M one tokenizer, one template, no limit of the
                                                  context
F  two fifths of the turns were thrown away       N  settings went unchecked; cut off was lost
G  sampling and training never overlapped         O  games had no groups
H  games held the event loop up
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from training.fakes import REGISTRATION, FakePolicy, FakeServer, stopping
from trajectories.server_fixtures import ServerFixture, opened
from trajectories.server_fixtures import group as queued_group

from halteres.clients.retries import Retries
from halteres.clients.trajectories.trainer import Element
from halteres.config.gem_ids import GEM
from halteres.config.resolution import resolve_settings
from halteres.config.settings import Settings, TrainerSettings
from halteres.environments import game as games
from halteres.environments.game import GameEnv
from halteres.environments.item_rollout import Items, SettledItem, settle_item
from halteres.environments.multi_turn import Reply, Step
from halteres.environments.scored import ScoredDataGroup, group_of, items_of, to_wire
from halteres.errors import EnvironmentFailed, InvalidConfig, InvalidData
from halteres.observe.metrics import read_rows
from halteres.training.advantages import ESTIMATORS, estimate
from halteres.training.batch_source import Trajectories
from halteres.training.folder import RunFolder
from halteres.training.loop import train
from halteres.training.report import Report
from halteres.training.turns import turns_of
from halteres.types import Batch, PolicyVersion, Trajectory, Turn

from .fakes import FOLDER, TOKENIZER, Inference, Trainer, at_work, server

Env = TypeVar("Env", bound=GameEnv)


def made(inference: Inference, **changes: Any) -> GameEnv:
    """The easiest game, as a run has it, but for these settings."""
    return made_as(GameEnv, inference, **changes)


def made_as(kind: type[Env], inference: Inference, **changes: Any) -> Env:
    config, _ = kind.config_init()
    values = {**config.model_dump(), "max_new_tokens": 32, **changes}
    env = kind(kind.env_config_cls.model_validate(values), [server(inference)])
    env.server.retries = Retries(attempts=2, first_wait_s=0.001, longest_wait_s=0.001)
    return env


def guess(prompt: str, digest: int) -> str:
    """A policy that guesses blindly."""
    return f"I say \\boxed{{{digest % 10 + 1}}}."


async def played(env: GameEnv, number: int = 1) -> list[SettledItem]:
    """The first items of the run, one after the other."""
    items, found = Items(env), list[SettledItem]()
    for _ in range(number):
        drawn = await items.next()
        assert drawn is not None
        found.append(await settle_item(env, drawn))
    await env.server.close()
    return found


async def groups_of(env: GameEnv, number: int = 1) -> list[ScoredDataGroup]:
    settled = await played(env, number)
    assert not [failure for one in settled for failure in one.failures]
    return [group for one in settled for group in one.groups]


def as_batch(*groups: ScoredDataGroup) -> Batch:
    """What the trainer is given of them, the wire between included."""
    bodies = (json.dumps(to_wire(group, include_messages=False)) for group in groups)
    return Batch(
        groups=tuple(msgspec.json.decode(body, type=Element).as_group() for body in bodies)
    )


async def trained(
    folder: Path, batch: Batch, steps: int = 1, done: int = 0, **settings: Any
) -> tuple[FakePolicy, Any]:
    """A trainer's run on the same batch each step; the policy, and the last step's row."""
    policy = FakePolicy(version=done)
    registration = replace(REGISTRATION, batch_size=batch.num_rollouts)
    config = TrainerSettings.model_validate(
        {"total_steps": steps, "advantage": "rebn", "gamma": 0.9, **settings}
    )
    server = FakeServer(lambda _: batch)
    source = Trajectories(server, registration, stopping(folder))
    await train(policy, source, Report(RunFolder(folder)), Settings(trainer=config), done)
    assert server.versions == list(range(done, steps)) or not policy.trained
    return policy, read_rows(folder / "metrics.jsonl")[-1]


def single_turns(*rewards: float) -> Batch:
    """Episodes of one turn each."""
    trajectories = [Trajectory(turns=(turn(reward=reward),), score=reward) for reward in rewards]
    return as_batch(*(group_of([items_of(one)]) for one in trajectories))


def turn(
    prompt: tuple[int, ...] = (1, 2), action: tuple[int, ...] = (3, 4), reward: float = 0.0
) -> Turn:
    return Turn(
        prompt=prompt,
        action=action,
        logprobs=tuple(-0.5 for _ in action),
        text="",
        version_min=PolicyVersion(0),
        version_max=PolicyVersion(0),
        stop_reason="stop",
        reward=reward,
    )


async def test_a_batch_of_equal_returns_moves_nothing_and_says_so(
    inference: Inference, tmp_path: Path
) -> None:
    """A: -0.1 for every malformed answer has no exact float32; its rounding became advantages of
    almost 1.
    """
    inference.answer = lambda prompt, digest: "I give up."
    groups = await groups_of(made(inference), 8)
    assert [group["scores"] for group in groups] == [[-0.1]] * 8
    policy, row = await trained(tmp_path, as_batch(*groups))
    assert (policy.trained, policy.version, policy.calls) == ([], 0, ["publish 0"])
    assert (row["train/skipped"], row["advantages/std"]) == (1.0, 0.0)
    for reward in (-0.1, 0.7, 0.81):
        assert not estimate(turns_of(single_turns(*[reward] * 77)), "rebn", 0.9).any()


async def test_b_a_failing_sampler_is_asked_so_many_times_and_the_end_says_why(
    inference: Inference,
) -> None:
    """B: the script dropped the episode and asked again at once, without a word and without an
    end.
    """
    inference.failures = [500] * 1000
    env = made(inference, max_failed_groups=3, max_num_workers=1, rollout_retries=1)
    async with asyncio.timeout(5), at_work(env, Trainer(batch_size=4, group_size=1)) as task:
        with pytest.raises(EnvironmentFailed, match="answered 500") as caught:
            await task
    assert caught.value.next
    assert len(inference.requests) == env.server.num_failed_calls == 3 * 2 * 2


@pytest.mark.parametrize("estimator", ESTIMATORS)
async def test_c_a_single_turn_leaves_every_number_finite(estimator: Any, tmp_path: Path) -> None:
    """C: its standard deviation is NaN, and so was every weight after that step."""
    advantages_K = estimate(turns_of(single_turns(1.0)), estimator, 0.9)
    assert np.isfinite(advantages_K).all()
    policy, row = await trained(tmp_path, single_turns(1.0), advantage=estimator)
    assert (policy.trained, row["train/skipped"]) == (
        ([1], 0.0) if estimator == "reinforce" else ([], 1.0)
    )


async def test_c_a_reward_that_is_not_finite_never_leaves_the_trainer(tmp_path: Path) -> None:
    spoilt = Batch(
        groups=tuple(replace(one, scores=(float("nan"),)) for one in single_turns(0.0).groups)
    )
    with pytest.raises(InvalidData, match="score nan"):
        await trained(tmp_path, spoilt)


class Fragile(GameEnv):
    """Its first steps raise; every reset is kept, for all episodes together."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.falls, self.begun = [1], list[Any]()

    async def reset(self, task: Any) -> str:
        self.begun.append(task)
        return await super().reset(task)

    async def step(self, reply: Reply) -> Step:
        if self.falls:
            self.falls.pop()
            raise ZeroDivisionError("the board is gone")
        return await super().step(reply)


async def test_d_an_exception_in_a_game_is_one_failed_episode(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = guess
    trainer = Trainer(batch_size=3, group_size=1)
    async with (
        asyncio.timeout(5),
        at_work(made_as(Fragile, inference, run_dir=str(tmp_path)), trainer),
    ):
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await trainer.until(lambda: len(trainer.batches) == 2)
    rows = [
        row for file in sorted((tmp_path / "rollouts").glob("*.jsonl")) for row in read_rows(file)
    ]
    (failure,) = [failure for row in rows for failure in row["failures"]]
    assert (
        failure["code"] == "env_error" and "ZeroDivisionError: the board is gone" in failure["why"]
    )


async def test_e_a_failed_episode_is_played_again_from_its_task_and_seed_and_counted(
    inference: Inference, tmp_path: Path
) -> None:
    """E: dropped ones were missed most where episodes are long."""
    inference.answer = guess
    env = made_as(Fragile, inference, run_dir=str(tmp_path))
    (group,) = await groups_of(env)
    first, again = env.begun
    assert first == again and set(first) == {"task", "seed"}
    assert [failure.code for failure in group.get("failures", [])] == ["env_error"]
    assert group.get("outcome") in (["success"], ["turn_limit"]), "the group is whole"
    env.records.group(1, 0, first, group)
    figures = env.records.close(before=2)[1]
    assert figures["rollouts/failed"] == figures["rollouts/failed/env_error"] == 1


async def test_f_every_turn_that_was_sampled_is_trained_on(
    inference: Inference, tmp_path: Path
) -> None:
    """F: beyond its batch_size the script drew some of the turns, and lost the others."""
    inference.answer = guess
    groups = await groups_of(made(inference), 12)
    policy, row = await trained(tmp_path, as_batch(*groups))
    assert len(policy.examples) == len(inference.requests) > 24
    assert row["tokens/trained"] == row["tokens/action"]
    assert row["sampler/num_turns_per_episode"] * row["sampler/num_episodes"] == len(
        inference.requests
    )


class Slow(GameEnv):
    """Its first episode waits until it is told to go on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.go_on, self.others_ended = asyncio.Event(), asyncio.Event()
        self.waiting, self.ended = list[Any](), list[Any]()

    async def reset(self, task: Any) -> str:
        if not self.waiting:
            self.waiting.append(task)
            await self.go_on.wait()
        self.task = task
        return await super().reset(task)

    def close(self) -> None:
        self.ended.append(self.task)
        if len(self.ended) == 5:
            self.others_ended.set()


async def test_f_no_episode_waits_for_a_slower_one(inference: Inference) -> None:
    """The script played in waves, each as long as its longest episode.

    What is sent waits for its turn (a batch holds the next episodes, not the shortest ones); what
    is played does not.
    """
    inference.answer = guess
    trainer, env = Trainer(batch_size=6, group_size=1), made_as(Slow, inference, max_num_workers=2)
    async with asyncio.timeout(5), at_work(env, trainer):
        await env.others_ended.wait()
        assert not trainer.groups and env.waiting[0] not in env.ended
        env.go_on.set()
        await trainer.until(lambda: len(trainer.batches) == 1)


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[ServerFixture]:
    async with opened(tmp_path / "queue.sqlite") as scene:
        yield scene


@pytest.mark.parametrize(("max_staleness", "plays_on"), [(0, False), (1, True)])
async def test_g_games_go_on_while_the_trainer_trains_as_far_as_staleness_allows(
    queue: ServerFixture, max_staleness: int, plays_on: bool
) -> None:
    """G: the script sampled, then trained, then saved."""
    await queue.begin(max_staleness=max_staleness, run_id="r")
    env_id = await queue.register_env()
    await queue.send(*(queued_group(2, policy_version=0, env_id=env_id) for _ in range(2)))
    assert await queue.batch(policy_version=0)
    assert ((await queue.status_env(env_id))["allowance"] > 0) is plays_on


async def test_g_every_step_publishes_its_version_and_asks_for_a_batch_of_it(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = guess
    groups = await groups_of(made(inference), 4)
    policy, _ = await trained(tmp_path, as_batch(*groups), steps=3)
    assert [call for call in policy.calls if "publish" in call] == [
        "publish 1",
        "publish 2",
        "publish 3",
    ]
    assert policy.calls[:2] == ["forward_backward", "optim_step"], (
        "both are on their way before either is awaited"
    )


class Blocking:
    """A game whose calls return once the event loop has run meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._until_the_loop_runs()
        return "Guess.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._until_the_loop_runs()
        return "Right.", 1.0, True, False, {"outcome": "success"}

    def _until_the_loop_runs(self) -> None:
        ran = threading.Event()
        self.loop.call_soon_threadsafe(ran.set)
        assert ran.wait(5), "the event loop stands still"


async def test_h_the_event_loop_goes_on_while_a_game_begins_and_while_it_answers(
    inference: Inference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H: 32 hard Sudokus took 1.4 s to begin, a tool up to 10 s to answer; all else stood still."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(games, "make", lambda *_, **__: Blocking(loop))
    (group,) = await groups_of(made(inference, env_wrappers=""))
    assert group.get("outcome") == ["success"]


async def test_i_prompts_that_extend_each_other_are_one_sequence(inference: Inference) -> None:
    """I: each turn was an example of its own, its history computed again every time."""
    # no number of the game: all its turns are played
    inference.answer = lambda prompt, digest: "\\boxed{11}"
    (chat,) = await groups_of(made(inference, env_wrappers="concat_chat"))
    assert len(chat["tokens"]) == 1
    assert len(chat.get("spans") or []) == 4
    # leaves out what was said: nothing extends
    (apart,) = await groups_of(made(inference, env_wrappers="concat"))
    assert len(apart["tokens"]) == 4
    assert sum(map(len, chat["tokens"])) < sum(map(len, apart["tokens"]))


async def test_j_the_seed_says_which_games_are_played_and_which_samples_are_drawn(
    inference: Inference,
) -> None:
    """J: games had the clock for a seed, but for the second, whose seed was 0."""
    inference.answer = guess

    async def of(seed: int) -> tuple[list[Any], list[int], list[Any]]:
        inference.requests.clear()
        settled = await played(made(inference, seed=seed), 5)
        asked = [request["sampling_params"]["sampling_seed"] for request in inference.requests]
        return (
            [one.drawn.item for one in settled],
            asked,
            [group["tokens"] for one in settled for group in one.groups],
        )

    first, again, other = await of(7), await of(7), await of(8)
    assert first == again
    games_played, asked, _ = first
    assert len({item["seed"] for item in games_played}) == 5
    assert len(set(asked)) == len(asked)
    assert not {item["seed"] for item in games_played} & {item["seed"] for item in other[0]}
    assert not set(asked) & set(other[1])


@pytest.mark.parametrize("num_episodes", [1, 2, 7])
async def test_k_empty_actions_and_batches_of_any_length_are_trained_on(
    num_episodes: int, tmp_path: Path
) -> None:
    """K: an empty action meant all of its sequence's tokens, a short batch an index out of
    range.
    """
    rollouts = [
        Trajectory(
            turns=(turn(action=()), turn(prompt=(1, 2, 5)), turn(prompt=(9,), reward=score)),
            score=score,
        )
        for score in (1.0 + number % 2 for number in range(num_episodes))
    ]
    policy, row = await trained(
        tmp_path, as_batch(*(group_of([items_of(one)]) for one in rollouts))
    )
    assert (row["tokens/action"], row["sampler/num_episodes"]) == (4 * num_episodes, num_episodes)
    assert policy.trained == [2 * num_episodes]
    assert row["train/kl_sample_train_v2"] == 0.0


async def test_k_an_answer_without_its_log_probabilities_is_a_failure_that_says_so(
    inference: Inference,
) -> None:
    inference.tells_logprobs = False
    (settled,) = await played(made(inference, rollout_retries=0))
    (failure,) = settled.failures
    assert failure.code == "sampler_error" and "0 log-probabilities" in failure.why


async def test_l_held_out_games_are_played_and_rates_are_told_in_both(
    inference: Inference, tmp_path: Path
) -> None:
    """L: the script had its training return alone."""
    inference.answer = lambda prompt, digest: guess(prompt, digest) if digest % 4 else "I give up."
    env = made(inference, eval_tasks=8, eval_samples=2, run_dir=str(tmp_path))
    told = await env.evaluate()
    assert (
        told["eval/outcome/success"]
        + told["eval/outcome/turn_limit"]
        + told["eval/outcome/format_error"]
        == 1.0
    )
    assert 0 < told["eval/outcome/format_error"] < 1
    settled = await played(env, 8)
    for number, one in enumerate(settled):
        env.records.group(1, number, one.drawn.item, one.groups[0])
    figures = env.records.close(before=2)[1]
    assert {
        "train/outcome/success",
        "train/outcome/format_error",
        "train/truncated",
        "train/turns",
    } <= set(figures)
    held_out = {item["seed"] for item in env.eval_items()}
    assert held_out == {item["seed"] for item in made(inference, seed=5, eval_tasks=8).eval_items()}
    assert not held_out & {one.drawn.item["seed"] for one in settled}


async def test_l_training_goes_on_after_the_step_of_a_checkpoint(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = guess
    batch = as_batch(*await groups_of(made(inference), 4))
    await trained(tmp_path, batch, steps=3, checkpoint_every=2)
    (saved,) = read_rows(tmp_path / "checkpoints.jsonl")
    assert saved["step"] == saved["policy_iteration_step"] == 2
    policy, _ = await trained(tmp_path, batch, steps=4, done=saved["step"])
    assert policy.calls[-1] == "publish 4"
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3, 4]


@pytest.fixture
def other_model(tmp_path: Path) -> str:
    """A model's folder whose template is not Qwen's."""
    assert FOLDER is not None
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for one in messages %}[{{ one.role }}] {{ one.content }}{% endfor %}[assistant]"
    )
    return str(folder)


async def test_m_a_game_speaks_in_the_models_own_template_and_stops_at_its_end(
    inference: Inference, other_model: str
) -> None:
    """M: Qwen's markup was written for every model, its end token decoded into the action."""
    inference.answer = guess
    env = made(inference, tokenizer_name=other_model)
    (group,) = await groups_of(env)
    said = TOKENIZER.decode(inference.requests[0]["input_ids"], skip_special_tokens=False)
    assert said.startswith("[user] You are playing language games. ") and said.endswith(
        "[assistant]"
    )
    assert all(tokens[-1] == TOKENIZER.eos_token_id for tokens in group["tokens"])


async def test_m_a_prompt_that_leaves_no_room_is_never_sent(inference: Inference) -> None:
    inference.answer = lambda prompt, digest: "\\boxed{11}"
    await groups_of(made(inference, max_token_length=700, env_wrappers="concat_chat"))
    assert max(len(request["input_ids"]) for request in inference.requests) < 700
    num_asked = len(inference.requests)
    (nothing,) = await played(made(inference, max_token_length=20, rollout_retries=0))
    assert [failure.code for failure in nothing.failures] == ["context_overflow"]
    assert len(inference.requests) == num_asked


def test_n_settings_that_make_no_run_are_refused_with_their_name() -> None:
    """N: no step at all ended in a name that was never bound."""
    with pytest.raises(InvalidConfig, match="total_steps"):
        resolve_settings("game:GuessTheNumber-v0-easy", None, GEM.edits(["max_steps=0"]))


async def test_n_an_episode_that_was_cut_off_is_none_that_was_lost(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = lambda prompt, digest: "\\boxed{11}"
    lost = await groups_of(made(inference), 2)
    assert [group.get("outcome") for group in lost] == [["turn_limit"]] * 2
    cut = await groups_of(made(inference, max_turns=2, mask_outcomes=("turn_limit",)), 2)
    policy, row = await trained(tmp_path, as_batch(*cut))
    assert (policy.trained, row["episodes/masked"], row["sampler/num_turns_per_episode"]) == (
        [],
        1.0,
        2.0,
    )


async def test_o_a_group_plays_one_game_as_often_as_it_is_wide(
    inference: Inference, tmp_path: Path
) -> None:
    """O: whoever compares answers to the same task needs it more than once."""
    inference.answer = guess
    groups = await groups_of(made(inference, group_size=4), 3)
    for group in groups:
        first = [(group.get("episodes") or []).index(episode) for episode in range(4)]
        starts = {sequence: start for sequence, start, *_ in reversed(group.get("spans") or [])}
        assert (
            len({tuple(group["tokens"][sequence][: starts[sequence]]) for sequence in first}) == 1
        )
    batch = as_batch(*groups)
    assert batch.num_rollouts == 12
    turns = turns_of(batch)
    assert len(set(turns.scores_E)) > 2
    for estimator in ("group_std", "group_mean", "rloo"):
        policy, _ = await trained(tmp_path, batch, advantage=estimator)
        assert policy.trained
    advantages_K = estimate(turns, "group_mean")
    first_K = np.flatnonzero(np.diff(turns.episode_K, prepend=-1))
    assert np.bincount(turns.group_E, advantages_K[first_K]) == pytest.approx([0.0] * 3)
