"""The groups of a step as the page shows them: all of them in brief, or one with every answer.

What travels for a step is a few numbers for each rollout; texts and tokens only of a group that is
opened. The page and files read the same form (static/groups.js).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import msgspec

from halteres.errors import NotFound
from halteres.groups.rollout_rows import in_utf16
from halteres.next_step import NextStep
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.rollouts import (
    Completion,
    RecordedGroup,
    TrainedGroup,
    Turn,
    groups_of,
    last_trained_step,
    steps_of,
    trained_groups,
)
from halteres.short_texts import clipped

TASK_LENGTH = 160  # characters of a task in a group's line

REASONS = {
    "same_scores": "All scores are equal: nothing can be learnt from them.",
    "too_long": "A sequence is longer than env.max_token_length.",
    "wrong_size": "It has not as many rollouts as env.group_size says.",
    "surplus": "The batch that it was drawn for is whole without it.",
}
"""Why an environment drops a group, by the code in its row."""

ENDED = "The run ended before it came into a batch, or it was too old for one."
PASSED = "Newer batches are trained on already: it was too old, or left over."


def groups_of_step(run: RunDirectory, step: int | None, search: str) -> dict[str, Any]:
    """Every group of a step in brief; of a step without rollouts, those of the nearest one.

    Args:
        run: the run.
        step: None: the newest that has any.
        search: a text, in any case of letters; `found` has the rollouts that contain it.

    Raises:
        NotFound: no step has rollouts yet.
    """
    number = _nearest(run, step)
    groups, whole = groups_of(run, number)
    reader = _Reader(run, number, groups)
    rows: list[dict[str, Any]] = []
    for place, group in enumerate(groups):
        row = reader.brief(place, group)
        if search:
            row["found"] = _found(group, search.casefold())
        rows.append(row)
    # rows are written in the order in which groups were finished
    rows.sort(key=lambda row: row["number"])
    steps = steps_of(run)
    return {
        "step": number,
        "steps": [steps[0], steps[-1]],
        "groups": rows,
        "figures": _figures(groups),
        "whole": whole,
    }


def group_of_step(run: RunDirectory, step: int, place: int) -> dict[str, Any]:
    """One group with its prompt, its task, and every answer with its tokens.

    Args:
        run: the run.
        step: a step that has rollouts.
        place: of the group in `groups_of_step`.

    Raises:
        NotFound: there is no such group.
    """
    groups: list[RecordedGroup] = []
    if step in steps_of(run):
        groups, _ = groups_of(run, step)
    if not 0 <= place < len(groups):
        raise NotFound(
            f"Step {step} has no group {place}.",
            f"There are {len(groups)} groups of it.",
            NextStep.of("rl_get_rollouts", run.run_id),
        )
    return _Reader(run, step, groups).whole(place, groups[place])


def sampled_groups(run: RunDirectory, most: int, redactor: Redactor) -> list[dict[str, Any]]:
    """The first groups of the newest step with their answers, at most so many; none where there are
    no rollouts. For files, which hold all that they show. `redactor`: its secrets have no tokens.
    """
    steps = steps_of(run)
    if not steps:
        return []
    groups, _ = groups_of(run, steps[-1])
    reader = _Reader(run, steps[-1], groups, redactor)
    return [reader.whole(place, group) for place, group in enumerate(groups[:most])]


class _Reader:
    """Groups of one step, joined with what the trainer made of them."""

    def __init__(
        self,
        run: RunDirectory,
        step: int,
        groups: Sequence[RecordedGroup],
        redactor: Redactor | None = None,
    ) -> None:
        """`redactor`: whose secrets have no tokens; None: this process's."""
        self._step = step
        sent = {group.id for group in groups if group.id and group.dropped is None}
        self._trained = trained_groups(run, step, sent)
        self._newest = last_trained_step(run)
        self._has_ended = run.state().terminal
        self._redactor = redactor or Redactor.of_this_process()

    def brief(self, place: int, group: RecordedGroup) -> dict[str, Any]:
        """A group's line: its task, what became of it, a few numbers of each rollout."""
        trained = self._trained.get(group.id)
        state, why = self._state(group, trained)
        number = group.group
        if number is None:
            number = place
        row: dict[str, Any] = {
            "place": place,
            "number": number,
            "label": str(number),
            "task": _task(group),
            "state": state,
            "why": why,
            "dropped": group.dropped and group.dropped.code.replace("_", " "),
            "failures": len(group.failures),
            "rollouts": [
                _numbers(one, _advantages(trained, at)) for at, one in enumerate(group.completions)
            ],
        }
        scores = [one.score for one in group.completions if one.score is not None]
        if scores:
            row |= {"mean": fmean(scores), "spread": pstdev(scores)}
        return row

    def whole(self, place: int, group: RecordedGroup) -> dict[str, Any]:
        """The same with its prompt, its task and every answer in parts."""
        row = self.brief(place, group)
        trained = self._trained.get(group.id)
        for at, one in enumerate(group.completions):
            row["rollouts"][at]["parts"] = self._parts(one, _advantages(trained, at))
        return {
            **row,
            "prompt": group.prompt,
            "item": group.item,
            "left_out": group.left_out,
            "left_out_by": group.left_out_by,
            "failures": [{"code": one.code, "why": one.why} for one in group.failures],
        }

    def _parts(self, one: Completion, advantages: Sequence[float]) -> list[dict[str, Any]]:
        """What was sampled and what was observed, in order."""
        turns = one.parts
        parts: list[dict[str, Any]] = []
        for at, turn in enumerate(turns):
            part: dict[str, Any] = {"text": turn.text, "sampled": True}
            # the tokens of a secret would tell it
            is_harmless = self._redactor.text(turn.text) == turn.text
            if is_harmless and turn.ids and len(turn.lengths) == len(turn.ids):
                part |= _tokens(turn)
            if turn.reward is not None:
                part["reward"] = turn.reward
            # where the trainer counts turns otherwise, a rollout has one advantage
            if len(advantages) == len(turns):
                part["advantage"] = advantages[at]
            elif advantages:
                part["advantage"] = fmean(advantages)
            parts.append(part)
            if turn.observation:
                parts.append({"text": turn.observation, "sampled": False})
        return parts

    def _state(self, group: RecordedGroup, trained: TrainedGroup | None) -> tuple[str, str]:
        """What became of a group, and why or where."""
        if group.dropped is not None:
            return "dropped", group.dropped.why or REASONS.get(group.dropped.code, "")
        if not group.completions:
            last = ""
            if group.failures:
                last = f"{group.failures[-1].code}: {group.failures[-1].why}"
            return "failed", last
        if trained is not None:
            if trained.step == self._step:
                return "trained", ""
            return "trained", f"in step {trained.step}"
        if not group.id or self._newest is None:
            return "sent", ""
        if self._has_ended:
            return "unused", ENDED
        if self._newest > self._step:
            return "unused", PASSED
        return "waiting", "In no batch yet."


def _nearest(run: RunDirectory, step: int | None) -> int:
    steps = steps_of(run)
    if not steps:
        raise NotFound(f"Run {run.run_id} has no rollouts yet.")
    if step is None:
        return steps[-1]
    return min(steps, key=lambda number: abs(number - step))


def _task(group: RecordedGroup) -> str:
    """What the task is, in a line: its own text, the first text among its fields, or the prompt's
    end.
    """
    item = group.item
    if isinstance(item, dict):
        texts = [value for value in item.values() if isinstance(value, str)]
        item = next(iter(texts), json.dumps(item, ensure_ascii=False))
    if item is None:
        return clipped(" ".join(group.prompt.split())[-TASK_LENGTH:], TASK_LENGTH)
    return clipped(" ".join(str(item).split()), TASK_LENGTH)


def _numbers(one: Completion, advantages: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"score": one.score, "tokens": one.tokens, "finish": one.finish}
    if one.outcome is not None:
        row["outcome"] = one.outcome
    if one.rewards:
        row["rewards"] = one.rewards
    if one.masked:
        row["masked"] = True
    if advantages:
        row["advantage"] = fmean(advantages)
    return row


def _advantages(trained: TrainedGroup | None, at: int) -> Sequence[float]:
    """Of the turns of one rollout."""
    if trained is None or at >= len(trained.advantages):
        return ()
    return trained.advantages[at]


def _tokens(turn: Turn) -> dict[str, Any]:
    """Encoded already: a list of numbers holds no secret, and is not searched for one."""
    lengths = in_utf16(turn.text, turn.lengths)
    tokens: dict[str, list[int] | list[float]] = {"ids": turn.ids, "lengths": lengths}
    if len(turn.logprobs) == len(turn.ids):
        tokens["logprobs"] = turn.logprobs
    return {name: msgspec.Raw(msgspec.json.encode(row)) for name, row in tokens.items()}


def _found(group: RecordedGroup, wanted: str) -> list[int]:
    """The rollouts with this text; all of a group whose task has it."""
    everywhere = f"{group.prompt}\n{json.dumps(group.item, ensure_ascii=False)}".casefold()
    return [
        at
        for at, one in enumerate(group.completions)
        if wanted in everywhere or wanted in one.conversation.casefold()
    ]


def _figures(groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Of all rollouts of the step, and of those that were not dropped."""
    sampled = [one for group in groups for one in group.completions]
    kept = [one for group in groups if group.dropped is None for one in group.completions]
    failed = Counter(failure.code for group in groups for failure in group.failures)
    dropped = Counter(group.dropped.code for group in groups if group.dropped is not None)
    figures: dict[str, Any] = {
        "groups": len(groups),
        "rollouts": len(sampled),
        "dropped": dict(dropped),
        "failed": dict(failed),
        "mean_score": _mean_score(kept),
        "mean_score_sampled": _mean_score(sampled),
    }
    if sampled:
        figures |= {
            "mean_tokens": fmean(one.tokens for one in sampled),
            "truncated": fmean(one.finish == "length" for one in sampled),
            "distinct": len({one.text for one in sampled}) / len(sampled),
        }
    return figures


def _mean_score(rollouts: Sequence[Completion]) -> float | None:
    scores = [one.score for one in rollouts if one.score is not None]
    if not scores:
        return None
    return fmean(scores)
