"""rl_start_training on a file: what is asked for, refused, and answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.call import call
from halteres.agent.tool import Caller, OpenThreads
from halteres.observe.metrics import append_row
from halteres.runs.directory import find_run

from .started_runs import begun_by_standins, runs, told


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from begun_by_standins(tmp_path, monkeypatch)


def rows(folder: Path, *, pairs: bool = False) -> str:
    file = folder / "rows.jsonl"
    lines: list[str] = []
    for n in range(40):
        row: dict[str, Any] = {"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}
        if pairs:
            row = {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " none"}
        lines.append(json.dumps(row) + "\n")
    file.write_text("".join(lines))
    return str(file)


async def test_a_dry_run_tells_rows_steps_and_settings_and_starts_nothing(
    home: Path, tmp_path: Path
) -> None:
    data = rows(tmp_path)
    changes = {"batch_size": 4, "epochs": 2, "data.hold_out": 0.1}
    answer = await told(
        "rl_start_training", data=data, changes={**changes, "engine": "scripted"}, dry_run=True
    )
    assert answer["ok"] and answer["dry_run"]
    checks = {check["check"]: check for check in answer["checks"]}
    assert (checks["data"]["rows"], checks["data"]["held_out"]) == (36, 4)
    assert "reward varies" not in checks
    assert answer["config"]["trainer.total_steps"] == 18
    assert answer["config_diff"]["data.batch_size"] == [32, 4]
    assert 'rl_start_training(data="' in answer["next"]
    assert runs() == []


async def test_a_start_answers_with_the_run_and_a_key_starts_one_alone(
    home: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "data": rows(tmp_path, pairs=True),
        "method": "dpo",
        "changes": {"beta": 0.2},
        "name": "mine",
        "idempotency_key": "once",
    }
    answer = await told("rl_start_training", **asked)
    assert (answer["status"], answer["environment"]) == ("starting", "dpo:rows")
    assert answer["config"]["data.beta"] == 0.2 and set(answer["logs"]) == {"trainer"}
    (run_id,) = runs()
    state = find_run(run_id).state()
    assert (state.kind, state.name, state.total_steps) == ("dpo", "mine", 3)
    again = await told("rl_start_training", **asked)
    assert (again["run_id"], again["config"]) == (run_id, answer["config"])
    assert len(runs()) == 1


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"environment": "arithmetic"}, "data"),
        ({"changes": {"loss": "ppo"}}, "loss"),
        ({"changes": {"data.epochs": 0}}, "data.epochs"),
        ({"method": "dpo", "changes": {"packing": True}}, "packing"),
    ],
)
async def test_what_does_not_go_together_is_refused(
    home: Path, tmp_path: Path, given: dict[str, Any], field: str
) -> None:
    answer = await told("rl_start_training", data=rows(tmp_path), **given)
    assert answer["field"] == field, answer
    assert runs() == []


async def test_a_method_needs_a_file(home: Path) -> None:
    answer = await told("rl_start_training", method="dpo")
    assert answer["field"] == "method" and "data" in answer["next"]


async def test_without_the_token_nothing_is_trained_on_a_file(home: Path, tmp_path: Path) -> None:
    data = rows(tmp_path)
    await told("rl_start_training", data=data)
    (run_id,) = runs()
    for arguments in ({"data": data}, {"resume_from": run_id, "stop_first": True}):
        body = (await call("rl_start_training", arguments, Caller(open_threads=OpenThreads()))).body
        assert (body["code"], body["field"]) == ("unauthorized", "data"), body
    assert runs() == [run_id] and not find_run(run_id).state().terminal


@pytest.mark.parametrize(
    ("method", "trained", "held_out"),
    [
        ("sft", "train/loss_per_token", "eval/loss_per_token"),
        ("dpo", "train/loss", "eval/loss"),
    ],
)
async def test_the_history_is_of_losses_with_and_without_held_out_rows(
    home: Path, tmp_path: Path, method: str, trained: str, held_out: str
) -> None:
    await told("rl_start_training", data=rows(tmp_path, pairs=method == "dpo"), method=method)
    run = find_run(runs()[0])
    append_row(
        run.path / "metrics.jsonl", {"step": 1, "src": "trainer", trained: 0.5, "tokens/trained": 7}
    )
    answer = await told("rl_get_results")
    assert (answer["history"], answer["cost"]["tokens"]) == ([{"step": 1, trained: 0.5}], 7)
    append_row(run.path / "metrics.jsonl", {"step": 2, "src": "eval", held_out: 0.25})
    assert (await told("rl_get_results"))["history"][1] == {"step": 2, held_out: 0.25}


async def test_a_run_without_checkpoint_names_the_call_that_starts_anew(
    home: Path, tmp_path: Path
) -> None:
    data = rows(tmp_path)
    await told("rl_start_training", data=data)
    (run_id,) = runs()
    answer = await told("rl_start_training", resume_from=run_id, stop_first=True)
    assert answer["code"] == "not_found"
    assert answer["next"] == f'rl_start_training(data="{data}", method="sft")'


async def test_a_run_on_a_file_has_no_environment_to_be_evaluated_in(
    home: Path, tmp_path: Path
) -> None:
    await told("rl_start_training", data=rows(tmp_path))
    (run_id,) = runs()
    answer = await told("rl_evaluate", run_id=run_id)
    assert answer["next"] == f'rl_get_results("{run_id}")'
    assert "environment" in answer["error"]
