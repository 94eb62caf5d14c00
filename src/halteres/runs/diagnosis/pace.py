"""The rules about pace: one side of a run waits for the other, or work is done in vain."""

from __future__ import annotations

from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.runs.diagnosis.run_facts import Finding, History, RunFacts, components, number, rule
from halteres.runs.reading.progress import DROPPED_GROUPS, MANY


def _step_times(row: Row) -> tuple[float, float] | None:
    """Seconds that the trainer waited for its batch, and of the whole step; None where there were
    so few groups to train on that a short pass says nothing.

    On-policy the trainer waits a fifth to a third of a step of arithmetic, up to .98 where nearly
    no group has signal.
    """
    waited_s, step_s = number(row, "time/batch"), number(row, "time/step")
    if waited_s is None or not step_s or (number(row, "groups/without_signal") or 0.0) > 0.5:
        return None
    return waited_s, step_s


@rule("trainer_starved", steps=10)
def trainer_starved(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The trainer waits nearly all the time for batches, long enough to matter, and sampling is not
    what takes the time: on-policy a batch is sampled while the trainer waits, as it ought to be.
    """
    if (times := _step_times(row)) is None:
        return None
    waited_s, step_s = times
    evidence = (
        f"In {trainer_starved.steps} steps in a row the trainer waited {waited_s / step_s:.0%} of "
        f"the time for its batch ({waited_s:.1f} of {step_s:.1f} s)"
    )
    workers, groups = run.number("max_num_workers"), run.groups_per_batch
    why, remedy, has_cause = _why_starved(run, history.environment)
    if workers and groups and workers < groups:
        words = f"{workers} groups at a time do not fill a batch of {groups}."
        remedy, why, has_cause = (
            Remedy(run.go_on_with({"env.max_num_workers": groups}), words),
            "",
            True,
        )
    return Finding(
        evidence=f"{evidence}{why}.",
        remedy=remedy,
        holds=has_cause and waited_s / step_s >= 0.9 and waited_s >= 2.0,
    )


def _why_starved(run: RunFacts, row: Row) -> tuple[str, Remedy, bool]:
    """By an environment's row: why batches are long in coming, what to do, and whether that is more
    than that answers take their time.
    """
    dropped = {
        name.removeprefix(DROPPED_GROUPS): count
        for name in row
        if name.startswith(DROPPED_GROUPS) and (count := number(row, name))
    }
    sent = sum(number(row, f"groups/{name}") or 0.0 for name in ("sent", "kept", "set_aside"))
    num_dropped = sum(dropped.values())
    if num_dropped and num_dropped >= MANY * (num_dropped + sent):
        why = (
            f": {num_dropped:.0f} of {num_dropped + sent:.0f} groups were dropped "
            f"({', '.join(dropped)})"
        )
        words = "or tasks that are neither always nor never solved."
        return why, Remedy(run.go_on_with(run.larger_groups()), words), True
    item_s, sampling_s = number(row, "time/item"), number(row, "time/item_sampling")
    if not item_s or sampling_s is None:
        words = "are answers needlessly long? If they are short, scoring is slow."
        return "", Remedy((run.rollouts("worst"),), words), True
    why = f": a group takes {item_s:.1f} s, {item_s - sampling_s:.1f} s of them no sampling"
    words = "the environment's own work (scoring, tools) takes the time: make it faster."
    return why, Remedy((run.logs("env"),), words), sampling_s < 0.5 * item_s


@rule("env_idle", steps=10)
def env_idle(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The environment waits nearly all the time for the trainer, and long enough to matter."""
    if (times := _step_times(row)) is None:
        return None
    idle_s, step_s = times[1] - times[0], times[1]
    calls = run.go_on_with({"trainer.max_staleness": run.trainer.max_staleness + 1})
    return Finding(
        evidence=f"In {env_idle.steps} steps in a row the environment waited "
        f"{idle_s / step_s:.0%} of the time "
        f"for the trainer ({idle_s:.1f} of {step_s:.1f} s).",
        remedy=Remedy(
            calls, "rollouts then go on while the trainer trains; or a smaller env.batch_size."
        ),
        holds=times[0] / step_s <= 0.05 and idle_s >= 2.0,
    )


@rule("env_ahead", steps=3)
def environment_ahead(run: RunFacts, history: History, row: Row) -> Finding | None:
    """The environment makes far more than is taken: groups are set aside as too old."""
    sent, lost = number(row, "groups/sent"), number(row, "groups/set_aside") or 0.0
    if not sent:
        return None
    workers, groups = run.number("max_num_workers"), run.groups_per_batch
    older = run.go_on_with({"trainer.max_staleness": run.trainer.max_staleness + 1})
    remedy = Remedy(older, "groups may be older.")
    if groups and (workers is None or workers > groups):
        remedy = Remedy(
            run.go_on_with({"env.max_num_workers": groups}), "fewer groups under way at once."
        )
    return Finding(
        evidence=f"{lost:.0f} of {sent:.0f} groups were set aside by the trajectory server, most "
        "likely as too old, "
        f"and at least 30% in {environment_ahead.steps} steps in a row: they were sampled in vain.",
        remedy=remedy,
        holds=lost / sent >= 0.3,
        is_over=lost / sent < 0.15,
    )


@rule("scorer_slow", steps=3)
def scorer_slow(run: RunFacts, history: History, row: Row) -> Finding | None:
    """One of the `rewards` takes most of the time that a group takes, and long enough to matter."""
    group_s = number(row, "rollouts/group_s")
    if not group_s:
        return None
    scorer, taken_s = max(components(row, "reward/", "_s"), key=lambda it: it[1], default=("", 0.0))
    room = "or let more groups be under way (env.max_num_workers)."
    return Finding(
        evidence=f"The reward '{scorer}' takes {taken_s:.1f} of the {group_s:.1f} s of a group, "
        f"in {scorer_slow.steps} "
        "steps in a row.",
        remedy=Remedy(
            (run.logs("env"),), f"give '{scorer}' more of the machine or a smaller model, {room}"
        ),
        holds=taken_s >= 1.0 and taken_s > 0.5 * group_s,
    )
