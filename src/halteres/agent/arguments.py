"""Arguments that several tools share: their types, the words that describe them to a model, and which run is meant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from halteres.config import environ
from halteres.next_step import NextStep
from halteres.runs.directory import Entry, RunAmbiguous, RunDirectory, RunNotFound, find_run, known_runs

LONGEST_NAME = 100  # characters


def _checked(names: list[str] | None) -> list[str] | None:
    if any(len(name) > LONGEST_NAME for name in names or ()):
        raise PydanticCustomError("name_too_long", "a name has {most} characters at most", {"most": LONGEST_NAME})
    return names


ShortNames = AfterValidator(_checked)

RunId = Annotated[
    str | None, Field(description="run id (a unique beginning will do) or name; default: the only active run")
]
Draft = Annotated[str | None, Field(description="handle of a draft, from an earlier answer; default: your own")]
Changes = Annotated[
    dict[str, Any] | None,
    Field(description='settings to change, all or none: {"total_steps": 60, "learning_rate": 0.001, "stop_when": 0.9}'),
]
RunIds = Annotated[
    list[str] | None, ShortNames, Field(min_length=1, max_length=8, description="several runs, instead of run_id")
]


def _within_host(wait_s: float) -> float:
    """As long as the host of these tools lets a call take: it would break off a longer one."""
    return min(wait_s, environ.longest_wait_s())


WaitSeconds = Annotated[
    float,
    Field(ge=0, le=3600, description="seconds to wait; 0 answers at once; your host's limit, mostly 50, holds"),
    AfterValidator(_within_host),
]


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
        "" if runs else NextStep("rl_list_environments"),
        did_you_mean=runs[0].run_id if runs else None,
        active_runs=[],
    )


def _listed(runs: list[Entry]) -> str:
    return ", ".join(run.described for run in runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")
