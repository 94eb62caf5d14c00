"""What the trainer's end in order means for its run.

Owns: that a run has completed only with all steps (or the time that was given, or the held-out figure that was wanted)
and final weights.
Never: judges a trainer that was killed, or failed (`failures`).
"""

from __future__ import annotations

from halteres.runs.directory import RunDirectory
from halteres.runs.reading import failures
from halteres.runs.state import RunState
from halteres.runs.supervision.conclusion import final_checkpoint
from halteres.runs.supervision.messages import Verdict


def trainer_ended(
    run: RunDirectory, state: RunState, max_minutes: float | None, *, stop_asked: bool, goal: str | None = None
) -> Verdict:
    """How a run ends whose trainer exited with code 0; `goal`: that its held-out figure was reached, in words."""
    final = final_checkpoint(run)
    if final and final["step"] >= state.total_steps:
        return Verdict(status="completed")
    if final and goal:
        return Verdict(
            status="completed", note=f"{goal}; the run ended at step {final['step']} of {state.total_steps}."
        )
    if stop_asked:
        return Verdict(status="stopped")
    why = _why(run)
    if final and max_minutes is not None and (why is None or "minutes" in why):
        note = f"The time limit of {max_minutes:g} minutes was reached at step {final['step']} of {state.total_steps}."
        return Verdict(status="completed", note=note)
    error = failures.died(run, "trainer", "Trainer", 0, step=state.step, ready=True)
    if why:  # nobody asked its run to end, but somebody asked it
        error.why = f"It ended early, with a checkpoint: {why}."
    return Verdict(status="failed", error=error)


def _why(run: RunDirectory) -> str | None:
    """What the trainer gave as its reason to write the final weights."""
    finals = [event for event in run.events() if event.get("type") == "checkpoint" and event.get("final")]
    why = finals[-1].get("why") if finals else None
    return str(why) if why else None
