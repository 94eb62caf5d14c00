"""Measuring a policy with an environment's own `evaluate`."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.errors import EnvironmentFailed, NotFound
from halteres.models import TINY, builtin_path
from halteres.process import Hung
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import Server
from halteres.runs.state import read_state, write_state
from halteres.runs.supervision import evaluation as measurement
from halteres.runs.supervision.evaluation import examination

TELLS = """
import json, os, sys, yaml
given = yaml.safe_load(open(sys.argv[3]))
json.dump({"verb": sys.argv[1], "folder": os.getcwd(), **given}, open("told.json", "w"))
print(json.dumps({"eval/percent_correct": 0.5, "worked": 1, "by": "us"}))
"""


def trained(run: RunDirectory, file: Path, interpreter: str) -> RunDirectory:
    """The run, of this environment file, run by this interpreter."""
    state = read_state(run.path / "run.json")
    facts = {"environment": "sums", "environment_file": str(file), "interpreter": interpreter}
    write_state(run.path / "run.json", msgspec.structs.replace(state, **facts))
    env = {"prompt_template": "Question: {question}", "digits": 3, "eval_tasks": 5, "seed": 4}
    wiring = {
        "run_dir": str(run.path),
        "rollout_server_url": "http://127.0.0.1:1",
        "total_steps": 9,
    }
    (run.path / "config.yaml").write_text(yaml.safe_dump({"env": {**env, **wiring}}))
    return run


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Another interpreter: it says so."""
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\nexec " + sys.executable + ' "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("named", ["sums", "FILE"])
def test_a_run_is_measured_with_its_own_settings_by_its_own_interpreter(
    finished: RunDirectory, tmp_path: Path, python: str, named: str
) -> None:
    file = tmp_path / "sums.py"
    file.write_text(TELLS)
    exam = examination(
        str(file) if named == "FILE" else named, trained(finished, file, python), "unused"
    )
    assert exam.program.interpreter == python
    figures = measurement.measure(exam, Server(url="http://127.0.0.1:2"), {"eval_samples": 2})
    assert figures == {"eval/percent_correct": 0.5, "eval/worked": 1}
    told = json.loads((tmp_path / "told.json").read_bytes())
    assert (told["verb"], told["folder"]) == ("evaluate", str(tmp_path)), "in its project's folder"
    assert told["env"] == {
        "prompt_template": "Question: {question}",
        "digits": 3,
        "eval_tasks": 5,
        "eval_samples": 2,
        "seed": 4,
        "tokenizer_name": "/nowhere",
        "use_wandb": False,
    }
    assert told["openai"][0]["model_name"] == "tinker://x/sampler_weights/final"


def test_a_registered_model_is_measured_with_the_tokenizer_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own name, which the environment's process could not find."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    tiny = builtin_path(TINY)
    assert tiny is not None
    registered = tmp_path / "models" / "me" / "tiny"
    shutil.copytree(tiny, registered)
    exam = examination("arithmetic", None, "me/tiny")
    assert (exam.policy, exam.tokenizer) == ("me/tiny", str(registered))
    figures = CliRunner().invoke(
        app,
        ["env", "eval", "arithmetic", "--model", "me/tiny", "--tasks", "2", "--samples", "1"],
        catch_exceptions=False,
    )
    assert "eval/num_tasks" in figures.output


def test_another_environment_is_measured_with_its_own_defaults(
    finished: RunDirectory, tmp_path: Path
) -> None:
    exam = examination("arithmetic", trained(finished, tmp_path / "sums.py", "/nowhere"), "unused")
    assert (exam.program.name, exam.env) == ("arithmetic", {})
    assert exam.policy == "tinker://x/sampler_weights/final"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import signal; signal.pause()", "took more than 0.2 s"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("print('nothing')", "gave no figures"),
        ("", "gave no figures"),
    ],
)
def test_a_measurement_that_goes_wrong_is_told_in_a_sentence(
    finished: RunDirectory,
    tmp_path: Path,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    says: str,
) -> None:
    file = tmp_path / "sums.py"
    file.write_text(code)
    if "pause" in code:
        monkeypatch.setattr(measurement, "WITHIN_S", 0.2)
    exam = examination("sums", trained(finished, file, python), "unused")
    with pytest.raises(EnvironmentFailed, match=says):
        measurement.measure(exam, Server(url="http://127.0.0.1:2"), {})


@pytest.mark.parametrize("code", [0, 3])
def test_the_key_of_the_service_is_in_nothing_that_a_measurement_leaves_or_says(
    finished: RunDirectory, tmp_path: Path, python: str, code: int
) -> None:
    file, folder, key = tmp_path / "sums.py", tmp_path / "kept", "tml-run-0123456789"
    folder.mkdir()
    file.write_text(
        "import json, pathlib, sys\n"
        "config = pathlib.Path(sys.argv[3]).read_text()\n"
        "pathlib.Path(sys.argv[5], 'evaluate_config.yaml').write_text(config)\n"
        f"assert {key!r} in config\n"
        "said = ' '.join(config.split())\n"
        "print(json.dumps({'eval/of ' + said: 1}))\n"
        f"sys.exit('error: ' + said if {code} else 0)\n"
    )
    exam = examination("sums", trained(finished, file, python), "unused")
    try:
        said = str(measurement.measure(exam, Server(url="http://127.0.0.1:2", key=key), {}, folder))
    except EnvironmentFailed as error:
        said = error.sentence
    assert "api_key: ***" in said and key not in said
    assert [file.name for file in folder.iterdir()] == ["evaluate_config.yaml"]
    assert key not in (folder / "evaluate_config.yaml").read_text()


def test_a_reward_models_folder_is_meant_from_here_and_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment runs in a folder of its own."""
    asked: list[dict[str, object]] = []

    def measure(exam: object, service: object, wanted: dict[str, object]) -> dict[str, float]:
        asked.append(wanted)
        return {}

    monkeypatch.setattr("halteres.runs.servers.served", lambda *_: nullcontext())
    monkeypatch.setattr("halteres.runs.supervision.evaluation.measure", measure)
    monkeypatch.setattr("halteres.runs.planning.checks.examine_reward_models", lambda _: ([], []))
    monkeypatch.chdir(tmp_path)
    command = ["env", "eval", "arithmetic", "--reward-model", "mine,http://127.0.0.1:1"]
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert asked == [{"reward_model_path": f"{tmp_path}/mine,http://127.0.0.1:1"}]
    monkeypatch.undo()
    monkeypatch.setattr(
        "halteres.runs.servers.served", lambda *_: pytest.fail("a service was started")
    )
    with pytest.raises(NotFound, match=r"no reward model in .*nowhere"):
        CliRunner().invoke(
            app, ["env", "eval", "arithmetic", "--reward-model", "nowhere"], catch_exceptions=False
        )


HANGS = """
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.single_turn import SingleTurnEnv

class Hangs(SingleTurnEnv):
    name = "hangs"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(stuck_s=1), [APIServerConfig()]

    async def evaluate(self, *args, **kwargs):
        while True:
            pass

if __name__ == "__main__":
    Hangs.cli()
"""


def test_an_evaluation_may_hang_for_as_long_as_its_own_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hangs.py"
    file.write_text(HANGS)
    monkeypatch.setattr(measurement, "WITHIN_S", 40)
    folder = str(builtin_path(TINY))
    exam = examination(str(file), None, folder)
    with pytest.raises(EnvironmentFailed, match="gave no sign of life"):
        measurement.measure(exam, Server(url="http://127.0.0.1:2"), {})


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_hang_is_answered_by_advice_that_the_environment_can_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_foreign: bool
) -> None:
    """One of atroposlib's has no `env.stuck_s`."""
    file = tmp_path / "hangs.py"
    file.write_text(HANGS)
    exam = examination(str(file), None, str(builtin_path(TINY)))
    exam = replace(exam, program=replace(exam.program, is_foreign=is_foreign))
    monkeypatch.setattr(measurement, "run_caught", Mock(side_effect=Hung("")))
    with pytest.raises(EnvironmentFailed) as caught:
        measurement.measure(exam, Server(url="http://127.0.0.1:2"), {})
    assert ("env.stuck_s" in caught.value.sentence) != is_foreign
