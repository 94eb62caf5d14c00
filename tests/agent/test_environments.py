"""rl_list_environments and rl_select_environment: the seeds' keys, budgets, whatever files there
are.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

import halteres
from halteres.process import Memory
from halteres.runs.planning import resources
from halteres.runs.planning.resources import Machine

from .draft_fixtures import QUIZ, environment, refused, tokens, told

BUILT_IN = [
    "agent",
    "arithmetic",
    "game",
    "gsm8k",
    "judge_pairs",
    "reasoning_gym",
    "text_gym",
    "word_problems",
]
SEED_ENVIRONMENT = {"name", "class_name", "file_path", "description"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


async def test_listing_answers_with_the_seeds_keys() -> None:
    answer = await told("rl_list_environments")
    assert {"environments", "count", "tips"} <= answer.keys()
    assert [one["name"] for one in answer["environments"]] == BUILT_IN
    assert answer["count"] == len(BUILT_IN)
    first = answer["environments"][0]
    assert first.keys() == SEED_ENVIRONMENT
    assert first["class_name"] == "ProgramEnv"
    assert Path(first["file_path"]).is_absolute()
    assert len(answer["tips"]) == 3
    assert answer["next"] == 'rl_select_environment(name="arithmetic")'
    assert "broken" not in answer


async def test_words_of_a_query_are_looked_for_in_names_and_descriptions(home: Path) -> None:
    environment(home, "quiz", QUIZ)
    assert [
        one["name"]
        for one in (await told("rl_list_environments", query="Asks QUIZ"))["environments"]
    ] == ["quiz"]
    nothing = await told("rl_list_environments", query="nothing like it")
    assert (nothing["environments"], nothing["count"], nothing["next"]) == (
        [],
        0,
        "rl_list_environments()",
    )


async def test_ten_environments_are_told_in_430_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec 4.8 says 400, and knows no family, whose line names its variants.

    Paths are whole, so descriptions are cut; a query shows them whole."""
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("HALTERES_HOME", short)
        summary = "Plays a long game against a patient opponent who never tires, for points."
        for number in range(10 - len(BUILT_IN)):
            environment(
                Path(short), f"game_{number}", f'class Game(BaseEnv):\n    """{summary}"""\n'
            )
        answer = await told("rl_list_environments")
        assert answer["count"] == 10
        installed = str(Path(halteres.__file__).parent)
        assert (
            tokens(json.loads(json.dumps(answer).replace(installed, "/home/me/src/halteres")))
            <= 430
        )
        assert all(one["description"].endswith("...") for one in answer["environments"])
        (one,) = (await told("rl_list_environments", query="game_1"))["environments"]
        assert one["description"] == summary


async def test_broken_files_are_listed_with_the_reason(home: Path) -> None:
    environment(home, "torn", "class Torn(BaseEnv):\n  def (\n")
    environment(home, "ruin", "from x import BaseEnv\nclass Ruin(BaseEnv): ...\n")
    assert [
        Path(one["file_path"]).name for one in (await told("rl_list_environments"))["broken"]
    ] == ["torn.py"]
    await refused("rl_select_environment", name="ruin")
    broken = {
        Path(one["file_path"]).name: one["why"]
        for one in (await told("rl_list_environments"))["broken"]
    }
    assert broken["torn.py"].startswith("line 2")
    assert "No module named 'x'" in broken["ruin.py"], "it has shown itself when it was selected"


async def test_a_new_file_is_found_at_once_and_names_can_be_put_into_urls(home: Path) -> None:
    await told("rl_list_environments")
    environment(home, "quiz", QUIZ)
    environment(home, "copy", QUIZ)
    environment(home, "bad name", "class Bad(BaseEnv): ...\n")
    answer = await told("rl_list_environments", refresh=True)
    assert [one["name"] for one in answer["environments"]] == sorted(
        [*BUILT_IN, "quiz", "quiz.Quiz"]
    )
    assert "bad name" in answer["broken"][0]["why"]


async def test_selecting_answers_with_the_seeds_keys_and_the_environments_own_values(
    home: Path,
) -> None:
    """The seeds sent class defaults over config_init's values: group 8 became 4, batch 64 became
    -1.
    """
    file = environment(home, "quiz", QUIZ)
    answer = await told("rl_select_environment", name="quiz")
    assert {"message", "environment", "file_path"} <= answer.keys()
    assert answer["message"] == "Selected environment: quiz"
    assert (answer["environment"], answer["file_path"], answer["draft"]) == (
        "quiz",
        str(file),
        "mine",
    )
    assert answer["config"] == {
        "model": "halteres/tiny",
        "group_size": 8,
        "batch_size": 64,
        "total_steps": 40,
        "learning_rate": 1.5e-3,
        "lora_rank": 16,
        "max_token_length": 2048,
        "eval_every": 20,
    }
    assert answer["next"] == "rl_test_inference() then rl_start_training(dry_run=true)"
    assert tokens(answer) <= 350


async def test_selecting_with_changes_edits_in_the_same_call_and_tells_what_was_discarded(
    home: Path,
) -> None:
    environment(home, "quiz", QUIZ)
    await told("rl_select_environment", name="arithmetic", changes={"seed": 3})
    answer = await told(
        "rl_select_environment", name="quiz", changes={"level": "5", "total_steps": 9}
    )
    assert answer["discarded_edits"] == {"run.seed": 3}
    assert answer["coerced"] == {"level": 5}
    assert (answer["config"]["level"], answer["config"]["total_steps"]) == (5, 9)


async def test_selecting_the_same_environment_again_offers_to_restore_the_edits(
    home: Path,
) -> None:
    """Its file was changed meanwhile, and has lost a field."""
    file = environment(home, "quiz", QUIZ)
    edits = {"level": 5, "total_steps": 9, "lora_rank": 8}
    await told("rl_select_environment", name="quiz", changes=edits)
    file.write_text(file.read_text().replace("level", "grade"))
    answer = await told("rl_select_environment", name="quiz", changes={"lora_rank": 4})
    assert answer["discarded_edits"].keys() == {
        *("env.level", "trainer.total_steps", "trainer.lora_rank")
    }
    assert "your earlier edits were discarded" in answer["message"]
    assert answer["restore"] == 'rl_edit_config(changes={"trainer.total_steps":9})'
    other = await told("rl_select_environment", name="arithmetic")
    assert other["message"] == "Selected environment: arithmetic" and "restore" not in other


async def test_a_file_can_be_selected_by_its_path(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = environment(tmp_path_factory.mktemp("elsewhere"), "quiz", QUIZ)
    answer = await told("rl_select_environment", name=str(file))
    assert (answer["environment"], answer["file_path"]) == ("quiz", str(file))
    assert (await told("rl_get_current_config"))["environment"] == "quiz"


@pytest.mark.parametrize("path", ["environments/quiz.py", "quiz.py"])
async def test_a_path_is_meant_from_the_folders_of_environments_too(
    home: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A server's own folder is whatever its host has started it in."""
    file = environment(home, "quiz", QUIZ)
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    answer = await told("rl_select_environment", name=path)
    assert (answer["environment"], answer["file_path"]) == ("quiz", str(file))
    unknown = await refused("rl_select_environment", name="environments/sums.py")
    assert unknown["code"] == "environment_not_found"
    for folder in (elsewhere, home, home / "environments"):
        assert str(folder / "environments" / "sums.py") in unknown["error"]


async def test_an_unknown_environment_is_told_with_those_that_there_are() -> None:
    answer = await refused("rl_select_environment", name="arithmetik")
    assert answer["error"].startswith("Environment 'arithmetik' not found")
    assert (answer["code"], answer["available"]) == ("environment_not_found", BUILT_IN)
    assert answer["next"] == 'rl_select_environment("arithmetic")'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("class Ruin(BaseEnv):\n    def (\n", 2, "invalid syntax"),
        (
            "from halteres.environments.base import BaseEnv\nclass Ruin(BaseEnv): ...\n1 / 0\n",
            3,
            "ZeroDivisionError",
        ),
        (
            "import sys\nclass Ruin(BaseEnv := object): ...\nsys.exit('error: I will not.')\n",
            None,
            "I will not.",
        ),
    ],
)
async def test_a_broken_environment_is_an_answer_with_its_place(
    home: Path, text: str, line: int | None, why: str
) -> None:
    file = environment(home, "ruin", text)
    answer = await refused("rl_select_environment", name=str(file))
    assert (answer["code"], answer["file"], answer.get("line")) == (
        "environment_broken",
        str(file),
        line,
    )
    assert why in answer["error"]
    assert answer["next"].startswith("mend the file")


async def test_an_environment_that_hangs_is_an_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.config.program.DEADLINE_S", 0.3)
    environment(
        home,
        "slow",
        "import threading\nclass Slow(BaseEnv := object): ...\nthreading.Event().wait()\n",
    )
    answer = await refused("rl_select_environment", name=str(home / "environments" / "slow.py"))
    assert (answer["code"], "did not describe itself" in answer["error"]) == (
        "environment_broken",
        True,
    )


async def test_changes_that_cannot_be_are_answered_with_the_call_that_can() -> None:
    answer = await refused("rl_select_environment", name="arithmetic", changes={"group_size": 12})
    assert (
        answer["next"]
        == 'rl_select_environment(name="arithmetic",changes={"group_size":12,"batch_size":252})'.replace(
            ",changes", ", changes"
        )
    )
    assert (await refused("rl_get_current_config"))["code"] == "no_environment"


async def test_a_file_that_is_no_python_is_told_as_that() -> None:
    answer = await refused("rl_select_environment", name="/etc/passwd")
    assert answer["code"] == "environment_not_found"
    assert "it is not a .py file" in answer["error"]


async def test_a_locked_model_that_no_run_can_start_with_is_told_at_selection_and_before_a_start(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the operator writes who wants the rest of the policy."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123456789")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    small = Memory(total=8 * 10**9, free=4 * 10**9)
    monkeypatch.setattr(
        resources, "this_machine", lambda device=None: Machine(cores=2, memory=small, gpu=None)
    )
    (home / "policy.yaml").write_text("extends: hermes-compat\n")
    answer = await told("rl_select_environment", name="arithmetic")
    (warning,) = answer["warnings"]
    assert "'Qwen/Qwen3-8B' is not on this disk and does not fit here" in warning
    assert "4.0 GB free" in warning and "`unlock: [inference.model]`" in warning
    assert tokens(answer) <= 350
    checks = (await told("rl_start_training", dry_run=True))["checks"]
    (missing,) = [check for check in checks if check["check"] == "model present"]
    assert not missing["ok"] and "`unlock: [inference.model]`" in missing["problem"]
    (home / "policy.yaml").write_text("extends: hermes-compat\nunlock: [inference.model]\n")
    answer = await told("rl_select_environment", name="arithmetic")
    assert "warnings" not in answer
    assert (answer["config"]["model"], answer["config"]["learning_rate"]) == ("halteres/tiny", 4e-5)
