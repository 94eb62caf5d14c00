"""The reward models of a list: which they are, and when their time begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from environments.fakes import serving

from halteres.rewards import reward_list
from halteres.rewards.components import RewardSpec
from halteres.rewards.functions import Sample
from halteres.rewards.reward_list import GroupScores, RewardList
from halteres.rewards.scorer import LocalScorer, Scorer, open_scorer
from halteres.rewards.server import create_app
from halteres.scores import Output

from .standin_model import StandIn, listening

SAMPLE = Sample(
    prompt=({"role": "user", "content": "2 + 2?"},),
    completion=({"role": "assistant", "content": "4"},),
)


@dataclass
class RewardServer:
    """A server that is loading until it has been asked so often how it is; every text scores 1."""

    loading: int = 0  # answers of /health that are 503
    health: Any = field(default_factory=lambda: {"models": [{"id": "rm", "digest": "d1"}]})
    asked: int = 0
    is_scoring_ready: bool = True  # also while /health says that it is loading

    async def tell(self, request: web.Request) -> web.Response:
        self.asked += 1
        ready = self.asked > self.loading
        self.is_scoring_ready = self.is_scoring_ready or ready
        return web.json_response(self.health if ready else {}, status=200 if ready else 503)

    async def score(self, request: web.Request) -> web.Response:
        if not self.is_scoring_ready:
            return web.json_response({}, status=503)
        items = (await request.json())["items"]
        return web.json_response({"items": [{"score": 1.0} for _ in items]})


@asynccontextmanager
async def served(server: RewardServer) -> AsyncIterator[str]:
    app = web.Application()
    app.add_routes([web.post("/score", server.score), web.get("/health", server.tell)])
    async with serving(app) as url:
        yield url


async def scored(model: str, **changes: Any) -> tuple[GroupScores, str]:
    """The scores of one group, and the version that it is recorded with."""
    rewards = RewardList([RewardSpec.model_validate({"name": "rm", "model": model, **changes})])
    scores = await rewards.score({}, [SAMPLE], step=1)
    await rewards.close()
    return scores, rewards.version


async def test_a_models_time_begins_when_it_is_loaded() -> None:
    """A large model loads longer than a group may take to be scored: the first groups of a run wait
    for it.
    """
    server = RewardServer(loading=3, is_scoring_ready=False)
    async with served(server) as url:
        scores, _ = await scored(url, timeout_s=0.6)
    assert not scores.failures and scores.values["rm"][0] is not None
    assert server.asked == 4


class Elsewhere:
    """A function in processes of its own: an hour passes until one of them is free and ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    async def __call__(self, arguments: Mapping[str, Any]) -> list[float]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.monkeypatch.setattr(loop, "time", lambda: now + 3600)
        # whatever has a deadline by now is cancelled
        for _ in range(3):
            await asyncio.sleep(0)
        return [1.0]

    def close(self) -> None:
        """Nothing is left of it."""


async def test_a_functions_time_begins_when_its_process_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call's limit is kept where it is called; other groups' calls and a start are not it."""
    file = tmp_path / "rewards.py"
    file.write_text("def one(completions):\n    return [1.0]\n")
    spec = RewardSpec.model_validate({"name": "one", "function": f"{file}:one", "timeout_s": 1})
    rewards = RewardList([spec], elsewhere=lambda *_: Elsewhere(monkeypatch))
    scores = await rewards.score({}, [SAMPLE])
    assert not scores.failures
    assert [value and value.total for value in scores.values["one"]] == [1.0]


async def test_a_server_that_is_gone_is_told_as_gone() -> None:
    rewards = RewardList([RewardSpec(name="rm", model="http://127.0.0.1:9", timeout_s=0.5)])
    rewards._step = 1  # the first step would wait for it to load
    scores = await rewards.score({}, [SAMPLE], step=1)
    await rewards.close()
    assert "cannot be reached" in scores.failures["rm"].sentence


async def test_the_address_of_a_model_is_no_part_of_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is how soon its server tells which model it has: a group that was scored knows it."""
    monkeypatch.setattr(reward_list, "READY_WITHIN_S", 0.1)
    versions: list[str] = []
    for server in (
        RewardServer(),
        RewardServer(loading=1),
        RewardServer(loading=1000),
        RewardServer(loading=1000),
    ):
        async with served(server) as url:
            monkeypatch.setattr(reward_list, "LOOK_S", 0.1)
            versions.append((await scored(url))[1])
    assert versions[0] == versions[1], "another address, and not ready at once"
    assert versions[2] == versions[3], "another address, and never told which model it is"
    assert versions[0] != versions[2]


@pytest.mark.parametrize(
    "health", [[], {"models": "many"}, {"models": ["rm"]}, {"models": [{"id": {}}]}, {}]
)
async def test_somebody_elses_server_scores_whatever_it_says_of_itself(
    health: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_list, "LOOK_S", 0.1)
    async with served(RewardServer(health=health)) as url:
        scores, _ = await scored(url)
    assert not scores.failures and scores.values["rm"][0] is not None


async def test_a_model_has_one_version_in_its_folder_and_on_a_server_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = {"first": StandIn(digest="d1"), "second": StandIn(digest="d2")}

    def opened(where: str, *, output: Output, waits_for_start: bool, **_: Any) -> Scorer:
        assert waits_for_start, "the run's own server may be loading yet"
        return (
            open_scorer(where, output=output)
            if "://" in where
            else LocalScorer(models[where], output)
        )

    monkeypatch.setattr(reward_list, "open_scorer", opened)
    async with listening(create_app(models)) as url:
        versions = {name: (await scored(f"{url}/models/{name}"))[1] for name in models}
    assert versions == {name: (await scored(name))[1] for name in models}
    assert versions["first"] != versions["second"]
