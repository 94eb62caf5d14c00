"""docs/reward-models.md: its commands and its Python run as they stand, on less data."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from rewards.test_judges import endpoint
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.rewards.preferences import read_preferences
from halteres.rewards.training_plan import preset_for, read_plan
from halteres.runs.planning.reward_plan import plan_reward_training

pytestmark = pytest.mark.runs

PAGE = (Path(__file__).parents[2] / "docs" / "reward-models.md").read_text()
ONLY_HERE = {
    "--pairs 600": "--pairs 24",
    "--held-out 300": "--held-out 12",
    "--min-accuracy 0.80": "--min-accuracy 0",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(line: str) -> str:
    for text, here in ONLY_HERE.items():
        line = line.replace(text, here)
    done = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
    assert done.exit_code == 0, (line, done.output)
    return done.output


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers' own
def test_the_page_runs_from_its_first_command_to_its_last_snippet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.yaml").write_text(blocks("yaml")[0] + "max_steps: 2\ndisable_tqdm: true\n")
    for line in blocks("sh")[0].splitlines():
        run(line)
    assert "Worst mistakes" in (tmp_path / "evaluation.html").read_text()
    names: dict[str, Any] = {}
    for text in blocks("python"):
        exec(text.replace("num_train_epochs=1", "max_steps=2"), names)  # noqa: S102 - the page's own
    printed = capsys.readouterr().out
    assert (tmp_path / "Tiny-Reward" / "halteres_reward.json").is_file()
    assert re.search(r"Accuracy: [\d.]+% \([\d.]+% to [\d.]+%\)", printed)
    assert len(names["scores"]) == 2
    assert run(blocks("sh")[3].strip()) == "nothing found\n"


def test_the_settings_on_the_page_are_those_of_a_detached_training_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    run(blocks("sh")[0].splitlines()[0])
    (tmp_path / "reward.yaml").write_text(blocks("yaml")[0])
    plan = read_plan(tmp_path / "reward.yaml", {})
    assert plan.settings.output_dir == "reward-model", "where the page's other commands look for it"
    assert plan_reward_training(plan).total_steps == 6, "24 rows in batches of 8, twice"


async def test_the_judge_on_the_page_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, but that a scripted endpoint is asked."""
    monkeypatch.chdir(tmp_path)
    run("halteres reward data prefs --pairs 1 --held-out 6")
    async with endpoint(lambda _: {"A": 0.9, "B": 0.1}) as judge:
        (text,) = blocks("toml")
        (tmp_path / "judge.toml").write_text(text.replace("http://127.0.0.1:8001/v1", judge.url))
        printed = await asyncio.to_thread(run, blocks("sh")[2].strip())
    assert "12 calls, 120 tokens" in printed and re.search(
        r"same in both orders +0\.0% of 6", printed
    )


def test_the_row_on_the_page_is_one() -> None:
    (row,) = blocks("json")
    assert read_preferences([yaml.safe_load(row)]).form == "standard"


def test_the_presets_on_the_page_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.*?) \| (\de-\d) \| (\d+) \|$", PAGE, re.MULTILINE)
    found = [preset_for(size) for size in (870_000, 500_000_000, 3_000_000_000, 8_000_000_000)]
    assert [(float(rate), int(batch)) for _, rate, batch in rows] == [
        (one.learning_rate, one.batch_size) for one in found
    ]
