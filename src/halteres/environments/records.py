"""What an environment writes into the run directory, and the figures of its groups, step by step.

A file that cannot be written stops no rollout; without a run directory nothing is written. The
supervisor makes alerts of the notices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halteres.environments.scored import (
    ScoredDataGroup,
    TurnTokens,
    action_tokens,
    prompt_tokens,
    rollouts_of,
    scores_of,
    turns_of,
)
from halteres.environments.scoring import metrics_of
from halteres.errors import HalteresError, as_failure
from halteres.files import replace_file
from halteres.groups.rollout_rows import RolloutFiles, TokenLimits, group_id, sampled_fields
from halteres.observe.metrics import append_row, read_rows
from halteres.redaction import Redactor
from halteres.tokenizer import Tokenizer
from halteres.types import MASKED, FailedRollout

log = logging.getLogger(__name__)

REWARDS = "rewards_version"
"""Type of the event that says which components score from here on."""

MOST_LOGGED = 200  # different failures that are known again

LONGEST_ITEM = 2000  # characters of an item that is no JSON


class Tally:
    """Figures of the rollouts of one step: means of what is measured, counts of what happened."""

    def __init__(self, tokenizer: Tokenizer, success_threshold: float) -> None:
        self._tokenizer, self._success_threshold = tokenizer, success_threshold
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()

    def group(self, group: ScoredDataGroup) -> None:
        """Take in the rollouts of one group."""
        rewards = group.get("rewards")
        scores = scores_of(group)
        own = rewards.own if rewards else group.get("own_scores") or scores
        measured: list[Mapping[str, float]] = [
            {
                # what the batch's mean leaves out where groups are dropped
                "rollouts/score": scores[place],
                "train/percent_correct": float(own[place] > self._success_threshold),
                "train/completion_lengths": sum(
                    len(action_tokens(group, number)) for number in rollout
                ),
                "train/truncated": float(finish_of(group, place, self._tokenizer) == "length"),
            }
            for place, rollout in enumerate(rollouts_of(group))
        ]
        # of the answers that were paid, those that a limit cut off: a policy may be paid for more
        # than what it was asked for
        measured += [
            {"train/truncated_paid": row["train/truncated"]}
            for row in measured
            if row["train/percent_correct"]
        ]
        measured += (
            {f"train/{name}": value for name, value in row.items()}
            for row in group.get("metrics", ())
        )
        if rewards:  # each component's values and seconds, and what the group took as a whole
            measured += [
                metrics_of("reward", *one) for values in rewards.values for one in values.items()
            ]
            seconds = {f"reward/{name}_s": value for name, value in rewards.seconds.items()}
            measured.append({**seconds, "rollouts/group_s": rewards.group_s})
            self._counts.update(rewards.counts)
        for row in measured:
            for name, value in row.items():
                self._values[name].append(value)

    def item(self, took_s: float, sampling_s: float) -> None:
        """Take in how long an item took, and how much of that was sampling."""
        self._values["time/item"].append(took_s)
        self._values["time/item_sampling"].append(sampling_s)

    def count(self, name: str, number: int = 1) -> None:
        """Something happened `number` times."""
        self._counts[name] += number

    def row(self) -> dict[str, float]:
        """The figures: the same bits in whatever order groups were taken in."""
        means = {name: math.fsum(values) / len(values) for name, values in self._values.items()}
        return {**means, "rollouts/failed": 0, **self._counts}


class Records:
    """The environment's part of one run directory, or of none."""

    def __init__(
        self,
        run_dir: str | None,
        tokenizer: Tokenizer,
        success_threshold: float = 0.0,
        token_limits: TokenLimits | None = None,
    ) -> None:
        """`token_limits`: how many groups are written with their tokens; None: as by default."""
        self._tallies: defaultdict[int, Tally] = defaultdict(
            lambda: Tally(tokenizer, success_threshold)
        )
        self._tokenizer, self._folder = tokenizer, Path(run_dir) if run_dir else None
        self._rewards_version: str | None = None  # None: of no group yet
        self._files: RolloutFiles | None = None  # None: there is no run directory
        self._logged = set[FailedRollout]()
        if self._folder is not None:
            folder = self._folder / "rollouts"
            folder.mkdir(parents=True, exist_ok=True)
            self._files = RolloutFiles(folder, token_limits or TokenLimits())

    def tally(self, step: int) -> Tally:
        """The figures of a step that is not closed yet."""
        return self._tallies[step]

    def close(self, before: int) -> dict[int, dict[str, float]]:
        """The figures of all steps before this one, by step; they are forgotten here."""
        return {
            step: self._tallies.pop(step).row() for step in sorted(self._tallies) if step < before
        }

    def group(self, step: int, number: int, item: Any, group: ScoredDataGroup) -> None:
        """One scored group, on its way into the batch of `step`."""
        self._tallies[step].group(group)
        rewards = group.get("rewards")
        if rewards is not None:
            if (
                self._rewards_version is None and self._folder is not None
            ):  # as an earlier life of this environment left it
                rows = read_rows(self._folder / "events.jsonl")
                self._rewards_version = next(
                    (r.get("version") for r in reversed(rows) if r.get("type") == REWARDS), None
                )
            if rewards.version != self._rewards_version:
                before, self._rewards_version = self._rewards_version, rewards.version
                self._event(REWARDS, step, version=rewards.version, before=before)
        failures = group.get("failures", ())
        self.count_failures(step, failures)
        if self._files is not None:
            self._write(step, number, item, failures, self._line(group))

    def failed(self, step: int, number: int, item: Any, failures: Sequence[FailedRollout]) -> None:
        """A group that came to nothing."""
        self._tallies[step].count("groups/failed")
        self.count_failures(step, failures)
        self._write(step, number, item, failures, {"prompt": "", "completions": []})

    def dropped(
        self, step: int, number: int, item: Any, group: ScoredDataGroup, reason: str
    ) -> None:
        """A whole group that is not sent: its figures, why, and what failed on the way to it."""
        self._tallies[step].group(group)
        self.not_sent(step, number, item, group, reason)

    def not_sent(
        self, step: int, number: int, item: Any, group: ScoredDataGroup, reason: str
    ) -> None:
        """A whole group that is not sent, and not in the step's figures either."""
        failures = group.get("failures", ())
        self.count_failures(step, failures)
        if self._files is not None:
            line = {**self._line(group), "dropped": {"code": reason}}
            self._write(step, number, item, failures, line)

    def set_aside(self, step: int, number: int, group: ScoredDataGroup, why: str) -> None:
        """A group whose row is written already will be in no batch: the trajectory server says why.
        A second row of the same id has the reason.
        """
        line = {
            "id": group_id(group["tokens"], group["scores"]),
            "prompt": "",
            "completions": [],
            "dropped": {"code": "set_aside", "why": Redactor.of_this_process().text(why)},
        }
        self._write(step, number, None, (), line)

    def log(self, step: int, metrics: Mapping[str, Any], src: str = "env") -> None:
        """One row of metrics.jsonl; a `step` among the metrics wins."""
        self._append("metrics.jsonl", {"step": step, "t": time.time(), "src": src, **metrics})

    def notice(
        self, rule: str, step: int, evidence: str, next_step: str, **figures: float | None
    ) -> None:
        """What nobody else can see, among the run's events: the supervisor makes an alert of it."""
        self._event("notice", step, rule=rule, evidence=evidence, remedy=next_step, **figures)

    def _event(self, kind: str, step: int, **facts: Any) -> None:
        facts = Redactor.of_this_process().json(facts)
        self._append("events.jsonl", {"t": time.time(), "type": kind, "step": step, **facts})

    def end(self, error: HalteresError) -> None:
        """Write control/failure.json: why the environment's process ends, for whoever tells of the
        run's end.
        """
        if self._folder is not None:
            with contextlib.suppress(OSError):
                file = self._folder / "control" / "failure.json"
                file.parent.mkdir(exist_ok=True)
                replace_file(file, json.dumps({"role": "env", **as_failure(error)}).encode())

    def _line(self, group: ScoredDataGroup) -> dict[str, Any]:
        """What a group's row says of its prompt, its rollouts and their rewards."""
        prompt = prompt_tokens(group, 0)
        line: dict[str, Any] = {
            "id": group_id(group["tokens"], group["scores"]),
            "prompt": self._text(prompt),
            "prompt_ids": prompt,
            "completions": [
                self._completion(group, place, one) for place, one in enumerate(rollouts_of(group))
            ],
        }
        if rewards := group.get("rewards"):
            line |= {"rewards_version": rewards.version, "rewards_s": rewards.seconds}
        return line

    def _write(
        self,
        step: int,
        number: int,
        item: Any,
        failures: Sequence[FailedRollout],
        line: Mapping[str, Any],
    ) -> None:
        """Write a group's row: once, also where it is rolled out again after a restart."""
        if self._files is None:
            return
        rows = [dataclasses.asdict(failure) for failure in failures]
        for row in rows:
            if not row["prompt_tokens"]:
                del row["prompt_tokens"]
        failed = Redactor.of_this_process().json(rows)
        row = {"group": number, "item": as_json(item), **line, "failures": failed}
        try:
            self._files.append(step, row)
        except HalteresError as error:  # the trainer meets the same disk and speaks for the run
            log.warning("%s", error.sentence)

    def count_failures(self, step: int, failures: Sequence[FailedRollout]) -> None:
        """Attempts that came to nothing."""
        self._tallies[step].count("rollouts/failed", len(failures))
        for failure in failures:
            self._tallies[step].count(f"rollouts/failed/{failure.code}")
            if failure not in self._logged:
                log.warning("A rollout failed (%s): %s", failure.code, failure.why)
            # the rows count them; the log says each once, as long as they are not too many
            if len(self._logged) < MOST_LOGGED:
                self._logged.add(failure)

    def _completion(
        self, group: ScoredDataGroup, place: int, rollout: Sequence[int]
    ) -> dict[str, Any]:
        tokens = [token for number in rollout for token in action_tokens(group, number)]
        line: dict[str, Any] = {
            "text": self._tokenizer.decode(tokens),
            "score": group["scores"][rollout[0]],
            "tokens": len(tokens),
            "finish": finish_of(group, place, self._tokenizer),
        }
        if rewards := group.get("rewards"):
            values = rewards.values[place]
            line["rewards"] = {
                name: None if value is None else value.total for name, value in values.items()
            }
        if outcomes := group.get("outcome"):
            line["outcome"] = outcomes[place]
        overrides = group.get("overrides")
        if overrides and (overrides[rollout[0]] or {}).get("set_advantage_to_zero"):
            line["masked"] = True
        turns = turns_of(group, rollout)
        if len(turns) > 1:  # `text` has them all in one
            line["turns"] = [self._turn(turn) for turn in turns]
        else:
            logprobs = None
            if rows := group.get("inference_logprobs"):
                pairs = [
                    pair
                    for at in rollout
                    for pair in zip(rows[at], group["masks"][at], strict=True)
                ]
                logprobs = [logprob for logprob, mask in pairs if mask != MASKED]
            line |= sampled_fields(tokens, logprobs, self._tokenizer)
        return line

    def _turn(self, turn: TurnTokens) -> dict[str, Any]:
        line: dict[str, Any] = {
            "text": self._tokenizer.decode(turn.action),
            "observation": self._text(turn.observation),
            **sampled_fields(turn.action, turn.logprobs, self._tokenizer),
            "observation_ids": turn.observation,
        }
        if turn.reward is not None:
            line["reward"] = turn.reward
        return line

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _append(self, file: str, row: Mapping[str, Any]) -> None:
        try:
            if self._folder is not None:
                append_row(self._folder / file, row)
        except HalteresError as error:  # the trainer meets the same disk and speaks for the run
            log.warning("%s", error.sentence)


def finish_of(group: ScoredDataGroup, rollout: int, tokenizer: Tokenizer) -> str:
    """Why a rollout's last answer ended, "stop" or "length": as its group says, else by its last
    token.
    """
    finishes = group.get("finish")
    if finishes:
        return finishes[rollout]
    tokens = action_tokens(group, rollouts_of(group)[rollout][-1])
    return "stop" if tokens and tokens[-1] in tokenizer.eos_token_ids else "length"


def as_json(item: Any, longest: int | None = LONGEST_ITEM) -> Any:
    """An item as JSON: fields of a dataclass, JSON as it is, a set in order, the beginning of
    anything else's text (`longest` characters; None: all of it).
    """
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = dataclasses.asdict(item)
    if isinstance(item, Mapping):
        return {str(name): as_json(value, longest) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [as_json(value, longest) for value in item]
    if isinstance(item, set | frozenset):
        # its own order is another one in every process
        return sorted((as_json(value, longest) for value in item), key=json.dumps)
    if isinstance(item, str | int | float | bool | None):
        return item
    return repr(item)[:longest]
