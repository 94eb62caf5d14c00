"""A judge on a service of our own, with the built-in model: a real endpoint, and a whole
environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clients.sdk.serving import serving
from environments.fakes import Digits, config

from halteres.environments.config import APIServerConfig
from halteres.environments.item_rollout import DrawnItem, settle_item
from halteres.models import TINY
from halteres.rewards.components import JudgeSpec, read_rubric
from halteres.rewards.functions import Sample
from halteres.rewards.judges import Judge
from halteres.rollouts.rng import Draw

pytestmark = pytest.mark.runs

RUBRIC: dict[str, Any] = {
    "criteria": [{"name": "right", "text": "Is the result right?", "choices": ["wrong", "right"]}]
}


async def test_a_service_of_ours_judges_and_is_judged(tmp_path: Path) -> None:
    """The built-in model has no opinion to speak of; that it tells the probabilities of one is what
    counts.
    """
    with serving(tmp_path) as service:
        spec = JudgeSpec(base_url=f"{service.url}/v1", model=TINY, max_new_tokens=32)
        judge = Judge(spec)
        said = Sample(
            prompt=({"role": "user", "content": "What is 2 + 3?"},),
            completion=(
                {"role": "assistant", "content": "2 + 3 = 5. So the answer is \\boxed{5}."},
            ),
        )
        grades = [await judge.grade(read_rubric(RUBRIC), said) for _ in range(2)]
        places = await judge.relative_values([said, said])
        counts = judge.taken_counts()
        await judge.close()
        assert grades[0] == grades[1], "temperature 0"
        assert grades[0] is None or 0 <= grades[0].score <= 1
        assert all(place is None or place == 0.5 for place in places)
        assert counts["calls"] >= 3 and counts["tokens"] > 100, (
            "the service tells what an answer cost"
        )
        assert "failed" not in counts

        rewards = [
            {"name": "own", "environment": True},
            {"name": "judge", "rubric": RUBRIC, "judge": spec.model_dump(), "weight": 0.1},
        ]
        policy = APIServerConfig(base_url=f"{service.url}/runs/look/v1", model_name=TINY)
        env = Digits(config(rewards=rewards, max_new_tokens=16), [policy])
        env.score = lambda item, text: float(len(text))  # type: ignore[method-assign]
        settled = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=7))
        await env.server.close()
    assert not settled.failures, settled.failures
    (group,) = settled.groups
    record = group.get("rewards")
    assert record is not None and record.seconds["judge"] > 0
    assert env.taken_counts()["judge/judge/calls"] > 0
