"""`serve` against an inference server over HTTP and a trajectory server in memory."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from halteres.environments.base import BaseEnv
from halteres.errors import EnvironmentFailed, EnvironmentGaveUp, InvalidConfig, InvalidData
from halteres.observe.metrics import read_rows
from halteres.types import CONTEXT_LOGPROB, MASKED, Trajectory

from .fakes import TOKENIZER, Digits, Inference, Trainer, at_work, config, server


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [
        row
        for file in sorted((folder / "rollouts").glob("step_*.jsonl"))
        for row in read_rows(file)
    ]


async def test_a_group_carries_exact_tokens_masks_scores_logprobs_and_versions(
    inference: Inference,
) -> None:
    inference.version = 7
    trainer = Trainer(batch_size=4, group_size=4)
    async with asyncio.timeout(5), at_work(Digits(config(), [server(inference)]), trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    group, request = trainer.groups[0], inference.requests[0]
    prompt = request["input_ids"]
    assert TOKENIZER.decode(prompt, skip_special_tokens=False).startswith(
        "<|im_start|>user\nQuestion: "
    )
    assert request["sampling_params"]["n"] == 4
    assert "model" not in request
    assert len(group["tokens"]) == len(group["scores"]) == 4
    assert group["policy_version"] == [[7, 7]] * 4
    for tokens, masks, logprobs in zip(
        group["tokens"], group["masks"], group["inference_logprobs"], strict=True
    ):
        assert tokens[: len(prompt)] == prompt
        assert tokens[-1] == TOKENIZER.eos_token_id
        assert masks == [MASKED] * len(prompt) + tokens[len(prompt) :]
        assert logprobs == [CONTEXT_LOGPROB] * len(prompt) + [-0.5] * (len(tokens) - len(prompt))
    for tokens, score in zip(group["tokens"], group["scores"], strict=True):
        assert score == float(TOKENIZER.decode(tokens)[-3] in "02468")
    assert set(group) == {
        "tokens",
        "masks",
        "scores",
        "inference_logprobs",
        "policy_version",
        "env_id",
    }


async def test_exactly_one_batch_is_made_until_the_trainer_asks_again(inference: Inference) -> None:
    """Parking (max_staleness 0): not a group more than asked for, whatever finishes when."""
    trainer = Trainer(batch_size=32, group_size=4)
    async with asyncio.timeout(10), at_work(Digits(config(), [server(inference)]), trainer):
        for number in range(1, 6):
            await trainer.until(lambda number=number: len(trainer.batches) == number)
            polls = trainer.polls
            # in which nothing may happen
            await trainer.until(lambda polls=polls: trainer.polls >= polls + 3)
            assert len(inference.requests) == len(trainer.groups) == 8 * number
            trainer.ask()


async def test_the_number_of_workers_bounds_what_is_under_way(inference: Inference) -> None:
    env = Digits(config(max_num_workers=2), [server(inference)])
    under_way, most = 0, 0
    collect = env.collect_trajectories

    async def watched(item: Any) -> Any:
        nonlocal under_way, most
        under_way, most = under_way + 1, max(most, under_way + 1)
        try:
            return await collect(item)
        finally:
            under_way -= 1

    env.collect_trajectories = watched
    trainer = Trainer(batch_size=32, group_size=4)
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    assert most == 2


async def test_the_same_seed_asks_for_the_same_samples_also_from_a_later_step(
    inference: Inference,
) -> None:
    async def groups(seed: int, first: int, last: int) -> list[Any]:
        trainer = Trainer(batch_size=16, group_size=4)
        trainer.step = first
        async with (
            asyncio.timeout(5),
            at_work(Digits(config(seed=seed), [server(inference)]), trainer),
        ):
            for number in range(1, last - first + 1):
                await trainer.until(lambda number=number: len(trainer.batches) == number)
                trainer.ask()
        return [[group["tokens"] for group in batch] for batch in trainer.batches[: last - first]]

    straight = await groups(1, 0, 4)
    assert straight == await groups(1, 0, 4)
    assert straight[2:] == await groups(1, 2, 4)
    assert straight != await groups(2, 0, 4)
    seeds = [request["sampling_params"]["sampling_seed"] for request in inference.requests[:16]]
    assert len(set(seeds)) == 16


async def test_groups_are_sent_in_the_order_in_which_they_were_drawn(inference: Inference) -> None:
    """Not as they are finished: that would favour short episodes. What comes to nothing keeps
    nobody waiting.
    """
    first_may_end = asyncio.Event()
    env = Digits(config(max_num_workers=2, ensure_scores_are_not_same=True), [server(inference)])
    items: list[int] = []
    collect, draw = env.collect_trajectories, env.get_next_item

    async def drawn() -> int:
        items.append(await draw())
        return items[-1]

    async def slow_first(item: int) -> Any:
        if item == items[0]:
            await first_may_end.wait()
        return await collect(item)

    env.get_next_item, env.collect_trajectories = drawn, slow_first
    trainer = Trainer(batch_size=32, group_size=4)
    async with asyncio.timeout(5), at_work(env, trainer):
        await inference.asked.wait()
        # one of two workers goes on, though nothing can be sent yet
        while len(inference.requests) < 7:
            inference.asked.clear()
            await inference.asked.wait()
        assert not trainer.groups
        first_may_end.set()
        await trainer.until(lambda: len(trainer.batches) == 1)
    prompts = [
        TOKENIZER.decode(group["tokens"][0], skip_special_tokens=False)
        for group in trainer.batches[0]
    ]
    asked = [next(item for item in items if f"Question: {item}?" in prompt) for prompt in prompts]
    assert asked == sorted(asked, key=items.index)
    assert asked[0] == items[0]
    assert len(items) > 8, "groups of equal scores were dropped, and others took their places"


async def restarted(inference: Inference, **changes: Any) -> Trainer:
    """A batch of eight groups, in the middle of which the environment was started again."""
    trainer = Trainer(batch_size=32, group_size=4)
    async with (
        asyncio.timeout(5),
        at_work(Digits(config(max_num_workers=2, **changes), [server(inference)]), trainer),
    ):
        await trainer.until(lambda: len(trainer.groups) >= 3)
    assert len(trainer.groups) < 8
    async with asyncio.timeout(5), at_work(Digits(config(**changes), [server(inference)]), trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    assert len(trainer.batches[0]) == len(trainer.groups) == 8
    assert len({json.dumps(group["tokens"]) for group in trainer.groups}) == 8, "no rollout twice"
    return trainer


async def test_an_environment_with_a_folder_that_is_started_again_makes_the_batch_that_it_would_have_made(
    inference: Inference, tmp_path: Path
) -> None:
    """It draws what it drew before; what the server has of it already counts once, and is written
    down once.
    """
    trainer = await restarted(inference, run_dir=str(tmp_path))
    assert len(trainer.keys) > len(set(trainer.keys)) == 8
    straight = Trainer(batch_size=32, group_size=4)
    async with asyncio.timeout(5), at_work(Digits(config(), [server(inference)]), straight):
        await straight.until(lambda: len(straight.batches) == 1)
    assert [group["tokens"] for group in trainer.groups] == [
        group["tokens"] for group in straight.groups
    ]
    assert sorted(row["group"] for row in rollouts(tmp_path)) == list(range(8))


async def test_an_environment_without_a_folder_that_is_started_again_draws_something_else(
    inference: Inference,
) -> None:
    """Nobody can tell it from a twin that goes on beside it."""
    trainer = await restarted(inference)
    assert len(set(trainer.keys)) == len(trainer.keys)
    seeds = [request["sampling_params"]["sampling_seed"] for request in inference.requests]
    assert len(set(seeds)) == len(seeds)


class Stumbling(Digits):
    """Its scoring raises the first time."""

    stumbles = 1

    def score(self, item: Any, text: str) -> float:
        if self.stumbles:
            self.stumbles -= 1
            raise KeyError("no such answer")
        return super().score(item, text)


async def test_a_rollout_that_raises_is_recorded_and_the_run_goes_on(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=8, group_size=4)
    env = Stumbling(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await trainer.until(lambda: len(trainer.batches) == 2)
    failures = [failure for row in rollouts(tmp_path) for failure in row["failures"]]
    assert [failure["code"] for failure in failures] == ["env_error"]
    assert "KeyError" in failures[0]["why"]
    assert "test_serving.py:" in failures[0]["why"]
    first = read_rows(tmp_path / "metrics.jsonl")[0]
    assert (
        first["step"],
        first["src"],
        first["rollouts/failed"],
        first["rollouts/failed/env_error"],
    ) == (
        1,
        "env",
        1,
        1,
    )
    assert all(len(group["scores"]) == 4 for group in trainer.groups)


class NotANumber(Digits):
    """Its first score is NaN."""

    def score(self, item: Any, text: str) -> float:
        self.score = super().score
        return float("nan")


async def test_a_nan_reward_is_a_typed_failure_and_never_sent(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=8, group_size=4)
    env = NotANumber(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    codes = [failure["code"] for row in rollouts(tmp_path) for failure in row["failures"]]
    assert codes == ["score_not_finite"]
    assert len(trainer.groups) == 2


class Hopeless(Digits):
    """Its scoring always raises."""

    def score(self, item: Any, text: str) -> float:
        raise ZeroDivisionError("division by zero")


async def test_too_many_failed_groups_end_the_environment_with_the_file_and_the_exception(
    inference: Inference, tmp_path: Path
) -> None:
    env = Hopeless(
        config(max_failed_groups=4, rollout_retries=1, run_dir=str(tmp_path)), [server(inference)]
    )
    async with asyncio.timeout(5), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(EnvironmentGaveUp) as caught:
            await task
    assert __file__ in caught.value.sentence
    assert "ZeroDivisionError" in caught.value.sentence
    assert caught.value.next
    (notice,) = read_rows(tmp_path / "events.jsonl")
    assert (notice["type"], notice["rule"], notice["step"]) == ("notice", "groups_failed", 1)
    assert notice["evidence"].startswith("3 groups failed one after another. The last: ")
    assert "ZeroDivisionError" in notice["evidence"]
    assert (
        len([row for row in rollouts(tmp_path) if row["failures"] and not row["completions"]]) >= 3
    )


class OfAProgram(Hopeless):
    """It runs a program of its user's."""

    @property
    def to_mend(self) -> str:
        return "the program of env.command"


async def test_where_a_users_program_is_at_fault_the_packages_file_is_not_named(
    inference: Inference,
) -> None:
    env = OfAProgram(config(max_failed_groups=1, rollout_retries=0), [server(inference)])
    async with asyncio.timeout(5), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(EnvironmentGaveUp, match=r"Mend the program of env\.command;"):
            await task


class Exhausted(Digits):
    """Drawing an item raises."""

    async def get_next_item(self) -> Any:
        raise LookupError("the data set is gone")


async def test_drawing_that_always_raises_ends_the_environment_too(inference: Inference) -> None:
    env = Exhausted(config(max_failed_groups=2), [server(inference)])
    async with asyncio.timeout(5), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(EnvironmentFailed, match="data set is gone"):
            await task


class Picky(Digits):
    """Half of the draws raise, by what is drawn: the same draw always does."""

    async def get_next_item(self) -> Any:
        number = self.rng.randrange(10)
        if number % 2:
            raise LookupError(f"there is no item {number}")
        return await super().get_next_item()


async def test_a_draw_that_raises_is_not_drawn_again(inference: Inference) -> None:
    trainer = Trainer(batch_size=16, group_size=4)
    env = Picky(config(max_failed_groups=16), [server(inference)])
    async with asyncio.timeout(10), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)


class Two(Digits):
    """Has two items, then none for a while."""

    left = 2

    async def get_next_item(self) -> Any:
        self.left -= 1
        return None if self.left < 0 else self.left


async def test_no_more_items_now_is_no_failure(inference: Inference) -> None:
    trainer = Trainer(batch_size=16, group_size=4)
    env = Two(config(), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer) as task:
        await trainer.until(lambda: len(trainer.groups) == 2)
        env.left = 2
        await trainer.until(lambda: len(trainer.batches) == 1)
        assert not task.done()


async def test_a_server_without_allowances_is_filled_up_to_the_original_bound(
    inference: Inference,
) -> None:
    """Atropos: max_batches_offpolicy batches may wait."""
    trainer = Trainer(batch_size=16, group_size=4, extended=False)
    async with (
        asyncio.timeout(5),
        at_work(Digits(config(max_batches_offpolicy=2), [server(inference)]), trainer),
    ):
        await trainer.until(lambda: len(trainer.groups) == 8)
        polls = trainer.polls
        await trainer.until(lambda: trainer.polls >= polls + 3)
    assert len(trainer.groups) == 8


async def test_a_refused_group_is_recorded_and_replaced(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=8, group_size=4)
    trainer.refuse = [InvalidData("The group is refused.")]
    env = Digits(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    assert [failure["code"] for row in rollouts(tmp_path) for failure in row["failures"]] == [
        "refused"
    ]


async def test_groups_of_equal_scores_are_dropped_counted_and_replaced(
    inference: Inference, tmp_path: Path
) -> None:
    answers = iter([4] * 8)
    inference.answer = lambda prompt, digest: f"\\boxed{{{next(answers, digest % 10)}}}."
    trainer = Trainer(batch_size=8, group_size=4)
    env = Digits(
        config(ensure_scores_are_not_same=True, run_dir=str(tmp_path)), [server(inference)]
    )
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
        polls = trainer.polls
        await trainer.until(lambda: trainer.polls >= polls + 2)
    assert all(len(set(group["scores"])) == 2 for group in trainer.groups)
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    assert row["groups/dropped/same_scores"] >= 2
    assert row["groups/sent"] == 2
    kept = fmean(score for group in trainer.groups for score in group["scores"])
    # of 0 and 1: the share of all rollouts that are right, also of those that were dropped
    assert row["rollouts/score"] == row["train/percent_correct"] != kept


async def test_an_environment_that_only_drops_groups_says_so_and_ends(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = lambda prompt, digest: "no box"
    trainer = Trainer(batch_size=8, group_size=4)
    settings = config(
        ensure_scores_are_not_same=True, max_dropped_groups=128, run_dir=str(tmp_path)
    )
    with pytest.raises(
        EnvironmentFailed, match=r"nothing to learn from. 128 groups in a row were dropped"
    ):
        async with (
            asyncio.timeout(20),
            at_work(Digits(settings, [server(inference)]), trainer) as task,
        ):
            await task
    (alert,) = read_rows(tmp_path / "events.jsonl")
    assert (alert["rule"], alert["evidence"][:9]) == ("no_reward_variance", "64 groups")
    assert alert["percent_correct"] == 0.0 and "whether the scorer would know" in alert["remedy"]


class HalfHopeless(Digits):
    """Each second item fails, the others' answers are worth the same."""

    number = 0

    async def get_next_item(self) -> Any:
        self.number += 1
        return self.number

    def score(self, item: Any, text: str) -> float:
        if item % 2:
            raise ZeroDivisionError("division by zero")
        return 1.0


async def test_groups_that_are_dropped_do_not_hide_those_that_fail(inference: Inference) -> None:
    """Only a group that was sent begins the count of failures anew."""
    settings = config(ensure_scores_are_not_same=True, max_failed_groups=4, rollout_retries=0)
    async with (
        asyncio.timeout(20),
        at_work(
            HalfHopeless(settings, [server(inference)]), Trainer(batch_size=8, group_size=4)
        ) as task,
    ):
        with pytest.raises(EnvironmentGaveUp, match="4 groups of digits failed"):
            await task


async def test_groups_that_are_dropped_because_all_is_learnt_are_told_so(
    inference: Inference, tmp_path: Path
) -> None:
    inference.answer = lambda prompt, digest: "\\boxed{4}."
    settings = config(ensure_scores_are_not_same=True, max_dropped_groups=64, run_dir=str(tmp_path))
    trainer = Trainer(batch_size=8, group_size=4)
    with pytest.raises(EnvironmentFailed, match="Nothing is left to learn"):
        async with (
            asyncio.timeout(20),
            at_work(Digits(settings, [server(inference)]), trainer) as task,
        ):
            await task


async def test_the_environment_ends_by_itself_when_all_batches_were_delivered(
    inference: Inference,
) -> None:
    trainer = Trainer(batch_size=8, group_size=4, num_steps=2)
    async with asyncio.timeout(5), at_work(Digits(config(), [server(inference)]), trainer) as task:
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await task
    assert len(trainer.batches) == 2
    assert trainer.disconnected


async def test_a_group_larger_than_the_batch_is_refused_at_the_start(inference: Inference) -> None:
    trainer = Trainer(batch_size=8, group_size=4)
    async with (
        asyncio.timeout(5),
        at_work(Digits(config(group_size=16), [server(inference)]), trainer) as task,
    ):
        with pytest.raises(InvalidConfig, match="does not fit"):
            await task


async def test_a_sampler_that_is_not_ready_is_waited_for(inference: Inference) -> None:
    inference.failures = [503, 503, 500]
    trainer = Trainer(batch_size=4, group_size=4)
    async with asyncio.timeout(5), at_work(Digits(config(), [server(inference)]), trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    seeds = {request["sampling_params"]["sampling_seed"] for request in inference.requests}
    assert (len(inference.requests), len(seeds)) == (4, 1)


async def test_a_sampler_that_refuses_is_a_typed_failure(
    inference: Inference, tmp_path: Path
) -> None:
    inference.failures = [400]
    trainer = Trainer(batch_size=4, group_size=4)
    env = Digits(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    failures = [failure for row in rollouts(tmp_path) for failure in row["failures"]]
    assert [failure["code"] for failure in failures] == ["sampler_error"]
    assert "not now" in failures[0]["why"]


class Slow(Digits):
    """Its first group never comes back."""

    stuck = 1

    async def collect_trajectories(self, item: Any) -> Any:
        if self.stuck:
            self.stuck -= 1
            await asyncio.Event().wait()
        return await super().collect_trajectories(item)


async def test_a_group_that_takes_too_long_is_a_typed_failure(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=4, group_size=4)
    env = Slow(config(worker_timeout=0.1, run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    assert [failure["code"] for row in rollouts(tmp_path) for failure in row["failures"]] == [
        "env_timeout"
    ]


async def test_the_run_directory_tells_of_every_rollout_and_every_step(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = Trainer(batch_size=8, group_size=4, num_steps=2)
    env = Digits(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer) as task:
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await task
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == [
        "step_1.jsonl",
        "step_2.jsonl",
    ]
    lines = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    assert sorted(line["group"] for line in lines) == [0, 1]
    facts = {"group", "id", "item", "prompt", "prompt_ids", "completions", "failures"}
    assert set(lines[0]) == facts
    sampled = {"ids", "logprobs", "lengths"}
    assert set(lines[0]["completions"][0]) == {"text", "score", "tokens", "finish", *sampled}
    assert str(lines[0]["item"]) in lines[0]["prompt"]
    assert lines[0]["completions"][0]["text"].startswith("So the answer is")
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [
        (row["step"], row["src"], row["groups/sent"], row["rollouts/failed"]) for row in rows
    ] == [
        (1, "env", 2, 0),
        (2, "env", 2, 0),
    ]
    scores = [completion["score"] for line in lines for completion in line["completions"]]
    assert rows[0]["train/percent_correct"] == pytest.approx(sum(scores) / len(scores))
    assert rows[0]["rollouts/score"] == rows[0]["train/percent_correct"]
    assert rows[0]["train/completion_lengths"] > 5


class PerRollout(BaseEnv):
    """Written as for Atropos: one rollout at a time, two turns each, one rollout lost in the first
    group.
    """

    name = "per-rollout"
    lost = 1

    async def get_next_item(self) -> Any:
        return self.rng.randint(0, 1000)

    async def collect_trajectory(self, item: Any) -> tuple[Trajectory | None, list[Any]]:
        if self.lost:
            self.lost -= 1
            return None, []
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Question: {item}?"}]
        )
        (first,) = await self.server.sample(prompt)
        (second,) = await self.server.sample(
            [*first.prompt, *first.action, *self.tokenizer.encode("\nGo on.")]
        )
        return Trajectory(turns=(first, second), score=1.0), []


async def test_an_author_of_single_rollouts_gets_whole_groups_with_every_field(
    inference: Inference,
) -> None:
    trainer = Trainer(batch_size=4, group_size=4)
    async with asyncio.timeout(5), at_work(PerRollout(config(), [server(inference)]), trainer):
        await trainer.until(lambda: len(trainer.batches) == 1)
    group = trainer.groups[0]
    assert (
        len(group["tokens"])
        == len(group["inference_logprobs"])
        == len(group["policy_version"])
        == 4
    )
    masks = group["masks"][0]
    assert [mask == MASKED for mask in masks] == [
        logprob == 1.0 for logprob in group["inference_logprobs"][0]
    ]
    turns = "".join("." if mask == MASKED else "a" for mask in masks).replace("..", ".").strip(".")
    assert "a." in turns  # context between two actions
    seeds = [request["sampling_params"]["sampling_seed"] for request in inference.requests]
    assert len(set(seeds)) == len(seeds) == 8


async def test_metrics_that_an_author_adds_stand_in_the_row(
    inference: Inference, tmp_path: Path
) -> None:
    class Adding(Digits):
        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            await super().wandb_log({**(wandb_metrics or {}), "train/own": 3.0})

    trainer = Trainer(batch_size=4, group_size=4, num_steps=1)
    env = Adding(config(run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(5), at_work(env, trainer) as task:
        await task
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/own"] == 3.0


async def test_a_hook_that_raises_is_told_and_the_run_goes_on(
    inference: Inference, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(Digits):
        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            raise OSError("no account")

    trainer = Trainer(batch_size=4, group_size=4, num_steps=1)
    with caplog.at_level(logging.WARNING):
        async with (
            asyncio.timeout(5),
            at_work(Clumsy(config(), [server(inference)]), trainer) as task,
        ):
            await task
    assert "digits.wandb_log raised OSError: no account" in caplog.text
