"""The tasks, in the order in which they are set."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.agent.task import Task
from benchmarks.agent.tasks import choose, hacking, recover, repair, train

_ALL: tuple[Task, ...] = (train, repair, choose, hacking, recover)
TASKS: Mapping[str, Task] = {task.NAME: task for task in _ALL}
