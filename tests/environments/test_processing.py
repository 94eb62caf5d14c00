"""`process`, in process: when it gives up, what it records, and what a client makes of an
endpoint's odd answers.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from halteres.clients.inference import InferenceClient, Sampling
from halteres.environments.processing import process
from halteres.errors import EnvironmentFailed, InvalidData, ServerError
from halteres.observe.metrics import Row, read_rows

from .fakes import Digits, Inference, config, server, serving


class Choosy(Digits):
    """Some of its items are dropped, some fail."""

    drops: tuple[int, ...] = ()
    fails: tuple[int, ...] = ()
    asked = -1

    async def get_next_item(self) -> Any:
        self.asked += 1
        return self.asked

    async def collect_trajectories(self, item: Any) -> Any:
        if item in self.fails:
            raise KeyError(item)
        return (None, []) if item in self.drops else await super().collect_trajectories(item)


def choosy(inference: Inference, folder: Path, **changes: Any) -> Choosy:
    """Three groups are wanted, one after another."""
    values = {"total_steps": 3, "max_num_workers": 1, "rollout_retries": 0, "run_dir": str(folder)}
    file = str(folder / "groups.jsonl")
    return Choosy(
        config(**{**values, "data_path_to_save_groups": file, **changes}), [server(inference)]
    )


def recorded(folder: Path) -> list[Row]:
    return read_rows(folder / "rollouts" / "step_1.jsonl")


async def test_what_came_to_nothing_is_recorded_beside_what_was_kept(
    inference: Inference, tmp_path: Path
) -> None:
    env = choosy(inference, tmp_path)
    env.drops, env.fails = (1,), (2,)
    file = await process(env)
    await env.server.close()
    rows = recorded(tmp_path)
    assert [(row["item"], len(row["completions"])) for row in rows] == [
        (0, 4),
        (1, 0),
        (2, 0),
        (3, 4),
        (4, 4),
    ]
    assert [row["failures"][0]["code"] for row in rows[1:3]] == ["nothing_collected", "env_error"]
    assert len(read_rows(file)) == 3
    scores = [[one["score"] for one in row["completions"]] for row in rows if row["completions"]]
    assert scores == [group["scores"] for group in read_rows(file)]


class Moody(Digits):
    """Its items come to another number of groups each, or there is none now."""

    asked = -1
    mood = ""

    async def get_next_item(self) -> Any:
        self.asked += 1
        if self.asked % 3 == 0 and self.mood == "raises":
            raise KeyError(self.asked)
        return None if self.asked % 3 == 0 and self.mood == "has none now" else self.asked

    async def collect_trajectories(self, item: Any) -> Any:
        group, backlog = await super().collect_trajectories(item)
        if self.mood == "gives several":
            return [group] * (item % 4), backlog
        if self.mood == "lacks a rollout" and item % 2:
            group = {name: values[:-1] for name, values in group.items()}
        return group, [str(item)] if self.mood == "puts back" and isinstance(item, int) else backlog


@pytest.mark.parametrize(
    "mood", ["raises", "has none now", "gives several", "lacks a rollout", "puts back"]
)
@pytest.mark.parametrize("workers", [1, 3])
async def test_process_of_n_steps_writes_n_groups(
    inference: Inference, tmp_path: Path, mood: str, workers: int
) -> None:
    file = str(tmp_path / "groups.jsonl")
    env = Moody(
        config(total_steps=7, max_num_workers=workers, data_path_to_save_groups=file),
        [server(inference)],
    )
    env.mood = mood
    groups = read_rows(await process(env))
    await env.server.close()
    assert [len(group["tokens"]) for group in groups] == [4] * 7


async def test_process_ends_with_a_sentence_where_there_are_no_more_items(
    inference: Inference, tmp_path: Path
) -> None:
    env = choosy(inference, tmp_path, max_failed_groups=2)
    env.get_next_item = AsyncMock(side_effect=[1, 2, None, None, None, None])
    with pytest.raises(
        EnvironmentFailed, match=r"made 2 of 3 groups of 2 items\. get_next_item gave no more items"
    ):
        await process(env)
    await env.server.close()


async def test_an_item_that_is_never_drawn_is_a_failure_by_name(
    inference: Inference, tmp_path: Path
) -> None:
    env = choosy(
        inference, tmp_path, max_failed_groups=2, worker_timeout=0.05, run_dir=str(tmp_path)
    )
    env.get_next_item = asyncio.Event().wait
    with pytest.raises(EnvironmentFailed, match=r"get_next_item gave no item in time"):
        await process(env)
    await env.server.close()
    (row, *_) = read_rows(tmp_path / "rollouts" / "step_1.jsonl")
    assert row["failures"][0]["code"] == "env_timeout"


@pytest.mark.parametrize(
    ("changes", "drops", "fails", "tried"),
    [
        ({"max_failed_groups": 2}, (), range(99), 2),
        ({"max_dropped_groups": 4}, range(99), (), 4),
        ({"max_failed_groups": 2}, (), (0, 2, 4, 5), 6),
        ({"max_failed_groups": 99, "max_dropped_groups": 0}, range(99), (), 30),
    ],
)
async def test_it_gives_up_as_soon_as_serving_would(
    inference: Inference,
    tmp_path: Path,
    changes: dict[str, int],
    drops: Any,
    fails: Any,
    tried: int,
) -> None:
    """So many in a row, and no more than ten items for each group wanted."""
    env = choosy(inference, tmp_path, **changes)
    env.drops, env.fails = tuple(drops), tuple(fails)
    with pytest.raises(EnvironmentFailed, match=f"of 3 groups of {tried} items. Last failure: "):
        await process(env)
    await env.server.close()
    assert len(recorded(tmp_path)) == tried


@pytest.mark.parametrize(
    ("status", "body", "kind", "says"),
    [
        (
            200,
            {"error": {"message": "Provider returned error", "code": 502}},
            ServerError,
            "Provider returned error",
        ),
        (200, {"choices": None}, ServerError, "holds no choices"),
        (200, [], ServerError, "holds no choices"),
        (
            402,
            {"error": {"message": "Insufficient credits", "code": 402}},
            InvalidData,
            "Insufficient credits",
        ),
    ],
)
async def test_an_endpoints_error_is_told_in_its_own_words(
    status: int, body: Any, kind: type[Exception], says: str
) -> None:
    """Some say it with status 200; OpenAI's shape wraps it in an object."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serving(app) as url, InferenceClient(f"{url}/v1") as client:
        with pytest.raises(kind, match=says):
            await client.chat([{"role": "user", "content": "?"}], Sampling(max_new_tokens=4))
