"""Starts at the same time: one key is one run, a cap holds, and whoever fails leaves nothing. With
stand-ins.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from halteres.config.operator_policy import Caps, Policy, PolicyCap
from halteres.config.program import Description
from halteres.config.resolution import resolve_settings
from halteres.errors import HalteresError, InvalidConfig
from halteres.runs.directory import RunDirectory, list_runs, stop_run
from halteres.runs.planning.checks import PreflightFailed
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import LOCK

from .run_fixtures import HERE, StartRun, wait, wait_for_end

pytestmark = pytest.mark.runs

ONE_START = """
import sys
from runs.run_fixtures import settings, start_standins

asked = settings()
print("ready", flush=True)
sys.stdin.readline()
print(start_standins(asked, idempotency_key=sys.argv[1]).run_id)
"""


def test_one_key_in_many_processes_at_once_is_one_run(home: Path) -> None:
    command = [sys.executable, "-c", ONE_START, "the-key"]
    starters = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        for _ in range(3)
    ]
    for starter in starters:
        assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("go\n")
        starter.stdin.flush()
    answers = {starter.communicate(timeout=30)[0].strip() for starter in starters}
    (run,) = list_runs()
    assert answers == {run.run_id}
    assert wait_for_end(run).idempotency_key == "the-key"


def test_a_cap_on_runs_at_once_holds_however_many_start_together(
    start: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "1")
    policy = Policy(name="small", caps=Caps(max_concurrent_runs=2))
    started: list[RunDirectory] = []
    refused: list[PolicyCap] = []
    together = threading.Barrier(5)

    def one() -> None:
        together.wait(timeout=20)
        try:
            started.append(start(policy=policy))
        except PolicyCap as error:
            refused.append(error)

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (len(started), len(refused)) == (2, 3)
    ids = {run.run_id for run in started}
    assert set(refused[0].details["active_runs"]) == ids == {run.run_id for run in list_runs()}
    for run in started:
        wait(run, lambda state: state.supervisor)
        stop_run(run)


def test_more_steps_than_the_policy_allows_are_refused(start: StartRun, home: Path) -> None:
    with pytest.raises(PolicyCap) as refused:
        start(policy=Policy(caps=Caps(max_steps=3)))
    assert (refused.value.code, refused.value.details["limit"]) == ("policy_cap", 3)
    assert any(
        check["check"] == "steps allowed" and not check["ok"]
        for check in refused.value.details["checks"]
    )
    assert not (home / "runs").exists()


def test_a_supervisor_that_cannot_be_started_leaves_nothing_and_its_key_is_free(
    start: StartRun, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr("halteres.runs.start.detach", nowhere)
        with pytest.raises(Exception, match="could not be started"):
            start(idempotency_key="the-key")
    assert [entry.name for entry in (home / "runs").iterdir()] == [LOCK]
    assert not (home / "logs").exists() and not (home / "configs").exists()
    assert wait_for_end(start(idempotency_key="the-key")).status == "completed"


def test_an_environment_that_keeps_an_order_of_its_own_cannot_be_deterministic(
    start: StartRun, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = Description(schema={}, config={"batch_size": 4, "group_size": 2}, is_foreign=True)
    monkeypatch.setattr("halteres.config.resolution.describe", lambda *_: foreign)
    with pytest.raises(InvalidConfig, match=r"trainer\.deterministic.*cannot be repeated"):
        start("trainer.deterministic=true")
    assert not (home / "runs").exists()


NEEDS = """
from halteres.config.problem import MissingPackage
from halteres.environments.arithmetic import ArithmeticEnv

class NeedyEnv(ArithmeticEnv):
    name = "needy"

    @classmethod
    def missing_packages(cls, config):
        return (MissingPackage(package="abacus", fix="pip install abacus"),) if config.group_size == 4 else ()

if __name__ == "__main__":
    NeedyEnv.cli()
"""


def test_a_package_or_data_set_that_the_environment_lacks_is_found_before_a_run_is_made(
    home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "needy.py"
    file.write_text(NEEDS)

    def refusal(*edits: str) -> HalteresError | None:
        edits = ("group_size=4", "batch_size=8", *edits)
        return plan_run(resolve_settings(str(file), None, edits)).refusal

    for _ in range(2):  # what was missing is not remembered: it may be installed meanwhile
        error = refusal()
        assert (
            error is not None
            and error.code == "preflight_failed"
            and error.next == "pip install abacus"
        )
        assert "needs the package abacus" in error.what
    assert refusal("group_size=2") is None


def test_a_data_set_that_is_not_there_is_refused(home: Path, tmp_path: Path) -> None:
    resolved = resolve_settings("gsm8k", None, [f"env.dataset={tmp_path / 'gone.jsonl'}"])
    refusal = plan_run(resolved).refusal
    assert isinstance(refusal, InvalidConfig)
    assert (refusal.details["field"], refusal.details["problems"][0]["got"]) == (
        "env.dataset",
        str(tmp_path / "gone.jsonl"),
    )


@pytest.mark.parametrize("place", ["file/home", "/proc/home"])
def test_a_home_that_cannot_be_made_is_no_full_disk(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / place))
    refusal = plan_run(resolve_settings("arithmetic", None, [])).refusal
    assert isinstance(refusal, PreflightFailed)
    assert "HALTERES_HOME" in str(refusal.next)
