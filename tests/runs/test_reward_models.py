"""A run whose environment names a reward model's folder: it is served, supervised, and counted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml
from deadlines import wait_until

from halteres.config.resolution import resolve_settings
from halteres.config.settings import Settings
from halteres.errors import InvalidData, NotFound
from halteres.runs.planning.checks import examine_components, examine_reward_models
from halteres.runs.planning.models import (
    reward_folders,
    server_bytes,
    with_absolute_folders,
    with_places,
)
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait, wait_for_end

EDITS = (
    *(
        "inference.engine=scripted",
        "env.group_size=4",
        "env.batch_size=16",
        "env.eval_tasks=4",
        "env.eval_samples=2",
    ),
    *("trainer.total_steps=6", "trainer.checkpoint_every=2"),
)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of training on two rows: its scores mean nothing."""
    from halteres.models import TINY, builtin_path
    from halteres.rewards import RewardConfig, RewardTrainer

    folder = tmp_path_factory.mktemp("models") / "judge"
    rows = [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        {"prompt": "1 =", "chosen": " 1", "rejected": " 2"},
    ]
    config = RewardConfig(output_dir=str(folder), max_steps=1, disable_tqdm=True, max_length=256)
    RewardTrainer(str(builtin_path(TINY)), config, train_dataset=rows).train()
    return folder


def test_folders_are_found_wherever_an_environment_names_a_reward_model() -> None:
    env = {
        "rewards": "[{name: a, model: here}, {name: b, environment: true}]",
        "panel": [{"name": "c", "model": "http://there:1, here , other"}],
        "reward_model_path": "/abs",
    }
    assert reward_folders(env) == (Path("here"), Path("other"), Path("/abs"))
    assert reward_folders({"rewards": 7, "panel": "[", "reward_model_path": None}) == ()
    absolute = with_absolute_folders(Settings(env=env)).env
    assert absolute["panel"] == [
        {"name": "c", "model": f"http://there:1,{Path.cwd()}/here,{Path.cwd()}/other"}
    ]
    files = {
        "rewards": [
            {"name": "a", "function": "f.py:g"},
            {"name": "b", "function": "pkg.mod:g", "rubric": "r.toml"},
        ]
    }
    assert with_absolute_folders(Settings(env=files)).env["rewards"] == [
        {"name": "a", "function": f"{Path.cwd()}/f.py:g"},
        {"name": "b", "function": "pkg.mod:g", "rubric": f"{Path.cwd()}/r.toml"},
    ]
    moved = with_places(Settings(env=env), lambda folder: f"http://run/{folder.name}").env
    assert moved["rewards"] == [
        {"name": "a", "model": "http://run/here"},
        {"name": "b", "environment": True},
    ]
    assert moved["reward_model_path"] == "http://run/abs"


@pytest.mark.parametrize(
    ("files", "kind", "why"),
    [
        (None, NotFound, "no such folder"),
        ({}, InvalidData, "config.json is missing"),
        ({"config.json": {"architectures": ["Qwen3ForCausalLM"]}}, InvalidData, "Qwen3ForCausalLM"),
        (
            {
                "config.json": {
                    "architectures": ["Qwen3ForSequenceClassification"],
                    "id2label": {"0": "a", "1": "b"},
                }
            },
            InvalidData,
            "It has 2 outputs",
        ),
        (
            {
                "config.json": {
                    "architectures": ["Qwen3ForSequenceClassification"],
                    "id2label": {"0": "a"},
                }
            },
            InvalidData,
            "safetensors",
        ),
        (
            {
                "adapter_config.json": {
                    "task_type": "CAUSAL_LM",
                    "peft_type": "LORA",
                    "r": 4,
                    "lora_alpha": 8,
                    "target_modules": ["q_proj"],
                }
            },
            InvalidData,
            "CAUSAL_LM",
        ),
    ],
)
def test_a_folder_that_is_no_reward_model_is_refused_before_the_run(
    tmp_path: Path, files: dict[str, object] | None, kind: type[Exception], why: str
) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
    (check,), found = examine_reward_models({"reward_model_path": str(folder)})
    assert isinstance(check.failure, kind) and why in check.failure.sentence
    assert check.failure.details["field"] == "env.reward_model_path"
    assert (found, server_bytes(found)) == ([], 0)


@pytest.mark.parametrize(
    ("component", "why"),
    [
        ({"function": "{}/fs.py:short"}, "Did you mean {}/f.py?"),
        ({"function": "{}/f.py:shrot"}, "Did you mean 'short'?"),
        ({"function": "{}/broken.py:f"}, "cannot be read"),
        ({"rubric": "{}/rubric.toml"}, "No such file"),
        ({"rubric": {"criteria": []}}, "is no rubric"),
        ({"function": "{}/f.py:short"}, None),
        ({"function": "{}/f.py:given"}, None),
        ({"function": "package.module:f"}, None),
    ],
)
def test_a_function_or_rubric_that_is_not_there_is_refused_before_the_run(
    tmp_path: Path, component: dict[str, object], why: str | None
) -> None:
    (tmp_path / "f.py").write_text(
        "from g import x as given\n\ndef short(completions): return []\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    placed = {
        name: one.format(tmp_path) if isinstance(one, str) else one
        for name, one in component.items()
    }
    failures = [
        check.failure
        for check in examine_components({"panel": [{"name": "a", **placed}]})
        if check.failure
    ]
    if why is None:
        assert not failures
    else:
        (failure,) = failures
        assert why.format(tmp_path) in failure.sentence and failure.details["field"] == "env.panel"


def test_the_memory_of_a_run_counts_its_reward_models(home: Path, reward_model: Path) -> None:
    plain = plan_run(resolve_settings("arithmetic", None, EDITS))
    with_model = [*EDITS, f"env.reward_model_path={reward_model}"]
    judged = plan_run(resolve_settings("arithmetic", None, with_model))
    before, after = (
        next(check.figures["need_gb"] for check in found.checks if check.name == "memory")
        for found in (plain, judged)
    )
    # the server's process, and a model of 0.9 M parameters
    assert after - before == pytest.approx(0.7, abs=0.02)
    assert judged.refusal is None


@pytest.mark.runs
def test_a_killed_reward_server_is_started_again_and_the_run_completes(
    home: Path, reward_model: Path
) -> None:
    rewards = json.dumps(
        [{"name": "sum", "environment": True}, {"name": "judge", "model": str(reward_model)}]
    )
    run = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, f"env.rewards={rewards}"]))
    )
    before = wait(run, lambda state: state.status == "running" and state.step >= 1, within_s=90)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    (address,) = [one["model"] for one in config["env"]["rewards"] if one.get("model")]
    assert address.startswith("http://run:") and address.endswith("/models/judge")
    secret = address.partition("run:")[2].partition("@")[0]
    assert (run.path / "config.yaml").stat().st_mode & 0o077 == 0
    killed = before.processes["reward"]
    os.kill(killed["pid"], signal.SIGKILL)
    wait_until(lambda: run.state().processes["reward"]["pid"] != killed["pid"], within_s=30)
    state = wait_for_end(run, within_s=110)
    assert (state.status, state.step, state.error) == ("completed", 6, None)
    assert not survivors(state)
    assert [event["role"] for event in run.events() if event["type"] == "restart"] == ["reward"]
    judged = [row["reward/judge"] for row in run.metrics() if "reward/judge" in row]
    assert judged and all(isinstance(value, float) for value in judged)
    for file in run.path.rglob("*"):
        if file.is_file() and file.name not in ("config.yaml", "wiring.json"):
            assert secret.encode() not in file.read_bytes(), file
