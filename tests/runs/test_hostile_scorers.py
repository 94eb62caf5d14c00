"""A whole run whose scorer does what no scorer may be able to do: it is completed, and says what
happened by name.
"""

from __future__ import annotations

import shutil
import socket
from collections import Counter
from pathlib import Path

import pytest
from deadlines import wait_until
from environments.fakes import processes_naming
from environments.hostile_env import ACTS

from halteres.config.resolution import resolve_settings
from halteres.environments.cage import cage_missing
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

from .run_fixtures import survivors, wait_for_end

pytestmark = [
    pytest.mark.runs,
    pytest.mark.skipif(cage_missing() is not None, reason=cage_missing() or ""),
]

HOSTILE = Path(__file__).parents[1] / "environments" / "hostile_env.py"
STEPS = 4


def test_a_run_of_hostile_scorers_is_completed(home: Path, tmp_path: Path) -> None:
    environment = Path(shutil.copy(HOSTILE, tmp_path))
    private = tmp_path / "private"
    private.write_text("a key")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        edits = (
            "inference.engine=scripted",
            f"trainer.total_steps={STEPS}",
            "trainer.eval_every=0",
            "env.group_size=4",
            "env.batch_size=32",
            "env.max_new_tokens=16",
            "env.rollout_retries=20",
            "env.ensure_scores_are_not_same=false",
            "env.scorer_timeout_s=1",
            "env.cage=on",
            f"env.private={private}",
            f"env.metrics={home}/runs/*/metrics.jsonl",
            f"env.marker={tmp_path}/marker",
            f"env.port={listening.getsockname()[1]}",
        )
        run = start_run(plan_run(resolve_settings(str(environment), None, [*edits])))
        state = wait_for_end(run, within_s=100)
    assert (state.status, state.step, state.error) == ("completed", STEPS, None)
    counted = Counter[str]()
    ways_out = list[float]()
    for row in run.metrics():
        assert "forged" not in row
        for name, value in row.items():
            if name.startswith("rollouts/failed/"):
                counted[name.removeprefix("rollouts/failed/")] += int(value)
            if name == "train/ways_out":
                ways_out.append(value)
    assert counted.keys() == {
        "scorer_exited",
        "scorer_timeout",
        "scorer_output",
        "scorer_memory",
        "scorer_error",
    }, f"{len(ACTS)} acts"
    assert len(ways_out) == STEPS and not any(ways_out)
    assert not (tmp_path / "marker").exists()
    wait_until(lambda: not survivors(state) and not processes_naming(environment), within_s=5)
