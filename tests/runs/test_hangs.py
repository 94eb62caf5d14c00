"""Real runs of environments whose scorers hang or raise, on the scripted engine: what is counted,
started again and told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest

from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.config.resolution import resolve_settings
from halteres.dashboard.runs import view_of
from halteres.next_step import as_call
from halteres.observe.metrics import read_rows
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.plan import plan_run
from halteres.runs.reading.evaluations import CORRECT
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait_for_end

pytestmark = pytest.mark.runs

ENVIRONMENT = '''
import asyncio
import signal
from pathlib import Path

from halteres.environments.single_turn import SingleTurnEnv
from halteres.errors import EnvironmentFailed

HERE = Path(__file__).parent


class TooLate(EnvironmentFailed):
    code = "scorer_timeout"


def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    10**10**10


class Sums(SingleTurnEnv):
    """Thirty tasks."""

    name = "sums"

    async def get_next_item(self):
        return self.rng.randrange(30)

    def eval_items(self):
        return [1, 2]

    def prompt(self, item):
        return f"Task {item}."

    async def score(self, item, text):
        SCORE
        return float(len(text) % 2)


if __name__ == "__main__":
    Sums.cli()
'''

Make = Callable[..., RunDirectory]


@pytest.fixture
def started(home: Path, tmp_path: Path) -> Make:
    """Starts a run whose scorer does this first."""

    def start(score: str, **changes: object) -> RunDirectory:
        file = tmp_path / "sums.py"
        body = indent(dedent(score), " " * 8).strip()
        file.write_text(ENVIRONMENT.replace("SCORE", body))
        edits = {
            "inference.engine": "scripted",
            "env.group_size": 4,
            "env.batch_size": 16,
            "env.max_new_tokens": 16,
            "env.max_num_workers": 2,
            "env.eval_samples": 1,
            "env.rollout_retries": 1,
            "env.stuck_s": 2,
            "env.ensure_scores_are_not_same": "false",
            "trainer.total_steps": 4,
            "trainer.checkpoint_every": 2,
            **changes,
        }
        given = [f"{name}={value}" for name, value in edits.items()]
        return start_run(plan_run(resolve_settings(str(file), None, given)))

    return start


def test_a_scorer_that_hangs_with_signals_blocked_fails_the_run_in_time_with_its_frame(
    started: Make,
) -> None:
    run = started("hang()")
    state = wait_for_end(run, within_s=90)
    assert (state.status, state.code) == ("failed", "env_stuck")
    assert state.error is not None and "It hung in hang (sums.py:" in state.error
    events = run.events()
    assert [event["reason"] for event in events if event["type"] == "restart"] == ["env_stuck"] * 2
    stuck = [event for event in events if event["type"] == "stuck"]
    assert len({(event["draw_step"], event["ordinal"]) for event in stuck}) == 3, (
        "none of these items was worked on twice"
    )
    failed = [event for event in events if event["type"] == "eval_failed"]
    assert failed and "gave no sign of life for 2 s" in failed[0]["error"]
    assert "It hung in hang (sums.py:" in failed[0]["error"]
    assert not survivors(state)


def test_a_scorer_that_hangs_once_costs_a_restart_and_the_run_completes(
    started: Make,
) -> None:
    run = started(
        """
        if item not in (1, 2) and not (HERE / "hung").exists():
            (HERE / "hung").write_text(str(item))
            hang()
        """
    )
    state = wait_for_end(run, within_s=90)
    assert (state.status, state.error) == ("completed", None)
    assert [event["reason"] for event in run.events() if event["type"] == "restart"] == [
        "env_stuck"
    ]
    assert any(event.get("rule") == "env_stuck" for event in run.events())
    rows = [row for row in run.metrics() if row.get("src") == "env"]
    assert sum(row.get("rollouts/failed/env_stuck", 0) for row in rows) == 1
    (listed,) = read_rows(run.path / "quarantine.jsonl")
    file = Path(run.state().environment_file).parent / "hung"
    assert (listed["code"], str(listed["item"])) == ("env_stuck", file.read_text())


async def test_a_scorer_that_raises_for_a_third_of_the_tasks_is_told_alike_by_every_reader(
    started: Make,
) -> None:
    run = started(
        """
        if item % 3 == 0:
            raise TooLate("No answer came in time.")
        if item % 3 == 1 and len(text) % 5 == 0:
            raise KeyError("now and then")
        """,
        **{"env.rollout_retries": 8},
    )
    state = wait_for_end(run, within_s=90)
    assert (state.status, state.error, state.step) == ("completed", None, 4)
    assert run.events()[-1]["type"] == "status"
    counted: dict[str, int] = {}
    for row in run.metrics():
        for name, value in row.items():
            if name.startswith("rollouts/failed/"):
                code = name.rpartition("/")[2]
                counted[code] = counted.get(code, 0) + value
    assert set(counted) >= {"scorer_timeout"} and set(counted) <= {"scorer_timeout", "env_error"}
    listed = read_rows(run.path / "quarantine.jsonl")
    assert listed and all(row["item"] % 3 == 0 for row in listed)
    assert {row["code"] for row in listed} == {"scorer_timeout"}
    status = (await call("rl_check_status", {"run_id": run.run_id}, Caller())).body
    assert status["failed_rollouts"] == counted
    assert status["quarantined_tasks"] == {"scorer_timeout": len(listed)}
    view = view_of(run, as_call)
    assert view["failed_rollouts"] == counted
    assert view["quarantined_tasks"] == {"scorer_timeout": len(listed)}
    read = (await call("rl_get_rollouts", {"run_id": run.run_id}, Caller())).body
    figures = read["figures"]
    assert figures["quarantined_tasks"] == {"scorer_timeout": len(listed)}
    assert figures["last_quarantined"]["code"] == "scorer_timeout"
    trained_on = [
        row["item"]
        for file in (run.path / "rollouts").glob("step_*.jsonl")
        for row in read_rows(file)
        if row["completions"]
    ]
    assert trained_on and not [item for item in trained_on if item % 3 == 0]


def test_waiting_for_longer_than_the_loop_may_hang_is_no_hang(started: Make) -> None:
    run = started(
        """
        if not (HERE / "waited").exists():
            (HERE / "waited").touch()
            await asyncio.sleep(4)
        """,
        **{"env.stuck_s": 1, "trainer.total_steps": 1},
    )
    assert wait_for_end(run, within_s=60).status == "completed"
    assert not [event for event in run.events() if event["type"] in ("restart", "stuck")]
    assert any(CORRECT in row for row in run.metrics())
