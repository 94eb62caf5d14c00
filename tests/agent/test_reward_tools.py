"""A reward model as an agent makes and uses one: trained as a run, listed, evaluated, asked for an
order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from halteres.environments.arithmetic_pairs import preference_pairs

from .draft_fixtures import refused
from .real_runs import told, until
from .run_fixtures import tokens

BUDGET = 400  # tokens of an answer

SETTINGS = {"per_device_train_batch_size": 8, "max_length": 256, "save_steps": 2}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    for name in ("TINKER_BASE_URL", "HALTERES_SESSION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def pairs(home: Path, name: str, count: int, seed: int) -> str:
    file = home / f"{name}.jsonl"
    rows = preference_pairs(count, seed=seed, split="train" if name == "train" else "eval")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


async def within_budget(tool: str, /, **arguments: Any) -> dict[str, Any]:
    answer = await told(tool, **arguments)
    assert tokens(answer) <= BUDGET, answer
    return answer


async def test_a_dry_run_tells_rows_steps_and_memory_and_starts_nothing(home: Path) -> None:
    data = pairs(home, "train", 40, 1)
    answer = await within_budget(
        "rl_train_reward_model", data=data, settings=SETTINGS, dry_run=True
    )
    assert (answer["status"], answer["total_steps"]) == ("rehearsed", 5)
    assert answer["forecast"]["num_rows"] == 40 and answer["forecast"]["memory_gb"] > 0
    assert (await told("rl_list_runs"))["count"] == 0


async def test_what_is_missing_or_wrong_is_told_with_what_to_do(home: Path) -> None:
    data = pairs(home, "train", 4, 1)
    assert "data is needed" in (await told("rl_train_reward_model"))["error"]
    wrong = await told("rl_train_reward_model", data=data, settings={"learning_rat": 0.1})
    assert (wrong["code"], wrong["did_you_mean"]) == ("invalid_config", "learning_rate")
    Path(data).write_text('{"prompt": "a", "chosen": "b"}\n')
    assert "row 1" in (await told("rl_train_reward_model", data=data))["error"]
    assert (
        "no reward model"
        in (await told("rl_rank_completions", model="/nowhere", completions=["a", "b"]))["error"]
    )
    listed = await told("rl_list_reward_models")
    assert (listed["count"], listed["next"]) == (0, "rl_train_reward_model(dry_run=true)")


@pytest.mark.runs
async def test_a_reward_model_is_trained_watched_listed_evaluated_and_ranks(home: Path) -> None:
    data, held_out = pairs(home, "train", 40, 1), pairs(home, "held_out", 24, 2)
    started = await within_budget(
        "rl_train_reward_model",
        data=data,
        eval_data=held_out,
        settings=SETTINGS,
        name="judge",
        idempotency_key="one",
    )
    run_id = started["run_id"]
    assert started["next"].startswith(f'rl_check_status("{run_id}"')
    again = await told("rl_train_reward_model", data=data, idempotency_key="one")
    assert again["run_id"] == run_id
    looked = await until(run_id, lambda answer: answer["status"] == "completed", within_s=90)
    assert (looked["step"], looked["total_steps"], looked["metrics"]["step"]) == (5, 5, 5)
    assert 0 <= looked["metrics"]["eval_accuracy"] <= 1
    following = (await told("rl_start_training", resume_from=run_id))["next"]
    assert re.fullmatch(
        r'It is complete: rl_evaluate_reward_model\(model="\S+/reward_model", data="HELD_OUT"\)',
        following,
    )
    assert (await told("rl_list_runs"))["runs"][0]["environment"] == "reward-model"

    other = await refused(
        "rl_train_reward_model", resume_from=run_id, settings={"learning_rate": 1e-4}
    )
    assert "settings cannot be changed" in other["error"]

    results = await told("rl_get_results", run_id=run_id)
    assert {"accuracy", "eval_accuracy"} <= set(results["final_metrics"])
    assert [row["step"] for row in results["history"]] == [1, 2, 3, 4, 5]
    assert results["next"].startswith(f'rl_evaluate_reward_model(model="{run_id}"')
    model = results["weights"]["reward_model"]
    listed = await within_budget("rl_list_reward_models")
    assert [(one["model"], one["run_id"]) for one in listed["reward_models"]] == [(model, run_id)]
    assert listed["reward_models"][0]["figures"]

    measured = await within_budget("rl_evaluate_reward_model", model=run_id, data=held_out)
    while measured["status"] == "running":
        measured = await within_budget(
            "rl_evaluate_reward_model", evaluation_id=measured["evaluation_id"]
        )
    assert (measured["status"], measured["num_pairs"]) == ("done", 24), measured
    assert set(measured["by_kind"]) == {"correct", "polite", "complete"}
    assert measured["interval"][0] <= measured["accuracy"] <= measured["interval"][1]

    ranked = await within_budget(
        "rl_rank_completions", model=run_id, prompt="2 + 2 =", completions=["5", "4"]
    )
    while ranked["status"] == "running":
        ranked = await within_budget("rl_rank_completions", evaluation_id=ranked["evaluation_id"])
    assert ranked["status"] == "done", ranked
    assert sorted(ranked["order"]) == [0, 1]
    first, second = ranked["order"]
    assert ranked["scores"][first] >= ranked["scores"][second]
