"""Waiting for runs, and looking for what they leave."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from deadlines import wait_until

from halteres.config.resolution import Resolved, resolve_settings
from halteres.models import TINY, builtin_path
from halteres.models.shape import own_tensors, read_shape
from halteres.process import alive
from halteres.runs.directory import RunDirectory
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run
from halteres.runs.state import RunState

HERE = Path(__file__).parent
STANDIN_SUPERVISOR = (sys.executable, str(HERE / "standin_roles.py"), "supervisor")
ENVIRONMENT = str(HERE / "standin_env.py")


class StartRun(Protocol):
    def __call__(self, *edits: str, **options: Any) -> RunDirectory: ...


def settings(*edits: str) -> Resolved:
    """Those of a run of stand-ins."""
    few_steps = ["trainer.total_steps=4", "trainer.checkpoint_every=2"]
    return resolve_settings(ENVIRONMENT, None, [*few_steps, *edits])


def start_standins(resolved: Resolved, **options: Any) -> RunDirectory:
    """A run of stand-ins; `options` are of `plan_run`, or the key."""
    key = options.pop("idempotency_key", None)
    plan = plan_run(resolved, **options)
    return start_run(plan, idempotency_key=key, supervisor=STANDIN_SUPERVISOR)


def wait(run: RunDirectory, until: Callable[[RunState], object], within_s: float = 20) -> RunState:
    """The run's state once `until` holds."""

    def reached() -> RunState | None:
        state = run.state()
        if until(state):
            return state
        assert not state.terminal, f"{state.status}: {state.error}\n" + "\n".join(
            run.log_tail("supervisor", 30)
        )
        return None

    state = wait_until(reached, within_s, f"{run.path}/run.json")
    assert state is not None
    return state


def wait_for_end(run: RunDirectory, within_s: float = 30) -> RunState:
    return wait(run, lambda state: state.terminal, within_s)


def end(run: RunDirectory) -> None:
    """Kill what a failing test has left of a run, once its supervisor can be told."""
    wait_until(lambda: run.state().terminal or run.state().supervisor, within_s=10)
    state = run.state()
    for who in (state.supervisor, *state.processes.values()):
        if who and alive(who):
            os.kill(who["pid"], signal.SIGKILL)


def survivors(state: RunState) -> list[str]:
    """Roles whose process, or any of whose process group, is still there."""
    return [
        role for role, facts in state.processes.items() if facts.get("pid") and _group_lives(facts)
    ]


def _group_lives(facts: dict[str, Any]) -> bool:
    if alive(facts):
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[2]) == facts.get("pgid"):
            return True
    return False


def large_model(folder: Path) -> Path:
    """A model folder of 26 M parameters whose weights are a hole in a file: it has a size, and can
    be read for that.
    """
    tiny = builtin_path(TINY)
    assert tiny is not None
    shutil.copytree(tiny, folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), "intermediate_size": 16_720}
    file.write_text(json.dumps(config), encoding="utf-8")
    shape = replace(read_shape(Path(tiny)), feed=16_720)
    header: dict[str, Any] = {}
    end = 0
    for name, sizes in own_tensors(shape, config):
        begin, end = end, end + 4 * math.prod(sizes)
        header[name] = {"dtype": "F32", "shape": sizes, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(encoded).to_bytes(8, "little") + encoded)
        weights.truncate(8 + len(encoded) + end)
    return folder
