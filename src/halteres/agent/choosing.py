"""Which run a call means.

Owns: the one way from a call's `run_id` to a run; what is told where it fits none, or more than one.
Never: makes a path of what was given: a run is found among those that there are.
"""

from __future__ import annotations

from halteres.runs.directory import RunAmbiguous, RunDirectory, RunNotFound, find_run, known_runs
from halteres.runs.reading.roster import Entry

SHOWN = 8


def chosen_run(run_id: str | None) -> RunDirectory:
    """The run of this id (or unique beginning of one, or name); without one, the only active run.

    Raises:
        RunNotFound: no such run, or none is active; `did_you_mean`, `active_runs`.
        RunAmbiguous: several fit, or several are active; `active_runs`.
    """
    return find_run(run_id) if run_id else _only_active()


def _only_active() -> RunDirectory:
    runs = known_runs()
    active = [run for run in runs if not run.ended]
    if len(active) == 1:
        return RunDirectory(active[0].path)
    if active:
        raise RunAmbiguous(
            f"{len(active)} runs are active: {_listed(active)}.",
            "Say which one by run_id.",
            active_runs=[run.run_id for run in active],
        )
    raise RunNotFound(
        "No run is active, and no run_id was given.",
        f"The newest are {_listed(runs)}." if runs else "There are no runs yet.",
        "" if runs else "rl_list_environments()",
        did_you_mean=runs[0].run_id if runs else None,
        active_runs=[],
    )


def _listed(runs: list[Entry]) -> str:
    return ", ".join(run.described for run in runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")
