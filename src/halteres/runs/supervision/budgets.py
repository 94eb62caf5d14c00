"""The operator's caps on one run, and what of them is used.

Steps and tokens count over the whole curve: what a resumed run was carried over counts in it, so that resuming renews
no budget. Hours are those of the run itself, from its supervisor's start, by a clock that nobody sets and that stands
still while the machine sleeps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from typing import Literal

from pydantic import ValidationError

from halteres.config.policies import Policy
from halteres.errors import InvalidConfig
from halteres.files import read_regular
from halteres.observe.metrics import Row
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState

FILE = "policy.json"

CODE = "policy_cap"

GRACE_S, MOST_GRACE_S, GRACE_STEPS = 300.0, 3600.0, 3
"""How long the trainer may take to end, with a checkpoint, once a cap was reached; then it is ended. As long as so many
steps, within these limits: the one under way, and what must be written after it."""

Cap = Literal["max_steps", "max_tokens", "max_hours"]


class Budget:
    """What one run may use, and has used."""

    def __init__(self, policy: Policy, state: RunState, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy, self._clock = policy, clock
        self._run_id, self._total_steps, self._began = state.run_id, state.total_steps, clock()
        self._steps = 0
        self._tokens = self._last_tokens = 0.0
        self._seconds = deque[float](maxlen=8)  # of the last steps

    @classmethod
    def of(cls, run: RunDirectory, state: RunState) -> Budget:
        """By the policy that held when the run was started; without one there are no caps.

        Raises:
            InvalidConfig: the file is no policy. A run must not go on because its caps cannot be read.
        """
        try:
            policy = Policy.model_validate_json(read_regular(run.path / FILE))
        except FileNotFoundError:
            policy = Policy()
        except (OSError, ValidationError) as error:
            why = " ".join(str(error).split()).partition(" For further information")[0]
            raise InvalidConfig(f"{run.path / FILE} cannot be read.", f"{why}.", "Start the run again.") from error
        return cls(policy, state)

    def remember(self, rows: Iterable[Row]) -> None:
        """Rows that were carried over."""
        for row in rows:
            self.see(row)

    def see(self, row: Row) -> None:
        """One row of metrics.jsonl; a trainer's counts."""
        step, tokens, seconds = row.get("step"), row.get("tokens/action"), row.get("time/step")
        if row.get("src") != "trainer" or not isinstance(step, int):
            return
        self._steps = max(self._steps, step)
        if isinstance(tokens, int | float):
            self._last_tokens = float(tokens)
            self._tokens += self._last_tokens
        if isinstance(seconds, int | float):
            self._seconds.append(float(seconds))

    @property
    def grace_s(self) -> float:
        """How long the trainer may take to end at a cap, by how long its last steps took."""
        step_s = median(self._seconds) if self._seconds else 0.0
        return max(GRACE_S, min(MOST_GRACE_S, GRACE_STEPS * step_s))

    def used_up(self) -> Cap | None:
        """The first cap that leaves no room for a step after the one under way."""
        caps = self._policy.caps
        if caps.max_steps is not None and self._total_steps > caps.max_steps <= self._steps + 1:
            return "max_steps"
        if caps.max_tokens is not None and self._steps and self._tokens + self._last_tokens >= caps.max_tokens:
            return "max_tokens"
        if caps.max_hours is not None and self._hours >= caps.max_hours:
            return "max_hours"
        return None

    def note(self, cap: Cap, kept: int | None) -> str:
        """Why a run that was ended for this cap has ended, what of it is kept (the step of its newest checkpoint), and
        what can be done."""
        learnt = "No checkpoint was written: nothing that it learnt is kept."
        if kept is not None:
            learnt = f'What was learnt up to step {kept} is kept: rl_get_results("{self._run_id}").'
        return f"{self.why(cap)} {learnt} The operator can raise caps.{cap} in policy.yaml."

    def why(self, cap: Cap) -> str:
        """What of this cap is used."""
        used = {"max_steps": self._steps, "max_tokens": self._tokens, "max_hours": self._hours}[cap]
        limit, unit = getattr(self._policy.caps, cap), cap.removeprefix("max_")
        return (
            f"Ended by the operator's policy '{self._policy.name}': {cap} is {limit:,g}; {used:,.4g} {unit} are used."
        )

    @property
    def _hours(self) -> float:
        return (self._clock() - self._began) / 3600
