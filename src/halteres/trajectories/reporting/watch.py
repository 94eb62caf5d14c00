"""A trainer that gets nothing although enough waits: said once per cause in the log.

Owns: since when questions have gone unanswered.
Never: changes anything, repeats itself.
"""

from __future__ import annotations

import logging

from halteres.trajectories.reporting.diagnostics import reasons
from halteres.trajectories.state import State

PATIENCE_S = 30.0
"""How long a trainer asks in vain, with a whole batch of sequences queued, before the log says why."""

_log = logging.getLogger(__name__)


class Watch:
    """Notes every answer to a question for a batch."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said: set[str] = set()

    def answered(self, state: State, *, empty: bool) -> None:
        """A question was answered, with a batch or without."""
        if not empty or state.queue.num_sequences < state.run.batch_size:
            self._since = None
            self._said.clear()
            return
        now = state.clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= PATIENCE_S:
            self._say(state)

    def _say(self, state: State) -> None:
        reason = next(reasons(state), None)
        if reason is not None and reason["code"] not in self._said:
            self._said.add(reason["code"])
            _log.warning("No batch for %.0f s: %s", PATIENCE_S, reason["sentence"])
