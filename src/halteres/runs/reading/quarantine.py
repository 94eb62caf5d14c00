"""The tasks that a run's environment does not draw any more, as it wrote them down:
quarantine.jsonl, one line for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres.observe.metrics import decoded, read_lines
from halteres.runs.directory import QUARANTINE, RunDirectory
from halteres.runs.reading.rollouts import Failure


class QuarantinedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of which a group failed."""

    step: int = 0  # the optimiser step that the group was for
    code: str = ""  # of the failure that decided it
    item: Any = None  # the task, as JSON
    failures: list[Failure] = []  # the last of the group
    tasks_drawn: int = 0  # different ones by then, itself among them

    @property
    def why(self) -> str:
        """The failure that decided it, in words."""
        if self.failures:
            return self.failures[-1].why
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """All of a run's; there is at least one."""

    codes: Mapping[str, int]  # how many tasks by the code of their failure
    last: QuarantinedTask

    @property
    def num_tasks(self) -> int:
        """How many there are."""
        return sum(self.codes.values())

    @property
    def num_drawn(self) -> int:
        """How many different tasks had been drawn when the last of them was quarantined."""
        return max(self.num_tasks, self.last.tasks_drawn)

    def __str__(self) -> str:
        codes = ", ".join(f"{count} {code}" for code, count in self.codes.items())
        return (
            f"{self.num_tasks} of {self.num_drawn} tasks are quarantined, none of their groups "
            f"could be made whole ({codes}); {QUARANTINE} in the run's folder lists them"
        )


_decoder = msgspec.json.Decoder(QuarantinedTask)


def read_quarantine(run: RunDirectory) -> Quarantined | None:
    """The quarantined tasks of a run; None: there are none."""
    lines = read_lines(run.path / QUARANTINE)
    tasks = [task for line in lines if (task := decoded(_decoder, line)) is not None]
    if not tasks:
        return None
    codes = Counter(task.code for task in tasks)
    return Quarantined(codes=dict(codes.most_common()), last=tasks[-1])
