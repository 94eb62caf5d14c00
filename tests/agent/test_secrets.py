"""A planted secret is in no file, answer or command line, however talkative an environment is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runs.run_fixtures import survivors

from halteres.runs.directory import RunDirectory, find_run

from .real_runs import CHANGES, told, until

pytestmark = pytest.mark.runs

ENVIRONMENT = Path(__file__).with_name("leaky_env.py")
SECRETS = {
    "OPENROUTER_API_KEY": "sk-or-v1-5d1e4b7a9c",
    "TINKER_API_KEY": "tml-planted-0f9e8d7c6b",
    "WANDB_API_KEY": "wandb_planted_1a2b3c4d",
    "MY_TOKEN": "tok~planted~%7B+/=",
}
TOOLS: tuple[tuple[str, dict[str, Any]], ...] = (  # rl_test_inference has tests of its own for this
    ("rl_health_check", {}),
    ("rl_list_environments", {}),
    ("rl_select_environment", {"name": str(ENVIRONMENT)}),
    ("rl_get_current_config", {"detail": "full"}),
    ("rl_edit_config", {"field": "group_size", "value": 2}),
    ("rl_list_runs", {}),
)
OF_THE_RUN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rl_check_status", {}),
    ("rl_get_results", {"plot": True}),
    ("rl_get_rollouts", {"which": "worst", "n": 3}),
    ("rl_stop_training", {}),
    *(
        ("rl_get_logs", {"role": role, "lines": 40})
        for role in ("env", "eval", "trainer", "supervisor", "service")
    ),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {**SECRETS, "HALTERES_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def spoken(data: bytes) -> list[str]:
    """Which secrets are in there."""
    return [name for name, value in SECRETS.items() if value.encode() in data]


@contextmanager
def watched_processes() -> Iterator[dict[str, list[str]]]:
    """Command lines with a secret in them, of all processes, while the block runs."""
    seen: dict[str, list[str]] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    command = file.read_bytes()
                except OSError:
                    continue
                if names := spoken(command):
                    seen[str(command)] = names

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def variables(run: RunDirectory) -> dict[str, list[str]]:
    """Secrets among the variables of each process of the run that is there just now."""
    files = {
        role: Path(f"/proc/{facts['pid']}/environ") for role, facts in run.state().processes.items()
    }
    return {role: spoken(file.read_bytes()) for role, file in files.items() if file.exists()}


async def test_a_secret_is_nowhere(home: Path) -> None:
    with watched_processes() as command_lines:
        answers = [await told(name, **arguments) for name, arguments in TOOLS]
        started = await told("rl_start_training", environment=str(ENVIRONMENT), changes=CHANGES)
        run = find_run(started["run_id"])
        await until(run.run_id, lambda answer: answer["step"] >= 1, 60)
        held = variables(run)
        ended = await until(
            run.run_id, lambda answer: answer["status"] not in ("starting", "running"), 60
        )
        answers += [
            started,
            ended,
            *[await told(name, run_id=run.run_id, **more) for name, more in OF_THE_RUN],
        ]
    assert set(held) >= {"service", "engine", "api", "trainer"} and not any(held.values()), held
    assert not command_lines
    assert not [answer for answer in answers if spoken(str(answer).encode())]
    files = {str(file): spoken(file.read_bytes()) for file in home.rglob("*") if file.is_file()}
    assert not {file: names for file, names in files.items() if names}
    assert any(file.endswith(".sqlite") for file in files) and any(
        file.endswith(".png") for file in files
    )

    log = run.log("env").read_text(errors="replace")
    assert "on stdout: " in log and log.count("MY_TOKEN=***") >= 3, (
        "it did find them out, and told them"
    )
    assert "MY_TOKEN=***" in (run.state().error or ""), "its last words are those of the run"
    assert ended["exit"] == {"process": "env", "code": 3}
    assert not survivors(run.state())
