"""docs/rewards.md: its list, its function and its rubric score a group; its tables name what there
is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from environments.fakes import inference_server, server
from rewards.test_judges import endpoint

from halteres.environments.arithmetic import ArithmeticEnv
from halteres.environments.commands import settings_of
from halteres.environments.config import Overrides
from halteres.environments.item_rollout import DrawnItem, settle_item
from halteres.rewards.components import JudgeSpec, Method, RewardSpec, When
from halteres.rewards.functions import RewardFunction, Sample
from halteres.rollouts.rng import Draw

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def block(language: str) -> str:
    """The page's one block in this language, or the first of several."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, where the page is read."""
    (tmp_path / "rewards.py").write_text(block("python"))
    (tmp_path / "quality.toml").write_text(block("toml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_the_pages_list_scores_a_group_and_its_panel_the_held_out_answers(
    folder: Path,
) -> None:
    settings: dict[str, Any] = yaml.safe_load(block("yaml"))["env"]
    async with inference_server() as inference, endpoint(lambda _: {"A": 0.5, "B": 0.5}) as judge:
        settings["rewards"][-1]["judge"]["base_url"] = judge.url
        changes = {**settings, "group_size": 4, "batch_size": 4, "eval_tasks": 2, "eval_samples": 2}
        config = settings_of(ArithmeticEnv, Overrides(env=changes)).checked().env
        env = ArithmeticEnv(config, [server(inference)])
        item = await env.get_next_item()
        settled = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=item))
        metrics = await env.evaluate()
        assert env.rewards is not None
        await env.rewards.close()
        await env.server.close()
    assert not settled.failures, settled.failures
    (group,) = settled.groups
    record = group.get("rewards")
    assert record is not None
    for values, score in zip(record.values, group["scores"], strict=True):
        right, short, quality = (values[name] for name in ("right", "short", "quality"))
        assert right and short and quality
        assert quality.parts == {
            "shows_work": 0.5,
            "sound": 0.25,
            "presence": 0.5,
            "correctness": 0.25,
        }
        expected = right.total + 0.2 * short.total + quality.total if right.total else 0.0
        assert score == pytest.approx(expected)
    assert {
        "eval/panel/verifier",
        "eval/reward/total",
        "eval/reward/quality/sound",
    } <= metrics.keys()


async def test_the_pages_functions_are_called_as_it_says(folder: Path) -> None:
    samples = [
        Sample(prompt=(), completion=({"role": "assistant", "content": text},))
        for text in ("It is 7.", "No.")
    ]
    function = RewardFunction("rewards.py:names_the_answer")
    assert await function({"answer": 7}, samples) == [1.0, 0.0]
    assert await function({"question": "?"}, samples) == [None, None]


def test_every_field_of_a_component_and_a_judge_is_on_the_page() -> None:
    for name in {*RewardSpec.model_fields, *JudgeSpec.model_fields} - {"name"}:
        assert f"`{name}" in PAGE or f"{name}:" in PAGE, name
    for value in (*get_args(When), *get_args(Method)):
        assert f"`{value}`" in PAGE or f"{value}`" in PAGE, value
