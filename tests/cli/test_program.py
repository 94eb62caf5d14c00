"""The program as a person calls it: answers on stdout, one sentence on stderr, honest exit
codes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halteres import __version__
from halteres.agent.health import machine_checks
from halteres.errors import NotFound
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.named_weights import newest_policy

pytestmark = pytest.mark.runs

Program = Callable[..., subprocess.CompletedProcess[str]]


def test_help_names_every_verb_and_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from halteres.cli.main import main\n"
        "sys.argv = ['halteres', '--help']\n"
        "try:\n    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'transformers', 'peft', 'tinker', 'pydantic', 'sqlalchemy', "
        "'starlette', 'aiohttp'}\n"
        "    print('loaded:', sorted(heavy & sys.modules.keys()))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    for verb in ("quickstart", "train", "serve", "env", "runs", "chat", "doctor", "variables"):
        assert verb in ended.stdout
    assert "loaded: []" in ended.stdout


def test_the_version_is_a_verb_too(halteres: Program) -> None:
    told = halteres("version").stdout
    assert told == halteres("--version").stdout == f"halteres {__version__}\n"


def test_a_shell_gets_completions_of_its_kind(halteres: Program) -> None:
    """The shell is named: what a test runs in is none."""
    script = "import os; os.environ['_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION'] = '1'\n"
    script += "from halteres.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "complete -o default -F" in ended.stdout


def test_serve_has_its_commands_and_the_options_of_the_service(halteres: Program) -> None:
    shown = halteres("serve", "--help")
    assert shown.returncode == 0
    for word in ("trajectories", "control", "--state", "--samplers", "--refuse-stable-reinforce"):
        assert word in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--engine", "scripted", "--port", "70000"), "There is no port 70000."),
        (("train",), "Nothing to train on."),
        (("train", "arithmetik"), "Did you mean 'arithmetic'?"),
        (
            ("train", "arithmetic", "--set", "lerning_rate=1"),
            "did you mean 'trainer.learning_rate'?",
        ),
        (("train", "arithmetic", "--set", "env.group_size=5"), "a multiple of group_size (5)"),
        (
            ("train", "arithmetic", "--set", "inference.model=/no/such"),
            "There is no folder /no/such.",
        ),
        (("runs", "status", "ffff"), "Run 'ffff' not found."),
        (("chat", "ffff"), "Run 'ffff' not found."),
        (("env", "eval", "nothing"), "There is no environment 'nothing'."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_1_and_leaves_no_run(
    halteres: Program, arguments: tuple[str, ...], says: str
) -> None:
    ended = halteres(*arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert halteres("runs", "list").stdout.startswith("No runs yet.")


def test_runs_are_listed_shown_and_read(finished: RunDirectory, halteres: Program) -> None:
    header, row = halteres("runs", "list").stdout.splitlines()
    assert header.split() == ["run", "status", "environment", "step", "reward", "name"]
    assert row.split() == ["aaaa1111", "completed", "arithmetic", "2/2", "0.60", "sums"]
    shown = halteres("runs", "status", "aaaa").stdout
    assert "run aaaa1111 'sums': completed" in shown
    assert "reward 0.300 at step 1, 0.600 now" in shown
    assert halteres("runs", "logs", "sums", "trainer", "-n", "1").stdout == "last\n"
    assert "Did you mean 'trainer'?" in halteres("runs", "logs", "sums", "traner").stderr


def test_stopping_a_run_that_has_ended_answers_with_its_state(
    finished: RunDirectory, halteres: Program
) -> None:
    ended = halteres("runs", "stop", "aaaa1111")
    assert (ended.returncode, ended.stdout) == (0, "run aaaa1111: completed\n")


def test_the_variables_can_be_evaluated_by_a_shell(halteres: Program) -> None:
    script = (
        halteres("variables", "--url", "http://127.0.0.1:9").stdout
        + 'echo "$TINKER_BASE_URL $HF_HUB_OFFLINE"\n'
    )
    ended = subprocess.run(
        ["/bin/sh", "-e"], input=script, capture_output=True, text=True, timeout=10
    )
    assert ended.stdout == "http://127.0.0.1:9 1\n"


def test_environments_are_listed_with_their_files(halteres: Program) -> None:
    listed = halteres("env", "list").stdout.splitlines()
    assert listed[0].split() == ["environment", "teaches", "variants", "file"]
    (row,) = [line for line in listed if line.startswith("arithmetic ")]
    assert row.endswith("arithmetic.py")


def test_the_doctor_finds_this_machine_ready(finished: RunDirectory) -> None:
    found = {check.name: check for check in machine_checks()}
    assert found["built-in model"].ok
    assert found["torch"].ok
    assert found["HALTERES_HOME"].ok


def test_the_newest_weights_are_the_ones_to_talk_to(finished: RunDirectory) -> None:
    assert newest_policy(finished) == "tinker://x/sampler_weights/final"
    (finished.path / "checkpoints.jsonl").unlink()
    with pytest.raises(NotFound, match="has no weights to sample from"):
        newest_policy(finished)


def test_the_program_reads_and_writes_utf8_whatever_the_locale(tmp_path: Path) -> None:
    """Arguments, files and answers, and those of the processes that it starts."""
    other = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment = {**os.environ, **other, "HALTERES_HOME": str(tmp_path / "größer")}

    def answer(*words: str) -> dict[str, Any]:
        command = [
            sys.executable,
            "-c",
            "from halteres.cli.main import main; main()",
            "rl",
            *words,
            "--json",
        ]
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        return json.loads(ended.stdout.decode())

    answer("select-environment", "arithmetic")
    edited = answer("edit-config", "system_prompt", "größer als 5 €: 你好 #1")
    assert edited["value"] == "größer als 5 €: 你好 #1"
    held = answer("get-current-config", "--field", "system_prompt")
    assert "größer als 5 €: 你好 #1" in json.dumps(held, ensure_ascii=False)
    refused = answer("edit-config", "system_prompt", os.fsdecode(b"gr\xf6\xdfer"))
    assert refused["code"] == "invalid_arguments"
