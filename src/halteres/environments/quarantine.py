"""Tasks that are not drawn again in a run: a group of each failed, and repeating its rollouts with
other sampling seeds did not help.

A task is known by the digest of its item as JSON, with the whole text of whatever is no JSON: two
items are the same task if they read the same. An item whose text holds an address in memory (a
class without `__repr__`) cannot be known again, and is never quarantined.

What is quarantined stands in the run directory, so that it holds in the environment's next life,
and in a run that goes on from this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halteres.environments.records import as_json
from halteres.errors import SamplerFailed, ScorerFailed
from halteres.observe.metrics import WriteFailed, append_row, read_rows
from halteres.redaction import Redactor
from halteres.rollouts.rng import Draw
from halteres.types import FailedRollout

FILE = "quarantine.jsonl"

STUCK_EVENT = "stuck"
"""Type of the event that says at which draw the environment's event loop hung."""

STUCK = "env_stuck"
"""Failure of the rollouts of that draw."""

NOT_THE_TASKS = frozenset(
    {SamplerFailed.code, ScorerFailed.code, "reward_missing", "tool_error", "worker_lost"}
)
"""Failures of a server, a judge, a tool or the machine: another task would have met them, too."""

LAST_FAILURES = 4  # of a group that are written down

FIRST_SHARE, FEWEST = 0.1, 3
"""From this share of the drawn tasks on, and so many, a notice is due; the next when it has
doubled.
"""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


class Quarantine:
    """The quarantined tasks of one run."""

    def __init__(self, folder: Path | None, *, at_once: bool) -> None:
        """Read what stands in the run's folder.

        Args:
            folder: the run directory; None: none is known, and nothing is kept.
            at_once: a task is not drawn from the moment on in which it failed; otherwise from the
                next batch on, so that what is drawn does not depend on what took how long.
        """
        self._file = None if folder is None else folder / FILE
        self._at_once = at_once
        self._failed_at: dict[str, tuple[int, int]] = {}  # digest -> step and ordinal of the draw
        self._codes: dict[str, str] = {}  # digest -> the failure that decided it
        self.newest_failure = ""  # why the task that was quarantined last failed
        self._seen = set[str]()  # digests of the tasks that were drawn
        self._num_seen_before = 0
        self._noticed_share = FIRST_SHARE / 2
        self._stuck: dict[tuple[int, int], bool] = {}  # step, ordinal -> whether it was being drawn
        rows = [] if self._file is None else read_rows(self._file)
        for row in rows:
            digest = str(row.get("task"))
            self._failed_at[digest] = (row.get("step", 0) - 1, row.get("group", 0))
            self._codes[digest] = str(row.get("code"))
            failures = row.get("failures") or [{}]
            self.newest_failure = str(failures[-1].get("why", ""))
            self._num_seen_before = max(self._num_seen_before, row.get("tasks_drawn", 0))
        if rows:
            self._noticed_share = max(self._noticed_share, self.share)
        if folder is not None:
            for event in read_rows(folder / "events.jsonl"):
                if event.get("type") == STUCK_EVENT and isinstance(event.get("ordinal"), int):
                    place = (event.get("draw_step", 0), event["ordinal"])
                    self._stuck[place] = bool(event.get("drawing"))

    def __len__(self) -> int:
        """How many tasks are quarantined."""
        return len(self._failed_at)

    def __str__(self) -> str:
        codes = Counter(self._codes.values())
        named = ", ".join(f"{count} {code}" for code, count in codes.most_common())
        return f"{len(self)} of {self.num_drawn} tasks are quarantined ({named})."

    @property
    def num_drawn(self) -> int:
        """Different tasks that were drawn, of which those that are quarantined are some."""
        return max(self._num_seen_before, len(self._seen), len(self))

    @property
    def share(self) -> float:
        """Quarantined ones among the tasks that were drawn."""
        return len(self) / max(1, self.num_drawn)

    def stuck_before(self, draw: Draw) -> FailedRollout | None:
        """The failure of this very draw, if an earlier life of the environment hung at it."""
        if (draw.step, draw.ordinal) not in self._stuck:
            return None
        why = "The environment's event loop hung while it worked on this item, and was killed."
        return FailedRollout(code=STUCK, why=why)

    def hung_in_drawing(self, draw: Draw) -> bool:
        """Whether it hung in drawing the item, which is then not tried again."""
        return self._stuck.get((draw.step, draw.ordinal), False)

    def holds(self, draw: Draw, item: Any) -> bool:
        """Whether this item is not to be rolled out; otherwise it counts as drawn."""
        digest = task_digest(item)
        if digest is None:
            return False
        place = self._failed_at.get(digest)
        if place is None:
            self._seen.add(digest)
            return False
        step, ordinal = place
        return self._at_once or step < draw.step or (step, ordinal) == (draw.step, draw.ordinal)

    def add(self, draw: Draw, item: Any, failures: Sequence[FailedRollout]) -> None:
        """Quarantine the task of a group that came to nothing, if that was the task's own fault."""
        digest = task_digest(item)
        if digest is None or failures[-1].code in NOT_THE_TASKS or digest in self._failed_at:
            return
        self._failed_at[digest] = (draw.step, draw.ordinal)
        self._codes[digest] = failures[-1].code
        self.newest_failure = failures[-1].why
        self._seen.add(digest)
        if self._file is None:
            return
        row = {
            "t": time.time(),
            "step": draw.step + 1,
            "group": draw.ordinal,
            "code": failures[-1].code,
            "task": digest,
            "item": as_json(item),
            "failures": Redactor.of_this_process().json(
                [asdict(failure) for failure in failures[-LAST_FAILURES:]]
            ),
            "tasks_drawn": self.num_drawn,
        }
        # it holds as long as this process lives; the trainer meets the same full disk
        with contextlib.suppress(WriteFailed):
            append_row(self._file, row)

    def share_has_grown(self) -> bool:
        """Whether a notice is due now: the share is large, and twice that of the last one."""
        grown = len(self) >= FEWEST and self.share >= 2 * self._noticed_share
        if grown:
            self._noticed_share = self.share
        return grown


def task_digest(item: Any) -> str | None:
    """What tells a task from others, 16 hex digits; None: nothing does.

    >>> task_digest({"a": 1, "b": 2}) == task_digest({"b": 2, "a": 1})
    True
    >>> task_digest(object()) is None
    True
    """
    text = json.dumps(as_json(item, longest=None), sort_keys=True)
    if _ADDRESS.search(text):
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
