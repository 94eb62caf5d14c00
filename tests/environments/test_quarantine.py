"""What fails is counted by its name, drawn again with another sampling seed, and then not any more:
tasks that are quarantined.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halteres.environments import quarantine
from halteres.environments.item_rollout import MOST_SKIPPED
from halteres.environments.python_tool import ToolFailed
from halteres.environments.quarantine import Quarantine, task_digest
from halteres.environments.worker_process import WorkerLost
from halteres.errors import EnvironmentFailed, EnvironmentGaveUp
from halteres.observe.metrics import append_row, read_rows
from halteres.rollouts.rng import Draw
from halteres.runs import directory
from halteres.runs.reading import failures
from halteres.runs.reading.quarantine import read_quarantine
from halteres.types import FailedRollout

from .fakes import TOKENIZER, Digits, Inference, Trainer, at_work, config, server


class TooLate(EnvironmentFailed):
    """As a scorer in a process of its own fails."""

    code = "scorer_timeout"


class Thirds(Digits):
    """Nine tasks; a scorer that fails for each third of them, always."""

    async def get_next_item(self) -> Any:
        return self.rng.randrange(9)

    def score(self, item: Any, text: str) -> float:
        if item % 3 == 0:
            raise TooLate("No answer came in time.")
        return super().score(item, text)


def failing(item: Any) -> bool:
    return item % 3 == 0


async def served(env: Digits, inference: Inference, steps: int = 6) -> Trainer:
    """So many batches of four groups."""
    trainer = Trainer(batch_size=16, group_size=4, num_steps=steps)
    async with asyncio.timeout(10), at_work(env, trainer) as task:
        for number in range(1, steps + 1):
            await trainer.until(lambda number=number: len(trainer.batches) == number)
            trainer.ask()
        await task
    return trainer


def thirds(inference: Inference, folder: Path, **changes: Any) -> Thirds:
    values = {"rollout_retries": 2, "run_dir": str(folder), "max_num_workers": 2, **changes}
    return Thirds(config(**values), [server(inference)])


def tasks_in(trainer: Trainer) -> Counter[int]:
    """How many groups of each task were sent."""
    prompts = (TOKENIZER.decode(group["tokens"][0]) for group in trainer.groups)
    return Counter(int(text.partition("Question: ")[2].partition("?")[0]) for text in prompts)


async def test_a_task_whose_group_fails_is_not_drawn_again_and_the_run_goes_on(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = await served(thirds(inference, tmp_path), inference)
    assert len(trainer.batches) == 6
    assert set(tasks_in(trainer)) == {1, 2, 4, 5, 7, 8}
    listed = read_rows(tmp_path / "quarantine.jsonl")
    assert sorted(row["item"] for row in listed) == [0, 3, 6]
    for row in listed:
        assert row["code"] == "scorer_timeout"
        assert row["failures"][-1]["why"].startswith("No answer came in time.")
    # a task that was under way twice, when it failed, was sampled twice
    asked = Counter(TOKENIZER.decode(request["input_ids"]) for request in inference.requests)
    assert all(
        asked[text] <= 2 * 3 for text in asked if failing(int(text.split("?")[0].split()[-1]))
    )


async def test_failures_are_counted_by_name_in_the_steps_figures_and_in_no_group(
    inference: Inference, tmp_path: Path
) -> None:
    trainer = await served(thirds(inference, tmp_path), inference)
    rows = [row for row in read_rows(tmp_path / "metrics.jsonl") if row["src"] == "env"]
    recorded = [
        failure["code"]
        for file in (tmp_path / "rollouts").glob("step_*.jsonl")
        for row in read_rows(file)
        for failure in row["failures"]
    ]
    assert set(recorded) == {"scorer_timeout"}
    # four answers, and twice four in their place
    assert len(recorded) % 12 == 0
    counted = sum(row.get("rollouts/failed/scorer_timeout", 0) for row in rows)
    assert counted == sum(row["rollouts/failed"] for row in rows) == len(recorded)
    assert rows[-1]["tasks/quarantined"] == 3
    assert sum(row.get("tasks/skipped", 0) for row in rows) > 0
    assert all(len(group["scores"]) == 4 for group in trainer.groups)


async def test_a_growing_share_of_quarantined_tasks_is_noticed(
    inference: Inference, tmp_path: Path
) -> None:
    await served(thirds(inference, tmp_path), inference)
    notices = [
        event
        for event in read_rows(tmp_path / "events.jsonl")
        if event.get("rule") == "tasks_quarantined"
    ]
    assert len(notices) == 1
    assert "3 of " in notices[0]["evidence"] and "(3 scorer_timeout)" in notices[0]["evidence"]
    assert __file__ in notices[0]["remedy"]


async def test_each_attempt_at_a_group_has_a_sampling_seed_of_its_own(
    inference: Inference, tmp_path: Path
) -> None:
    """An exact engine would otherwise write the same fatal answer again."""
    await served(thirds(inference, tmp_path), inference, steps=2)
    seeds = [request["sampling_params"]["sampling_seed"] for request in inference.requests]
    fatal = [
        request["sampling_params"]["sampling_seed"]
        for request in inference.requests
        if failing(int(TOKENIZER.decode(request["input_ids"]).split("?")[0].split()[-1]))
    ]
    assert len(fatal) >= 3
    assert len(set(seeds)) == len(seeds)


async def test_what_is_quarantined_stays_so_in_the_environments_next_life(
    inference: Inference, tmp_path: Path
) -> None:
    await served(thirds(inference, tmp_path), inference)
    inference.requests.clear()
    second = thirds(inference, tmp_path, seed=2)
    trainer = await served(second, inference)
    assert set(tasks_in(trainer)) == {1, 2, 4, 5, 7, 8}
    asked = (TOKENIZER.decode(request["input_ids"]) for request in inference.requests)
    assert not [text for text in asked if failing(int(text.split("?")[0].split()[-1]))]
    assert len(read_rows(tmp_path / "quarantine.jsonl")) == 3


class Unlucky(Digits):
    """Two tasks, and a scorer that fails for both."""

    async def get_next_item(self) -> Any:
        return self.rng.randrange(2)

    def score(self, item: Any, text: str) -> float:
        raise TooLate("No answer came in time.")


async def test_an_environment_ends_where_no_task_is_left_to_draw(
    inference: Inference, tmp_path: Path
) -> None:
    env = Unlucky(config(rollout_retries=0, run_dir=str(tmp_path)), [server(inference)])
    async with asyncio.timeout(10), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(EnvironmentGaveUp) as caught:
            await task
    assert caught.value.what == "digits has no task left that can be drawn."
    why = "2 of 2 tasks are quarantined (2 scorer_timeout)."
    skipped = f"{MOST_SKIPPED} draws in a row were of those."
    newest = "The newest failure: No answer came in time."
    assert caught.value.why == f"{why} {skipped} {newest}"


async def test_a_server_that_fails_quarantines_no_task(
    inference: Inference, tmp_path: Path
) -> None:
    inference.failures = [400, 400]
    env = Digits(config(run_dir=str(tmp_path)), [server(inference)])
    await served(env, inference, steps=1)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert rows[0]["rollouts/failed/sampler_error"] == 2
    assert not (tmp_path / "quarantine.jsonl").exists()


class Toolless(Digits):
    """A tool, and then the machine, fails for one group."""

    draws: list[int]
    fails: tuple[type[EnvironmentFailed], ...] = (ToolFailed, WorkerLost)

    async def get_next_item(self) -> Any:
        return self.draws.pop(0)

    def score(self, item: Any, text: str) -> float:
        if item < len(self.fails):
            raise self.fails[item]("It was not used.")
        return super().score(item, text)


async def test_a_tool_that_fails_quarantines_no_task(inference: Inference, tmp_path: Path) -> None:
    """Nor does a worker that is lost: another task would have met it, too."""
    env = Toolless(config(run_dir=str(tmp_path), rollout_retries=0), [server(inference)])
    env.draws = list(range(100))
    await served(env, inference, steps=1)
    row = read_rows(tmp_path / "metrics.jsonl")[0]
    failed = [row[f"rollouts/failed/{name}"] for name in ("tool_error", "worker_lost")]
    assert failed == [4, 4]
    assert not (tmp_path / "quarantine.jsonl").exists()


class SometimesAlike(Digits):
    """Its scorer fails once for each group; the group is then dropped for equal scores."""

    failed = frozenset[int]()

    def score(self, item: Any, text: str) -> float:
        if item not in self.failed:
            self.failed |= {item}
            raise TooLate("No answer came in time.")
        return float(item % 2)


async def test_failures_within_groups_that_are_dropped_are_counted_too(
    inference: Inference, tmp_path: Path
) -> None:
    changes = {"ensure_scores_are_not_same": True, "max_dropped_groups": 64, "max_num_workers": 1}
    env = SometimesAlike(config(run_dir=str(tmp_path), **changes), [server(inference)])
    async with asyncio.timeout(10), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(EnvironmentGaveUp):
            await task
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert row["groups/dropped/same_scores"] == 64
    assert row["rollouts/failed/scorer_timeout"] == len(env.failed) > 32


def test_items_are_the_same_task_if_they_read_the_same() -> None:
    @dataclass
    class Task:
        question: str
        answer: int

    class Nameless:
        pass

    digest = task_digest({"question": "1 + 1", "answer": 2})
    assert digest == task_digest({"answer": 2, "question": "1 + 1"})
    assert digest == task_digest(Task("1 + 1", 2))
    assert digest != task_digest({"question": "1 + 1", "answer": 3})
    long = "x" * 100_000
    assert task_digest({complex(1)}) != task_digest({complex(2)})
    assert task_digest([long, range(1)]) != task_digest([long, range(2)])
    # no two of them could be told apart
    assert task_digest({"task": Nameless()}) is None


def test_a_task_that_holds_sets_is_known_again_in_the_next_process() -> None:
    """Whose hashes of texts begin with another seed."""
    code = (
        "from halteres.environments.quarantine import task_digest\n"
        "print(task_digest({'words': set('abcdefgh'), 'pairs': [frozenset({('a', 1), ('b', 2)})]}))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_what_readers_of_a_run_look_for_is_what_is_written() -> None:
    """They are rooms of their own, which share no module."""
    assert (quarantine.FILE, quarantine.STUCK) == (directory.QUARANTINE, failures.STUCK)


FAILED = (FailedRollout(code="scorer_exited", why="It ended."),)


def draw(step: int, ordinal: int) -> Draw:
    return Draw(seed=0, step=step, ordinal=ordinal)


def test_what_is_quarantined_is_what_readers_of_a_run_show(tmp_path: Path) -> None:
    Quarantine(tmp_path, at_once=True).add(draw(0, 0), "a task", FAILED)
    read = read_quarantine(directory.RunDirectory(tmp_path))
    assert read is not None
    assert (read.codes, read.last.why) == ({"scorer_exited": 1}, "It ended.")


def test_a_deterministic_run_passes_a_task_over_from_the_next_batch_on(tmp_path: Path) -> None:
    """When it failed depends on what took how long; which batch it was drawn for does not."""
    found = Quarantine(tmp_path, at_once=False)
    found.add(draw(3, 5), "a", FAILED)
    for again in (found, Quarantine(tmp_path, at_once=False)):
        assert again.holds(draw(3, 5), "a"), "the draw that failed would fail again"
        assert not again.holds(draw(3, 2), "a") and not again.holds(draw(3, 7), "a")
        assert not again.holds(draw(2, 9), "a")
        assert again.holds(draw(4, 0), "a")
        assert not again.holds(draw(4, 0), "b")
    assert Quarantine(tmp_path, at_once=True).holds(draw(3, 7), "a")


async def test_a_deterministic_environment_makes_the_same_batches_whatever_fails_when(
    inference: Inference, tmp_path: Path
) -> None:
    async def batches(folder: Path, workers: int, killed_after: int | None = None) -> list[Any]:
        trainer = Trainer(batch_size=16, group_size=4, num_steps=5)
        # every batch may be sampled: the trainer asks with version 0 for ever
        trainer.asked = dict.fromkeys(range(8), 0)

        def env() -> Thirds:
            changes = {"weights_lag": 0, "max_num_workers": workers, "group_size": 4}
            return thirds(inference, folder, batch_size=16, **changes)

        if killed_after is not None:
            async with asyncio.timeout(10), at_work(env(), trainer):
                await trainer.until(lambda: len(trainer.groups) >= killed_after)
                trainer.ask()
        async with asyncio.timeout(10), at_work(env(), trainer) as task:
            while not task.done():
                trainer.ask()
                polls = trainer.polls
                await trainer.until(lambda polls=polls: trainer.polls > polls)
                await asyncio.sleep(0)
                if len(trainer.batches) >= 5:
                    break
        return [[group["tokens"] for group in batch] for batch in trainer.batches[:5]]

    straight = await batches(tmp_path / "a", 1)
    assert len(straight) == 5
    assert straight == await batches(tmp_path / "b", 4)
    assert straight == await batches(tmp_path / "c", 4, killed_after=6)
    listed = [row["item"] for row in read_rows(tmp_path / "c" / "quarantine.jsonl")]
    assert sorted(listed) == [0, 3, 6]


async def test_an_item_at_which_the_environment_hung_is_counted_and_its_task_passed_over(
    inference: Inference, tmp_path: Path
) -> None:
    """It was killed; the same draw with the same seed would hang again."""
    env = Digits(config(run_dir=str(tmp_path)), [server(inference)])
    for ordinal, drawing in ((1, False), (2, True)):
        facts = {"draw_step": 0, "ordinal": ordinal, "drawing": drawing}
        append_row(tmp_path / "events.jsonl", {"type": "stuck", "role": "env", **facts})
    items: list[int] = []
    drawn = env.get_next_item

    async def noted() -> int:
        items.append(await drawn())
        return items[-1]

    env.get_next_item = noted
    trainer = await served(env, inference, steps=1)
    first = read_rows(tmp_path / "metrics.jsonl")[0]
    assert first["rollouts/failed/env_stuck"] == 2
    assert first["tasks/quarantined"] == 1
    assert items[1] not in tasks_in(trainer)
    assert [row["item"] for row in read_rows(tmp_path / "quarantine.jsonl")] == [items[1]]
    lines = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    stuck = [row["group"] for row in lines if row["failures"]]
    assert stuck == [1, 2]
    assert json.dumps(lines[0]["item"]) in {str(item) for item in items}
