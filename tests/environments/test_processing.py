"""`process`, in process: when it gives up, what it records, and what a client makes of an endpoint's odd answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from halteres.clients.inference import InferenceClient, Sampling
from halteres.environments.processing import process
from halteres.errors import EnvironmentFailed, InvalidData, ServerError
from halteres.observe.metrics import Row, read_rows

from .stages import Digits, Inference, config, server, serving


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
    return Choosy(config(**{**values, "data_path_to_save_groups": file, **changes}), [server(inference)])


def recorded(folder: Path) -> list[Row]:
    return read_rows(folder / "rollouts" / "step_1.jsonl")


async def test_what_came_to_nothing_is_recorded_beside_what_was_kept(inference: Inference, tmp_path: Path) -> None:
    env = choosy(inference, tmp_path)
    env.drops, env.fails = (1,), (2,)
    file = await process(env)
    await env.server.close()
    rows = recorded(tmp_path)
    assert [(row["item"], len(row["completions"])) for row in rows] == [(0, 4), (1, 0), (2, 0), (3, 4), (4, 4)]
    assert [row["failures"][0]["code"] for row in rows[1:3]] == ["nothing_collected", "env_error"]
    assert len(read_rows(file)) == 3
    scores = [[one["score"] for one in row["completions"]] for row in rows if row["completions"]]
    assert scores == [group["scores"] for group in read_rows(file)]


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
    inference: Inference, tmp_path: Path, changes: dict[str, int], drops: Any, fails: Any, tried: int
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
        (200, {"error": {"message": "Provider returned error", "code": 502}}, ServerError, "Provider returned error"),
        (200, {"choices": None}, ServerError, "holds no choices"),
        (200, [], ServerError, "holds no choices"),
        (402, {"error": {"message": "Insufficient credits", "code": 402}}, InvalidData, "Insufficient credits"),
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
