"""A family of environments: one file whose variants are selected by FAMILY:VARIANT, on every way
into the product.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client
from mcp_types import TextResourceContents
from typer.testing import CliRunner

from halteres.agent import start_training as starting
from halteres.agent.drafts import load_draft
from halteres.agent.tool import Caller
from halteres.agent.transports.command_line import for_person
from halteres.agent.transports.mcp.server import build
from halteres.cli.main import app
from halteres.config.resolution import resolve_settings
from halteres.dashboard.runs import list_of_runs, view_of
from halteres.runs import start
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.start import start_run
from halteres.runs.supervision.evaluation import examination

from . import control
from .draft_fixtures import refused, tokens, told

CATALOGUE = (
    'GAMES = {"Wordle-v0": 6, "Wordle-v0-hard": 7, "Hangman-v0": 9, "Hangman-v0-hard": 9, '
    '"Sudoku-v0-easy": 15}'
)

GAME = """
    from _catalogue import GAMES
    from halteres.environments.base import BaseEnv
    from halteres.environments.config import APIServerConfig, BaseEnvConfig

    class GameConfig(BaseEnvConfig):
        variant: str = ""
        max_turns: int = 1

    class Game(BaseEnv):
        '''Plays text games of many turns.'''
        name = "riddle"
        variants = tuple(GAMES)
        trainer_defaults = {"learning_rate": 3e-4, "total_steps": 12, "checkpoint_every": 3}

        @classmethod
        def config_init(cls, variant="Sudoku-v0-easy"):
            return GameConfig(group_size=4, batch_size=8, max_turns=GAMES[variant]), [APIServerConfig()]

    if __name__ == "__main__":
        Game.cli()
"""
MEMBERS = [
    "riddle:Wordle-v0",
    "riddle:Wordle-v0-hard",
    "riddle:Hangman-v0",
    "riddle:Hangman-v0-hard",
    "riddle:Sudoku-v0-easy",
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def game(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The family's file, at one place for all tests and with one memory of what it has said of
    itself.
    """
    place = tmp_path_factory.getbasetemp() / "family"
    file = place / "environments" / "text_games.py"
    if not file.exists():
        file.parent.mkdir(parents=True)
        (file.parent / "_catalogue.py").write_text(CATALOGUE)
        file.write_text(textwrap.dedent(GAME))
        (place / "cache").mkdir()
    (home / "cache").symlink_to(place / "cache")
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", str(file.parent))
    return file


async def families(**arguments: Any) -> dict[str, dict[str, Any]]:
    """Rows of the list by name."""
    return {
        row["name"]: row
        for row in (await told("rl_list_environments", **arguments))["environments"]
    }


async def values(detail: str = "brief") -> dict[str, Any]:
    """What rl_get_current_config says of every setting."""
    answer = await told("rl_get_current_config", detail=detail)
    rows = [*answer["configurable_fields"], *answer["locked_fields"]]
    return {row["name"]: row["current_value"] for row in rows}


async def test_a_family_is_one_line_of_the_list_with_a_few_names_and_the_call_for_all(
    game: Path,
) -> None:
    answer = await told("rl_list_environments")
    rows = {row["name"]: row for row in answer["environments"]}
    assert set(rows) == {
        "agent",
        "arithmetic",
        "game",
        "gsm8k",
        "judge_pairs",
        "reasoning_gym",
        "text_gym",
        "word_problems",
        "riddle",
    }
    assert rows["riddle"]["description"].startswith("Plays text")
    assert (rows["riddle"]["variants"], rows["riddle"]["num_variants"]) == (MEMBERS[:1], 5)
    assert rows["riddle"]["all_variants"] == 'rl_list_environments(query="riddle:")'
    assert rows["arithmetic"].keys() == {"name", "class_name", "file_path", "description"}
    assert tokens(answer) <= 600


async def test_a_query_finds_variants_by_their_names(game: Path) -> None:
    whole = (await families(query="riddle:"))["riddle"]
    assert (whole["variants"], whole["description"]) == (MEMBERS, "Plays text games of many turns.")
    assert "all_variants" not in whole
    answer = await told("rl_list_environments", query="riddle wordle hard")
    assert [row["variants"] for row in answer["environments"]] == [["riddle:Wordle-v0-hard"]]
    assert answer["next"] == 'rl_select_environment(name="riddle:Wordle-v0-hard")'
    assert (await families(query="text games"))["riddle"]["variants"] == MEMBERS[:1]
    assert await families(query="riddle:chess") == {}


async def test_a_variant_is_selected_with_its_own_defaults_and_the_familys_of_the_trainer(
    game: Path,
) -> None:
    answer = await told("rl_select_environment", name="riddle:Wordle-v0")
    assert (answer["environment"], answer["file_path"]) == ("riddle:Wordle-v0", str(game))
    assert answer["message"] == "Selected environment: riddle:Wordle-v0"
    shown = {
        "learning_rate": 3e-4,
        "total_steps": 12,
        "checkpoint_every": 3,
        "group_size": 4,
        "batch_size": 8,
    }
    assert shown.items() <= answer["config"].items()
    assert load_draft(Caller(draft="mine"), None).name.startswith("riddle_Wordle-v0-")
    config = await values("full")
    assert (config["variant"], config["max_turns"], config["checkpoint_every"]) == (
        "Wordle-v0",
        6,
        3,
    )
    assert (await values())["checkpoint_every"] == 3, "a brief answer tells it too"


async def test_the_family_alone_is_its_first_variant(game: Path) -> None:
    assert (await told("rl_select_environment", name="riddle"))["environment"] == "riddle:Wordle-v0"
    for by_file in (str(game), f"{game}:Wordle-v0"):
        answer = await told("rl_select_environment", name=by_file)
        assert (answer["environment"], answer["file_path"]) == ("text_games:Wordle-v0", str(game))
        assert (await values("full"))["max_turns"] == 6


async def test_an_unknown_variant_is_refused_with_the_nearest_name(game: Path) -> None:
    for asked in ("riddle:Sudoku-v0-esy", "riddl:Sudoku-v0-easy"):
        answer = await refused("rl_select_environment", name=asked)
        assert (answer["code"], answer["did_you_mean"]) == (
            "environment_not_found",
            "riddle:Sudoku-v0-easy",
        )
        assert answer["next"] == 'rl_select_environment("riddle:Sudoku-v0-easy")'
    answer = await refused("rl_select_environment", name="arithmetic:easy")
    assert answer["did_you_mean"] == "arithmetic"


async def test_which_variant_it_is_says_the_name_and_no_setting(game: Path) -> None:
    await told("rl_select_environment", name="riddle:Wordle-v0")
    answer = await refused("rl_edit_config", field="variant", value="Hangman-v0")
    assert (answer["code"], answer["locked_value"]) == ("locked_field", "Wordle-v0")
    assert "select riddle:VARIANT" in answer["error"]
    (row,) = (await told("rl_get_current_config", field="variant"))["locked_fields"]
    assert (row["current_value"], row["locked_value"]) == ("Wordle-v0", "Wordle-v0")


async def test_what_is_set_beats_the_familys_defaults_and_a_policy_caps_them(
    game: Path, home: Path
) -> None:
    set_here = await told(
        "rl_select_environment", name="riddle:Wordle-v0", changes={"total_steps": 5}
    )
    assert (set_here["config"]["total_steps"], set_here["config"]["learning_rate"]) == (5, 3e-4)
    file = home / "mine.yaml"
    file.write_text("run: {environment: 'riddle:Wordle-v0'}\ntrainer: {learning_rate: 0.0015}\n")
    resolved = resolve_settings(None, file, ["trainer.checkpoint_every=0"])
    trainer = resolved.settings.trainer
    assert (trainer.learning_rate, trainer.checkpoint_every, trainer.total_steps) == (1.5e-3, 0, 12)
    assert resolved.sources["trainer.total_steps"] == "config_init"
    (home / "policy.yaml").write_text("caps: {max_steps: 7}\n")
    capped = await told("rl_select_environment", name="riddle:Wordle-v0")
    assert capped["config"]["total_steps"] == 7
    assert "total_steps is 7 rather than 12" in capped["warnings"][0]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose supervisor ends at once: what is asked about is what they were begun with."""
    idle = functools.partial(start_run, supervisor=(sys.executable, "-S", "-c", "pass"))
    monkeypatch.setattr(starting, "start_run", idle)
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "HERMES_HOME"):
        monkeypatch.delenv(name, raising=False)


async def started(**arguments: Any) -> tuple[RunDirectory, dict[str, Any]]:
    answer = await told("rl_start_training", **arguments)
    return find_run(answer["run_id"]), answer


@pytest.mark.usefixtures("begun")
async def test_a_run_keeps_the_variant_and_the_defaults_in_its_files_and_no_colon_in_its_name(
    game: Path,
) -> None:
    run, answer = await started(
        environment="riddle:Wordle-v0", changes={"trainer.checkpoint_every": 0}
    )
    assert answer["environment"] == "riddle:Wordle-v0"
    assert answer["wandb_run_name"] == run.state().default_name == f"riddle_Wordle-v0-{run.run_id}"
    saved = json.loads((run.path / "settings.json").read_text())
    assert saved["run"]["environment"] == "riddle:Wordle-v0"
    assert (saved["env"]["variant"], saved["env"]["max_turns"]) == ("Wordle-v0", 6)
    assert (saved["trainer"]["learning_rate"], saved["trainer"]["total_steps"]) == (3e-4, 12)
    where = json.loads((run.path / "config.resolved.json").read_text())
    assert where["trainer.learning_rate"] == {"value": 3e-4, "source": "config_init"}
    assert where["trainer.checkpoint_every"] == {"value": 0, "source": "edit"}
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert (config["env"]["variant"], config["halteres"]["run"]["environment"]) == (
        "Wordle-v0",
        "riddle:Wordle-v0",
    )
    assert not [path for path in run.path.rglob("*") if ":" in path.name]
    assert (await told("rl_list_runs"))["runs"][0]["environment"] == "riddle:Wordle-v0"
    assert [row["environment"] for row in list_of_runs()["runs"]] == ["riddle:Wordle-v0"]
    assert view_of(run, for_person)["environment"] == "riddle:Wordle-v0"
    again = resolve_settings(None, run.path / "config.yaml", []).settings
    assert again.trainer == run.settings().trainer, (
        "our default that was set over the family's is not lost on the way"
    )
    assert again.env == run.settings().env


@pytest.mark.usefixtures("begun")
async def test_a_run_that_goes_on_keeps_variant_and_settings_whatever_the_family_says_by_now(
    game: Path,
) -> None:
    run, _ = await started(environment="riddle:Wordle-v0", changes={"learning_rate": 1e-3})
    resumed = resolve_settings(None, None, ["total_steps=20"], base=run.settings()).settings
    assert (resumed.run.environment, resumed.env["variant"]) == ("riddle:Wordle-v0", "Wordle-v0")
    assert (resumed.trainer.learning_rate, resumed.trainer.checkpoint_every) == (1e-3, 3)


@pytest.mark.usefixtures("begun")
async def test_another_variant_is_another_environment_where_weights_are_measured(
    game: Path,
) -> None:
    run, _ = await started(environment="riddle:Wordle-v0")
    own = examination("riddle:Wordle-v0", run, "halteres/tiny", "w")
    assert (own.program.variant_setting, own.env["max_turns"]) == ({"variant": "Wordle-v0"}, 6)
    other = examination("riddle:Sudoku-v0-easy", run, "halteres/tiny", "w")
    assert (other.program.variant_setting, other.env) == ({"variant": "Sudoku-v0-easy"}, {})


async def test_the_routes_of_the_seeds_take_the_colon(game: Path) -> None:
    async with control.client() as http:
        rows = {row["name"]: row for row in (await http.get("/environments")).json()}
        assert rows["riddle"]["num_variants"] == 5
        answer = (await http.post("/environments/riddle:Wordle-v0/select")).json()
        assert answer["environment"] == "riddle:Wordle-v0"
        called = await http.post("/api/tools/rl_select_environment", json={"name": "riddle:Wordle"})
        assert (called.status_code, called.json()["did_you_mean"]) == (404, "riddle:Wordle-v0")
    async with control.client(Authorization="") as http:
        assert (await http.post("/environments/riddle:Wordle-v0/select")).json()[
            "environment"
        ] == "riddle:Wordle-v0"
        for path in ("text_games.py:Wordle-v0", "./text_games.py:Wordle-v0"):
            by_file = (await http.post(f"/environments/{path}/select")).json()
            assert "by its name, not by its file" in by_file["error"]


async def test_the_source_of_a_variant_is_the_familys_file(game: Path) -> None:
    async with Client(build(lambda _: Caller(draft="mine"), 0.01)) as client:
        for name in ("riddle", "riddle:Wordle-v0"):
            (content,) = (await client.read_resource(f"rl://envs/{name}/source")).contents
            assert isinstance(content, TextResourceContents)
            assert content.text == game.read_text()


def test_the_command_line_lists_trains_and_serves_variants(
    game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = CliRunner().invoke(app, ["env", "list"]).output
    (row,) = [line for line in output.splitlines() if line.startswith("riddle ")]
    assert row.split()[-2:] == ["5", str(game)]
    assert "halteres env list ENVIRONMENT" in output
    assert CliRunner().invoke(app, ["env", "list", "riddle"]).output.split() == MEMBERS
    served: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: served.append(list(command)))
    CliRunner().invoke(app, ["env", "serve", "riddle:Wordle-v0", "--env.seed", "3"])
    assert served[0][1:] == [str(game), "serve", "--env.variant=Wordle-v0", "--env.seed", "3"]
    empty = game.with_name("empty.yaml")
    empty.touch()
    asked: list[Any] = []
    monkeypatch.setattr(start, "start_run", lambda plan, **_: asked.append(plan.settings))
    CliRunner().invoke(app, ["train", "riddle:Wordle-v0", "--set", "total_steps=3"])
    CliRunner().invoke(
        app, ["train", "--set", "environment=riddle:Wordle-v0", "--config", str(empty)]
    )
    assert [one.run.environment for one in asked] == ["riddle:Wordle-v0"] * 2
    assert [one.trainer.total_steps for one in asked] == [3, 12]
    assert {one.env["max_turns"] for one in asked} == {6}
