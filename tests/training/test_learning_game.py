"""A policy learns a game of several turns: a real run of the built-in model, on the CPU, seeded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from halteres.config.resolution import resolve_settings
from halteres.observe.metrics import merge_by_step
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

pytestmark = [pytest.mark.runs, pytest.mark.timeout(600)]
WITHIN_S = 540.0


def test_more_games_are_won_after_ten_steps_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.47 of the held-out games are won at the start, about 0.8 after ten steps of 48 episodes."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    edits = [
        "total_steps=10",
        "eval_every=0",
        "checkpoint_every=0",
        "env.eval_tasks=128",
        "env.eval_samples=1",
    ]
    asked = resolve_settings("game:GuessTheNumber-v0-easy", None, edits)
    run = start_run(plan_run(asked))
    ends = time.monotonic() + WITHIN_S
    while not run.state().terminal:
        assert time.monotonic() < ends, "the run did not end"
        time.sleep(0.2)
    assert run.state().status == "completed", run.state().error
    rows = merge_by_step(run.metrics())
    before, after = (
        row["eval/outcome/success"] for row in rows if row.get("eval/outcome/success") is not None
    )
    assert after - before > 0.15
    steps = [row for row in rows if row.get("sampler/episode_return") is not None]
    assert [row["step"] for row in steps] == list(range(1, 11))
    assert max(row["kl_sample_train_v2"] for row in steps) < 1e-9, "sampler and trainer agree"
    assert all(row["tokens/trained"] == row["tokens/action"] for row in steps), (
        "every sampled token is trained on"
    )
