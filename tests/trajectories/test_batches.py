"""Batches over the wire: exact, first in first out, counted when served."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from .server_fixtures import ServerFixture, group, marks, num_sequences, opened


async def test_batches_come_first_in_first_out(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(*(group(mark=mark) for mark in range(1, 13)))
    batches = [marks(await scene.batch()) for _ in range(6)]
    assert batches == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]
    assert await scene.batch() is None


async def test_the_step_counts_batches_served_not_batches_possible(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(*(group() for _ in range(20)))
    assert await scene.get("/status") == {"current_step": 0, "queue_size": 20}
    await scene.batch()
    assert await scene.get("/status") == {"current_step": 1, "queue_size": 18}


async def test_a_group_smaller_than_its_environments_waits_for_the_rest(
    scene: ServerFixture,
) -> None:
    await scene.begin(batch_size=4)
    env_id = await scene.register_env(group_size=4)
    answers = [await scene.post("/scored_data", group(size, env_id=env_id)) for size in (3, 2, 1)]
    assert [answer["status"] for answer in answers] == ["buffered"] * 3
    assert [answer["buffer_size"] for answer in answers] == [3, 5, 2]
    assert [len(element["tokens"]) for element in await scene.batch() or []] == [3, 1]


async def test_a_group_larger_than_its_environments_is_whole(scene: ServerFixture) -> None:
    """In the original it stays in the buffer for ever."""
    await scene.begin(batch_size=4)
    env_id = await scene.register_env(group_size=2)
    assert await scene.post("/scored_data", group(4, env_id=env_id)) == {"status": "received"}
    assert num_sequences(await scene.batch()) == 4


async def test_a_rollout_of_several_sequences_counts_once_in_a_batch(scene: ServerFixture) -> None:
    """Episodes whose prompts do not continue each other are several sequences; `episodes` says
    which.
    """
    await scene.begin(batch_size=2)
    spans = [[0, 1, 3, 0.0], [1, 1, 3, 0.5], [2, 1, 3, 1.0]]
    await scene.send(group(3, mark=1, episodes=[0, 0, 1], spans=spans), group(2, mark=2))
    first = await scene.batch()
    assert marks(first) == [1]
    assert (first[0]["episodes"], first[0]["spans"]) == ([0, 0, 1], spans)
    (second,) = await scene.batch()
    assert second["tokens"][0][0] == 2 and not {"episodes", "spans"} & {*second}


async def test_a_group_larger_than_a_batch_is_set_aside_and_blocks_nobody(
    scene: ServerFixture,
) -> None:
    await scene.send(group(8))
    await scene.begin(batch_size=4)
    answer = await scene.post("/scored_data", group(5))
    assert answer["status"] == "received"
    assert answer["set_aside"]["why"] == "The group has 5 sequences, a batch 4."
    await scene.send(group(2), group(2))
    assert num_sequences(await scene.batch()) == 4
    assert (await scene.diagnostics())["set_aside"] == {"group_exceeds_batch": 2}


@pytest.mark.parametrize(
    ("spoiled", "code"),
    [
        ({"scores": [float("nan"), 1.0]}, "not_finite"),
        ({"scores": [float("inf"), 1.0]}, "not_finite"),
        ({"inference_logprobs": [[1.0, -0.5, float("-inf")]] * 2}, "not_finite"),
        ({"scores": [1.0]}, "lengths"),
        ({"masks": [[1, 2, 3]]}, "lengths"),
        ({"masks": [[1, 2, 3], [1, 2]]}, "lengths"),
        ({"masks": []}, "lengths"),
        ({"inference_logprobs": [[1.0], [1.0]]}, "lengths"),
        ({"overrides": [{}]}, "lengths"),
        ({"tokens": [], "masks": [], "scores": []}, "empty"),
        ({"tokens": [[], []], "masks": [[], []]}, "empty"),
        ({"env_id": -1}, "env_id"),
        ({"policy_version": [[0, 1]]}, "policy_version"),
        ({"policy_version": [[2, 1], [1, 1]]}, "policy_version"),
        ({"episodes": [0]}, "episodes"),
        ({"episodes": [0, 2]}, "episodes"),
        ({"episodes": [1, 0]}, "episodes"),
        ({"episodes": [2**31, 2**31]}, "episodes"),
        ({"spans": [[2, 0, 1, 0.0]]}, "spans"),
        ({"spans": [[0, 1, 4, 0.0]]}, "spans"),
        ({"spans": [[0, 1, 1, 0.0]]}, "spans"),
    ],
)
async def test_a_group_that_cannot_train_is_set_aside_and_said(
    scene: ServerFixture, spoiled: dict, code: str
) -> None:
    await scene.begin()
    answer = await scene.post("/scored_data", {**group(), **spoiled})
    assert answer["status"] == "received"  # a 4xx would make old clients drop it without a word
    assert answer["set_aside"]["code"] == code
    await scene.send(group(mark=1), group(mark=2))
    assert marks(await scene.batch()) == [1, 2]
    assert (await scene.diagnostics())["set_aside"] == {code: 1}


@pytest.mark.parametrize("rows", [[[1.0] * 4] * 2, [[1.0] * 3, [1.0] * 2], [[1.0] * 3]])
@pytest.mark.parametrize("name", ["advantages", "ref_logprobs"])
async def test_a_group_whose_optional_arrays_do_not_fit_its_tokens_is_served_and_flagged(
    tmp_path: Path, name: str, rows: list[list[float]]
) -> None:
    """The original's own tests post such groups. Their arrays are in the batch as they came."""
    flags = {"optional_lengths": 1}
    async with opened(tmp_path / "q.sqlite") as scene:
        await scene.begin()
        assert await scene.post("/scored_data", group(mark=1) | {name: rows}) == {
            "status": "received"
        }
        told = await scene.diagnostics()
        assert (told["flagged"], told["set_aside"], told["groups_accepted"]) == (flags, {}, 1)
    async with opened(tmp_path / "q.sqlite") as scene:
        assert (await scene.diagnostics())["flagged"] == flags
        await scene.send(group(mark=2))
        batch = await scene.batch()
        assert (marks(batch), batch and batch[0][name]) == ([1, 2], rows)
        assert (await scene.diagnostics())["flagged"] == flags
        listed = (await scene.get("/v1/groups"))["groups"]
        assert [(each["place"], each["reason"]) for each in listed] == [
            ("delivered", "optional_lengths"),
            ("delivered", None),
        ]
        assert name in listed[0]["why"]
    async with opened(tmp_path / "q.sqlite") as scene:
        told = await scene.diagnostics()
        assert (told["flagged"], told["groups_accepted"]) == (flags, 2)
        await scene.register(wandb_group="next")
        assert (await scene.diagnostics())["flagged"] == {}


async def test_a_flagged_group_that_is_set_aside_later_is_counted_there_alone(
    scene: ServerFixture,
) -> None:
    await scene.send(group(8, mark=1, advantages=[[0.0]] * 8))
    await scene.begin(batch_size=4)
    told = await scene.diagnostics()
    assert (told["flagged"], told["set_aside"], told["groups_accepted"]) == (
        {},
        {"group_exceeds_batch": 1},
        0,
    )


async def test_empty_lists_of_old_clients_count_as_absent(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    answer = await scene.post(
        "/scored_data", group(messages=[], overrides=[], advantages=[], ref_logprobs=[])
    )
    assert answer == {"status": "received"}


async def test_a_minimum_share_must_be_met_while_its_environment_lives(
    scene: ServerFixture,
) -> None:
    await scene.begin()
    busy = await scene.register_env()
    await scene.register_env(min_batch_allocation=0.5)
    await scene.send(group(mark=1, env_id=busy), group(mark=2, env_id=busy))
    assert await scene.batch() is None
    assert "min_allocation_unmet" in await scene.reason_codes()
    scene.clock.now += 61  # a dead environment blocks nobody
    assert marks(await scene.batch()) == [1, 2]


@pytest.mark.parametrize("is_reset", [False, True])
async def test_environments_of_an_earlier_run_hold_no_minimum_share_until_they_are_heard_of(
    scene: ServerFixture, is_reset: bool
) -> None:
    """The original's clients never say goodbye: the next run's first batch would wait for their
    time-out.
    """
    await scene.begin()
    earlier = await scene.register_env(min_batch_allocation=0.5, weight=3.0)
    await scene.send(group(mark=1, env_id=earlier), group(mark=2, env_id=earlier))
    assert marks(await scene.batch()) == [1, 2]
    if is_reset:
        await scene.http.get("/reset_data")

    await scene.begin(wandb_group="next")
    own = await scene.register_env(min_batch_allocation=0.5)
    told = await scene.status_env(own)
    assert (told["unallocated_fraction"], told["env_weight"], told["allowance"]) == (0.5, 1.0, 2)
    await scene.send(group(mark=3, env_id=own), group(mark=4, env_id=own))
    assert marks(await scene.batch()) == [3, 4]

    told = await scene.status_env(earlier)
    assert (told["unallocated_fraction"], told["env_weight"], told["allowance"]) == (0.0, 0.75, 1)
    await scene.send(group(mark=5, env_id=own), group(mark=6, env_id=own))
    assert await scene.batch() is None
    assert await scene.reason_codes() == ["min_allocation_unmet"]


async def test_a_restart_brings_no_minimum_share_of_an_earlier_run_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "q.sqlite") as scene:
        await scene.begin()
        await scene.register_env(min_batch_allocation=0.5)
        await scene.begin(wandb_group="next")
    async with opened(tmp_path / "q.sqlite") as scene:
        await scene.send(group(mark=1), group(mark=2))
        assert marks(await scene.batch()) == [1, 2]


async def test_minimum_shares_beyond_the_batch_are_scaled(scene: ServerFixture) -> None:
    await scene.begin(batch_size=8)
    envs = [await scene.register_env(min_batch_allocation=0.8) for _ in range(2)]
    await scene.send(*(group(mark=env_id + 1, env_id=env_id) for env_id in envs for _ in range(5)))
    assert sorted(marks(await scene.batch())) == [1, 1, 2, 2]


async def test_another_run_starts_anew_and_archives_the_old_groups(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    await scene.send(group(env_id=env_id), group(), group())
    await scene.batch()
    await scene.register(wandb_group="other", starting_step=3)
    assert await scene.get("/status") == {"current_step": 3, "queue_size": 0}
    assert await scene.post(
        "/register-env", {"max_token_length": 1, "weight": 1, "group_size": 2}
    ) == {"status": "wait for trainer to start"}
    assert await scene.batch() is None
    assert await scene.register_env() == env_id + 1


async def test_the_same_trainer_registering_again_keeps_queue_and_step(
    scene: ServerFixture,
) -> None:
    await scene.begin()
    await scene.send(*(group() for _ in range(5)))
    await scene.batch()
    await scene.register(batch_size=2)
    assert await scene.get("/status") == {"current_step": 1, "queue_size": 3}
    assert num_sequences(await scene.batch()) == 2


async def test_a_held_question_is_answered_by_the_group_that_completes_the_batch(
    scene: ServerFixture,
) -> None:
    await scene.begin()
    await scene.send(group(mark=1))
    async with asyncio.timeout(5):
        question = asyncio.create_task(scene.batch(wait=60))
        while (await scene.get("/status"))["queue_size"]:
            await scene.send(group(mark=2))
            break
        assert marks(await question) == [1, 2]


async def test_a_held_question_ends_with_null(scene: ServerFixture) -> None:
    await scene.begin()
    async with asyncio.timeout(5):
        assert await scene.batch(wait=0.01) is None


@pytest.mark.parametrize("seed", range(12))
async def test_every_batch_is_exact_and_every_group_comes_once(tmp_path: Path, seed: int) -> None:
    """Random sizes, environments, restarts: what was sent is either delivered once or still
    waiting.
    """
    draw = random.Random(seed)
    sizes, batch_size = draw.sample((1, 2, 3, 4, 6), 3), draw.choice((6, 8, 12))
    sent: dict[int, int] = {}
    delivered: list[int] = []
    found: dict = {}
    database, sessions = tmp_path / "queue.sqlite", 3
    for session in range(sessions):
        async with opened(database) as scene:
            if session == 0:
                await scene.begin(batch_size=batch_size)
                await scene.register_env(group_size=max(sizes))
            for _ in range(25):
                mark, size = len(sent) + 1, draw.choice(sizes)
                sent[mark] = size
                await scene.send(
                    group(size, mark=mark, **({"env_id": 0} if draw.random() < 0.5 else {}))
                )
                if draw.random() < 0.3 and (batch := await scene.batch()):
                    assert num_sequences(batch) == batch_size
                    delivered += marks(batch)
            while session == sessions - 1 and (batch := await scene.batch()):
                assert num_sequences(batch) == batch_size
                delivered += marks(batch)
            found = await scene.diagnostics()
    assert len(delivered) == len(set(delivered))
    waiting = sum(size for mark, size in sent.items() if mark not in delivered)
    assert waiting == found["queued_sequences"] + sum(
        env["buffered"] for env in found["environments"]
    )
    assert found["groups_accepted"] == len(sent)
