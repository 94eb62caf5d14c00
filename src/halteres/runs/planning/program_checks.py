"""What a run of the environment `agent` needs before it begins: tasks, program, reward function.

The program is not started. The reward function's file is imported, by the environment's own Python
in a process of its own: nothing else tells whether that goes well.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halteres.config.program import EnvironmentProgram
from halteres.config.resolution import Resolved
from halteres.environments.program import EPISODE_COLUMNS, check_program
from halteres.environments.tasks import ADD_TASKS, NONE_HELD_OUT, Task, load_tasks
from halteres.errors import InvalidConfig
from halteres.process import TimedOut, run_caught
from halteres.rewards.components import secret_variables
from halteres.runs.planning.checks import AGENT, Check, attempt

LOADED_WITHIN_S = 120.0
"""How long the reward function may take to import: it may bring torch, on a busy machine."""


def examine_program(resolved: Resolved) -> list[Check]:
    """A check for each part of the environment `agent` that is the user's; none of any other
    environment.
    """
    environment = resolved.environment
    if environment.path != AGENT:
        return []
    values = {**resolved.description.config, **resolved.settings.env}
    read, split = attempt("tasks", lambda: _tasks(values, environment))
    if split is None:
        return [_about("env.tasks", read)]
    train, held_out = split
    tasks = [*train, *held_out]
    checks = [read]
    if not held_out:
        found = NONE_HELD_OUT.rstrip(".")
        remedy = f"{ADD_TASKS[:1].lower()}{ADD_TASKS[1:].rstrip('.')}"
        checks.append(Check(name="held-out tasks", ok=False, found=found, remedy=remedy))
    checks.append(attempt("program", lambda: _check_program(values, environment, tasks))[0])
    if values.get("reward"):
        check, _ = attempt("reward function", lambda: _check_reward(values, environment, tasks))
        checks.append(_about("env.reward", check))
    return checks


def _about(field: str, check: Check) -> Check:
    """Name the setting that a failed check is about."""
    if check.failure is not None:
        check.failure.details.setdefault("field", field)
    return check


def _tasks(
    values: Mapping[str, Any], environment: EnvironmentProgram
) -> tuple[Sequence[Task], Sequence[Task]]:
    if not values["tasks"]:
        raise InvalidConfig(
            "There are no tasks.", "env.tasks names no file.", "Name a file of JSON lines."
        )
    return load_tasks(_place(values["tasks"], environment))


def _check_program(
    values: Mapping[str, Any], environment: EnvironmentProgram, tasks: Sequence[Task]
) -> None:
    workspace = None
    if values["workspace"] is not None:
        workspace = _place(values["workspace"], environment)
    folder = environment.working_directory
    check_program(values["command"], workspace, tasks, values["hidden"], folder=folder)


def _check_reward(
    values: Mapping[str, Any], environment: EnvironmentProgram, tasks: Sequence[Task]
) -> None:
    """InvalidConfig where the function cannot be imported, or called with what an episode has."""
    name = values["reward"]
    what = f"The reward function '{name}' cannot be loaded."
    columns = {field for task in tasks for field in task}.union(EPISODE_COLUMNS)
    # -P: no module of the folder it runs in takes the place of another
    loading = (environment.interpreter, "-P", "-m", "halteres.rewards.functions")
    with tempfile.TemporaryDirectory(prefix="halteres-reward-") as ours:
        given, result = Path(ours, "given.json"), Path(ours, "result.json")
        given.write_text(json.dumps({"name": name, "columns": sorted(columns)}), encoding="utf-8")
        command = (*loading, str(given), str(result))
        try:
            # with the keys that the environment has, where the function is imported again
            keys = secret_variables(values)
            ended = run_caught(command, environment.working_directory, LOADED_WITHIN_S, keys)
        except TimedOut:
            why = f"Importing it takes more than {LOADED_WITHIN_S:g} s."
            raise InvalidConfig(what, why, "Load what it needs when it is first called.") from None
        if not result.exists():
            last = ended.err.strip().rpartition("\n")[2] or "it said nothing"
            why = f"Importing it ended the process with code {ended.code}: {last[:300]}."
            raise InvalidConfig(what, why, "Mend it.")
        refused = json.loads(result.read_bytes())
    if refused:
        raise InvalidConfig(refused["what"], refused["why"], refused["next"])


def _place(given: str, environment: EnvironmentProgram) -> Path:
    """A path as the environment has it, which runs in a folder of its own."""
    # of any text: `Path.expanduser` would raise for an unknown user
    return environment.working_directory / os.path.expanduser(given)
