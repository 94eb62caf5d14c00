"""Links to a run's files under the names that the seeds gave them.

Owns: H/logs/{role}_{run_id}.log (HERMES_HOME/logs/rl_training too, where that is set), H/configs/run_{run_id}.yaml.
Never: fails a run because of a link; removes one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from halteres.config import environ
from halteres.runs.directory import RunDirectory

ROLES = ("api", "trainer", "env")


def link_run(run: RunDirectory) -> None:
    """Make the links. What they lead to may not be there yet."""
    home, hermes = environ.home(), environ.hermes_home()
    for folder in (home / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        for role in ROLES:
            _link(folder / f"{role}_{run.run_id}.log", run.log(role))
    _link(home / "configs" / f"run_{run.run_id}.yaml", run.path / "config.yaml")


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # it is there already, or the folder is not ours to write
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
