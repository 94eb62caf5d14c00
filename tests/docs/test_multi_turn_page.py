"""docs/multi-turn.md: its game is played, its tool calculates, and its pictures show the tokens that
there are.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clients.sdk.serving import serving
from environments.fakes import TOKENIZER, inference_server, server

from halteres.environments.cage import cage_missing
from halteres.environments.item_rollout import DrawnItem, settle_item
from halteres.environments.multi_turn import MultiTurnEnv, Step
from halteres.environments.scored import turns_of
from halteres.observe.metrics import read_rows
from halteres.rollouts.rng import Draw

PAGE = (Path(__file__).parents[2] / "docs" / "multi-turn.md").read_text()


def written(folder: Path, name: str) -> Path:
    """The page's file of this name."""
    texts = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (text,) = [one for one in texts if f'name = "{name}"' in one]
    assert len(text.splitlines()) <= 40
    file = folder / f"{name}.py"
    file.write_text(text)
    return file


@pytest.fixture
def game(tmp_path: Path) -> Path:
    return written(tmp_path, "guess")


def bisecting(prompt: str) -> str:
    """A policy that asks the tool for the middle of what is left, and says it."""
    said = re.findall(r"\\boxed\{(\d+)\}\s+user\s+(Higher|Lower)", prompt)
    low = max((int(number) + 1 for number, hint in said if hint == "Higher"), default=1)
    high = min((int(number) - 1 for number, hint in said if hint == "Lower"), default=10)
    if answered := re.search(r"<tool_response>\s(\d+)\s</tool_response>\s+assistant\s*$", prompt):
        return f"\\boxed{{{answered[1]}}}"
    return (
        f'<tool_call>{{"name": "middle", "arguments": {{"low": {low}, "high": '
        f"{high}}}}}</tool_call>"
    )


async def test_a_policy_that_uses_the_tool_wins_the_game(game: Path) -> None:
    kind: type[MultiTurnEnv] = runpy.run_path(str(game), run_name="guess")["GuessEnv"]
    async with inference_server() as inference:
        inference.answer = lambda prompt, _: bisecting(prompt)
        config = kind.env_config_cls(
            group_size=2, max_new_tokens=128, ensure_scores_are_not_same=False
        )
        env = kind(config, [server(inference)])
        settled = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=7))
        await env.server.close()
    (group,) = settled.groups
    assert (group.get("outcome"), group["scores"]) == (["success"] * 2, [1.0] * 2)
    said = [TOKENIZER.decode(turn.action) for turn in turns_of(group, [0])]
    assert [text for text in said if "boxed" in text] == [
        f"\\boxed{{{number}}}" for number in (5, 8, 6, 7)
    ]
    assert sum("<tool_call>" in text for text in said) == 4


def calculating(prompt: str) -> str:
    """A policy that has the tool multiply, and says what it printed."""
    if answered := re.search(r"<tool_response>\s(\d+)\s</tool_response>\s+assistant\s*$", prompt):
        return f"\\boxed{{{answered[1]}}}"
    (first, second), *_ = re.findall(r"(\d+) times (\d+)", prompt)
    code = json.dumps({"name": "python", "arguments": {"code": f"print({first} * {second})"}})
    return f"<tool_call>{code}</tool_call>"


async def test_a_policy_that_calculates_with_the_tool_is_right(tmp_path: Path) -> None:
    missing = cage_missing()
    if missing is not None:
        pytest.skip(missing)
    file = written(tmp_path, "calculate")
    kind: type[MultiTurnEnv] = runpy.run_path(str(file), run_name="calculate")["CalculateEnv"]
    async with inference_server() as inference:
        inference.answer = lambda prompt, _: calculating(prompt)
        config = kind.env_config_cls(
            group_size=2, max_new_tokens=128, ensure_scores_are_not_same=False
        )
        env = kind(config, [server(inference)])
        await env.setup()
        item = (1_234_567, 7_654_321)
        settled = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=item))
        await env.server.close()
    (group,) = settled.groups
    assert (group.get("outcome"), group["scores"]) == (["success"] * 2, [1.0] * 2)


@pytest.mark.runs
def test_the_game_is_played_with_a_service(game: Path, tmp_path: Path) -> None:
    """The file as it stands, run as a user runs it; the scripted engine stands in for weights."""
    groups = tmp_path / "groups.jsonl"
    with serving(tmp_path, engine="scripted") as running:
        settings = {
            "--env.total_steps": "2",
            "--env.group_size": "2",
            "--env.max_turns": "3",
            "--env.data_path_to_save_groups": str(groups),
            "--openai.model_name": "halteres/tiny",
            "--openai.base_url": f"{running.url}/runs/look/v1",
        }
        command = [
            sys.executable,
            str(game),
            "process",
            *(word for pair in settings.items() for word in pair),
        ]
        subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, timeout=60)
    for group in read_rows(groups):
        assert group["episodes"] == [0, 1]
        assert len(group["spans"]) == 6
        assert [sum(mask != -100 for mask in masks) for masks in group["masks"]] == [
            sum(stop - start for sequence, start, stop, _ in group["spans"] if sequence == number)
            for number in (0, 1)
        ]


class Pictured(MultiTurnEnv):
    def reset(self, task: Any) -> str:
        return "Guess."

    def step(self, reply: Any) -> Step:
        return Step("Too low.") if reply.turn == 0 else Step(reward=1.0, done=True)


async def test_the_picture_has_the_places_of_the_tokens() -> None:
    async with inference_server() as inference:
        inference.answer = lambda prompt, _: "7" if "Too low." in prompt else "5"
        env = Pictured(
            Pictured.env_config_cls(group_size=1, max_token_length=64), [server(inference)]
        )
        group, _ = await env.collect_trajectories(None)
        await env.server.close()
    assert isinstance(group, dict)
    spans = [json.dumps(span) for span in group.get("spans") or []]
    assert len(spans) == 2 and all(span in PAGE for span in spans)
    (tokens,) = group["tokens"]
    assert f"{len(tokens) - 2}  {len(tokens) - 1}\n" in PAGE
