"""`halteres sft` and `halteres dpo` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from halteres.cli.main import app
from halteres.errors import InvalidConfig, InvalidData, NotFound
from halteres.runs.directory import list_runs

pytestmark = pytest.mark.runs


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)


def rows(folder: Path, count: int = 40) -> Path:
    file = folder / "rows.jsonl"
    lines: list[str] = []
    for n in range(count):
        row: dict[str, Any] = {"prompt": f"{n} + 1 =", "completion": f" {n + 1}"}
        lines.append(json.dumps({**row, "chosen": f" {n + 1}", "rejected": " none"}) + "\n")
    file.write_text("".join(lines))
    return file


@pytest.mark.parametrize(("method", "batch", "steps"), [("sft", 32, 2), ("dpo", 16, 3)])
def test_a_dry_run_says_what_a_run_would_be_and_starts_none(
    tmp_path: Path, method: str, batch: int, steps: int
) -> None:
    words = (method, rows(tmp_path), "--set", "engine=scripted", "--dry-run")
    told = json.loads(command(*words, "--json").stdout)
    assert told["ok"] and told["estimate"]["total_min"][0] > 0
    assert (told["settings"]["batch_size"], told["settings"]["total_steps"]) == (batch, steps)
    shown = command(*words)
    assert shown.exit_code == 0 and "held_out 2" in shown.output and "minutes" in shown.output
    assert list_runs() == []


def test_a_dry_run_of_what_cannot_begin_says_why_with_exit_code_1(tmp_path: Path) -> None:
    found = command("sft", rows(tmp_path), "--model", "nobody/knows", "--dry-run")
    assert found.exit_code == 1 and "NO  model present" in found.output


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        (("--set", "loss=ppo"), InvalidConfig, "Unknown field 'loss'"),
        (("--set", "max_token_trainer_length=8"), InvalidData, "longer than 8 tokens"),
        (("--eval", "nowhere.jsonl"), NotFound, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    tmp_path: Path, options: tuple[str, ...], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        command("sft", rows(tmp_path), *options)
    assert list_runs() == []
