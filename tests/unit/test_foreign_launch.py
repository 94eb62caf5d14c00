"""Running a file written for atroposlib: what it logs to W&B becomes rows of ours, and no run of
W&B is opened.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from halteres.config import environ
from halteres.config.environ import AskedHeartbeat
from halteres.config.program import EnvironmentProgram
from halteres.observe.metrics import read_rows

WANDB = """
    import sys

    def init(mode=None, **options):
        sys.stderr.write(f"init {mode}\\n")
        return Run()

    def log(data, step=None):
        raise AssertionError("the real one")

    class Run:
        def log(self, data, step=None):
            raise AssertionError("the real one")
"""
ATROPOSLIB = """
    import asyncio, sys

    class BaseEnv:
        async def register_env(self):
            pass

        async def _run_evaluate(self):
            await self.evaluate()

        @classmethod
        def cli(cls):
            if sys.argv[1] == "evaluate":
                asyncio.run(cls()._run_evaluate())
            else:
                cls().serve()
"""
ENVIRONMENT = """
    import sys
    import beside
    import wandb
    from atroposlib.envs.base import BaseEnv

    class Scalar:
        def __float__(self):
            return 0.25

    class Sums(BaseEnv):
        def serve(self):
            run = wandb.init(project="p")
            wandb.log({"sums-3fa9_0_train/percent_correct": 0.5, "server/time": 1, "train/rollouts": object()}, step=3)
            run.log({"loud": float("nan"), "scalar": Scalar(), "words": "7"})
            sys.stderr.write(f"{sys.argv} {__name__} {beside.there}\\n")

        async def evaluate(self):
            self.kept = 0.75

        async def wandb_log(self, figures):
            wandb.log({**figures, "eval/percent_correct": self.kept}, step=0)

    if __name__ == "__main__":
        Sums.cli()
"""


def program(folder: Path) -> EnvironmentProgram:
    texts = {
        "wandb.py": WANDB,
        "atroposlib/__init__.py": "",
        "atroposlib/envs/__init__.py": "",
        "atroposlib/envs/base.py": ATROPOSLIB,
        "beside.py": "there = True",
        "sums.py": ENVIRONMENT,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return EnvironmentProgram(
        name="sums",
        path=folder / "sums.py",
        interpreter=sys.executable,
        working_directory=folder,
        is_foreign=True,
    )


def run(folder: Path, verb: str) -> tuple[str, list[dict[str, Any]]]:
    """Its stderr, and the rows that it left behind a line that somebody has torn."""
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1, "t"')
    command = program(folder).command_in_run(
        verb, "--config", "c.yaml", metrics=metrics, name="sums-3fa9"
    )
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr, [
        {name: value for name, value in row.items() if name != "t"} for row in read_rows(metrics)
    ]


def test_what_a_foreign_environment_logs_is_a_row_under_its_own_names(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "serve")
    assert rows[0] == {"train/percent_correct": 0.5, "server/time": 1.0, "step": 3, "src": "env"}


def test_numbers_of_any_library_are_told_and_what_is_no_number_is_passed_over(
    tmp_path: Path,
) -> None:
    _, rows = run(tmp_path, "serve")
    assert rows[1] == {"loud": None, "scalar": 0.25, "step": 3, "src": "env"}, (
        "at the last step that was named"
    )
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_foreign_environment_opens_no_run_of_wandb_and_sees_the_command_line_it_knows(
    tmp_path: Path,
) -> None:
    said, _ = run(tmp_path, "serve")
    assert said.splitlines()[0] == "init disabled"
    given = ["--config", "c.yaml", "--env.use_wandb", "true", "--env.steps_per_eval", "0"]
    assert said.splitlines()[1] == f"{[str(tmp_path / 'sums.py'), 'serve', *given]} __main__ True"


def test_figures_that_an_evaluation_leaves_to_wandb_log_are_told(tmp_path: Path) -> None:
    _, rows = run(tmp_path, "evaluate")
    assert rows == [{"eval/percent_correct": 0.75, "step": 0, "src": "env"}]


BEATING = """
    import asyncio, os, sys
    from atroposlib.envs.base import BaseEnv

    class Sums(BaseEnv):
        def serve(self):
            asyncio.run(self.env_manager())

        async def env_manager(self):
            say("setup")
            await self.register_env()
            await asyncio.sleep(0.5)
            say("serving")

        async def register_env(self):
            await super().register_env()

        async def evaluate(self):
            await asyncio.sleep(0.5)
            say("evaluating")

        async def wandb_log(self, figures):
            pass

    def say(what):
        asked = "HALTERES_HEARTBEAT" in os.environ
        sys.stderr.write(f"{what} {os.path.exists('beats')} {asked}\\n")

    if __name__ == "__main__":
        Sums.cli()
"""


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("serve", ["setup False False", "serving True False"]),
        ("evaluate", ["evaluating True False"]),
    ],
)
def test_a_foreign_environment_gives_its_heartbeat_once_it_has_registered_or_evaluates(
    tmp_path: Path, verb: str, says: list[str]
) -> None:
    """Before, it may load its tasks on the loop; afterwards nothing is left that beats."""
    made = program(tmp_path)
    (tmp_path / "sums.py").write_text(textwrap.dedent(BEATING))
    command = made.command_in_run(verb, metrics=tmp_path / "metrics.jsonl", name="x")
    variables = AskedHeartbeat(tmp_path / "beats", 60.0).variable
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environ.for_child(**variables),
    )
    assert ended.stderr.splitlines() == says
    assert not (tmp_path / "beats").exists()


def test_a_file_of_atroposlib_without_wandb_runs_all_the_same(tmp_path: Path) -> None:
    made = program(tmp_path)
    (tmp_path / "wandb.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "sums.py").write_text(
        "import json, sys\nsys.stdout.write(json.dumps(sys.argv[1]))\n"
    )
    command = made.command_in_run("serve", metrics=tmp_path / "metrics.jsonl", name="x")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(ended.stdout) == "serve"
