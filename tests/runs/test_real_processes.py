"""A run with its real processes, on the scripted engine: the parts fit together."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from deadlines import wait_until
from service.test_trainer_ranks import pids_of

from halteres.config.resolution import resolve_settings
from halteres.observe.metrics import merge_by_step, series
from halteres.runs.directory import stop_run
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait, wait_for_end

pytestmark = pytest.mark.runs

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"

EDITS = (
    *(
        "inference.engine=scripted",
        "env.group_size=4",
        "env.batch_size=16",
        "env.eval_tasks=4",
        "env.eval_samples=2",
    ),
    "trainer.checkpoint_every=2",
)

RANKS_STEPS = 10
RANKS_EDITS = (
    "inference.trainer_ranks=2",
    f"trainer.total_steps={RANKS_STEPS}",
    "trainer.eval_every=0",
    "env.eval_tasks=4",
    "env.eval_samples=2",
)


def test_a_run_is_stopped_resumed_and_completed(home: Path) -> None:
    run = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=1000"]))
    )
    wait(run, lambda state: state.status == "running" and state.step >= 3, within_s=60)
    stopped = stop_run(run)
    assert (stopped.status, stopped.resumable) == ("stopped", True)
    assert stopped.last_checkpoint is not None and stopped.last_checkpoint["step"] == stopped.step
    assert not survivors(stopped)

    resumed = start_run(
        plan_run(
            resolve_settings(
                None, None, [f"trainer.total_steps={stopped.step + 3}"], base=run.settings()
            ),
            resume=run,
        )
    )
    state = wait_for_end(resumed, within_s=60)
    assert (state.status, state.step, state.error) == ("completed", stopped.step + 3, None)
    assert not survivors(state)
    steps = [step for step, _ in series(merge_by_step(resumed.metrics()), "reward/mean")]
    assert steps == list(range(1, state.step + 1))
    assert json.loads((resumed.path / "adapter" / "adapter_config.json").read_text())["r"] == 16
    assert (resumed.path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in resumed.path.iterdir()} <= _on_the_page()


def test_a_killed_supervisor_takes_every_real_process_with_it(home: Path) -> None:
    run = start_run(
        plan_run(resolve_settings("arithmetic", None, [*EDITS, "trainer.total_steps=1000"]))
    )
    before = wait(run, lambda state: state.status == "running" and state.step >= 3, within_s=60)
    assert before.supervisor is not None
    os.kill(before.supervisor["pid"], signal.SIGKILL)
    wait_until(lambda: run.state().code == "supervisor_lost")
    assert run.state().resumable
    wait_until(lambda: not survivors(before), within_s=15)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "edits",
    [(), ("inference.shard=true", "inference.samplers=1")],
    ids=["replicated", "sharded"],
)
def test_a_run_whose_trainer_is_two_ranks_learns(edits: tuple[str, ...], home: Path) -> None:
    """On the engine that computes; a sharded trainer has another one next to it, which samples."""
    run = start_run(plan_run(resolve_settings("arithmetic", None, [*RANKS_EDITS, *edits])))
    state = wait(run, lambda state: state.step >= 1, within_s=300)
    assert sorted(pids_of(state.processes["engine"]["pid"])) == [0, 1]
    state = wait_for_end(run, within_s=300)
    assert (state.status, state.error) == ("completed", None)
    assert not survivors(state)
    rewards = [reward for _, reward in series(merge_by_step(run.metrics()), "reward/mean")]
    assert len(rewards) == RANKS_STEPS
    assert rewards[-1] > rewards[0] + 0.2, rewards


def _on_the_page() -> set[str]:
    """The files of a run's directory that docs/runs.md names."""
    table = PAGE.read_text().partition("## The run directory")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name.partition("/")[0] for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
