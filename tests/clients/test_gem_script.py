"""Seed 003, unmodified: `tinker_train_gem.py` plays a GEM game with the built-in model and trains
it by ReBN.

It is run from where it lies beside this checkout, never copied. W&B writes into a folder; no hub is
asked.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from contract.requirements import proves

from .registered import NAME, register, script, service

pytestmark = pytest.mark.clients

PROGRAM = Path(__file__).parents[3] / "shared" / "seeds" / "restored" / "tinker_train_gem.py"
REQUIREMENTS = ("torch", "gem-llm==0.1.0", "chz", "wandb", "termcolor", "tinker==0.38.0")
LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
"""The script looks for the tokenizer of such a model under another name."""

BATCH = 16
METRICS = (
    "step",
    "time/sample",
    "time/train",
    "sampler/episode_return",
    "sampler/num_turns_per_episode",
    "sampler/action_num_tokens",
    "sampler/num_episodes",
    "sampler/token_entropy",
    "train/kl_sample_train_v1",
    "train/kl_sample_train_v2",
    "train/loss:sum",
)


@pytest.fixture
def program() -> Path:
    """The seed's script."""
    if not PROGRAM.is_file():
        pytest.skip(f"the seeds are not beside this checkout ({PROGRAM})")
    return PROGRAM


def _printed_metrics(printed: str) -> list[dict[str, float]]:
    """What it printed of each step."""
    found = re.findall(
        r"^[{ ]'([\w/:]+)': (?:np\.float64\()?(-?[\d.]+(?:e[+-]?\d+)?)", printed, re.MULTILINE
    )
    steps: list[dict[str, float]] = []
    for name, value in found:
        if not steps or name in steps[-1]:
            steps.append({})
        steps[-1][name] = float(value)
    return steps


def _resumed(url: str, path: str) -> str:
    """The base model behind a checkpoint from which training goes on."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-test")
    training = client.create_training_client_from_state_with_optimizer(path).result()
    return training.get_info().model_data.model_name or ""


def _states(url: str, path: str) -> list[str]:
    """The paths of all states of the training run that a path belongs to."""
    rest = tinker.RestClient(base_url=url, api_key="tml-test")
    run = path.removeprefix("tinker://").split("/")[0]
    found = rest.list_checkpoints(run).result().checkpoints
    return [one.tinker_path for one in found if one.checkpoint_type == "training"]


@pytest.mark.parametrize(
    ("model", "steps", "save_every"), [(NAME, 4, 2), (LLAMA, 4, 2), (NAME, 3, 1)]
)
@proves("checkpoint:saved-again")
async def test_the_script_trains_logs_and_saves_what_it_promises(
    client_python: Callable[..., str],
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    steps: int,
    save_every: int,
) -> None:
    """With 3 steps and a save before each, the last state has the name of one that was saved
    before.
    """
    python = await asyncio.to_thread(client_python, "gem", *REQUIREMENTS)
    register(tmp_path / "home", monkeypatch, NAME, LLAMA)
    small = (
        f"max_steps={steps}",
        f"save_every={save_every}",
        f"batch_size={BATCH}",
        "num_env=8",
        "max_tokens=32",
    )
    async with service(tmp_path) as running:
        printed = await script(
            python,
            *(program, f"model_name={model}", *small),
            url=running.url,
            log=tmp_path / "script.log",
            cwd=tmp_path,
            WANDB_MODE="offline",
        )
        (folder,) = (tmp_path / "tinker_output").iterdir()
        saved = [
            json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()
        ]
        states = [*range(save_every, steps, save_every), steps - 1]
        assert [(row["name"], row["policy_iteration_step"]) for row in saved] == [
            (f"{at:06d}", at) for at in states
        ]
        last = saved[-1]["state_path"]
        assert await asyncio.to_thread(_resumed, running.url, last) == model
        older = [f"{last}.1"] if states.count(steps - 1) > 1 else []
        assert set(await asyncio.to_thread(_states, running.url, last)) == {
            row["state_path"] for row in saved
        } | set(older)

    printed_steps = _printed_metrics(printed)
    assert [step["step"] for step in printed_steps] == list(range(steps))
    assert all(step.keys() >= set(METRICS) for step in printed_steps)
    assert all(step["train/kl_sample_train_v2"] < 1e-9 for step in printed_steps)
    assert all(step["sampler/num_episodes"] >= 8 for step in printed_steps)
    (logged,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert all(logged.read_bytes().count(name.encode()) >= steps for name in METRICS)
