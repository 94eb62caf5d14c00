"""Diagnosis of a run that has not failed: rows through the rules, notices of its roles, stalls,
refused calls.

Owns: that what lasts is reported once. (The rules of rows, each with its thresholds and what to do,
are in `rules` and `pace`.)
Never: writes (the supervisor does), changes a run, reads a metric's history from anywhere but the
rows it is given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, Self

from halteres.errors import shortened
from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.process import is_stopped
from halteres.runs.diagnosis.rules import RULES, no_variance
from halteres.runs.diagnosis.run_facts import CEILING, Debounce, Finding, History, RunFacts, number
from halteres.runs.reading.alerts import REFUSED, STALLED, Alert

OVERDUE_STEPS, LEAST_S = 10, 60.0
"""A step is overdue after so many times the median of the last ones, and after a minute at least:
an evaluation on the same engine makes steps three times as long.
"""

FIRST_STEP_S = 600.0
"""How long the first step may take once every role is ready: large models compile and warm up in
it.
"""

LASTING_S, LEAST_CALLS = 15.0, 3
"""So long nothing was answered, and so many calls were refused: one that is refused now and then is
no trouble.
"""


class Diagnosis:
    """Takes in what the roles write, and says what is wrong."""

    def __init__(self, run: RunFacts) -> None:
        self._run, self._history = run, History()
        self._rules = tuple((rule, Debounce(rule.steps, rule.calm)) for rule in RULES)
        self._step = 0
        self._refused_calls = RefusedCalls(run)
        self.has_trained = False  # a step of this run is done
        # rules whose alert the last row has shown to be over
        self.cleared: tuple[str, ...] = ()
        self.stalls = StallDetector(run)

    def remember(self, rows: Iterable[Row]) -> None:
        """Rows of the run that this one goes on from: they count, and nothing is said of them."""
        for row in rows:
            self.observe(row)
        self.has_trained = False

    def observe(self, row: Row) -> list[Alert]:
        """One row of metrics.jsonl, in the order of writing."""
        step = row.get("step")
        self.cleared = ()
        if not isinstance(step, int):
            return []
        self._history.see(row)
        if "reward/mean" in row:
            self._step, self.has_trained = step, True
            self.stalls.step(row)
        found = [
            (rule.name, debounce.found(rule.look(self._run, self._history, row)))
            for rule, debounce in self._rules
        ]
        self.cleared = tuple(rule.name for rule, debounce in self._rules if debounce.ended)
        return [_alert(name, step, finding) for name, finding in found if finding]

    def notice(self, event: Mapping[str, Any], *, resumable: bool) -> Alert:
        """What a role has noticed that no row shows: {rule, step, evidence}, perhaps a remedy in
        words; of groups without variance also percent_correct.
        """
        rule, step = str(event.get("rule")), event.get("step")
        remedy, words = self._remedy(rule, event, resumable), str(event.get("remedy") or "")
        return Alert(
            rule=rule,
            step=step if isinstance(step, int) else self._step,
            evidence=str(event.get("evidence") or ""),
            remedy=replace(remedy, words=" ".join(text for text in (remedy.words, words) if text)),
        )

    def _remedy(self, rule: str, event: Mapping[str, Any], resumable: bool) -> Remedy:
        run = self._run
        if rule == no_variance.name:
            # Groups of equal scores that the environment drops are in no batch: its own share
            # correct tells why.
            share = number(dict(event), "percent_correct")
            if share is not None and share >= CEILING:
                return Remedy((run.stop(), run.results()))
            # before the first batch there are no rollouts to read
            if self._step == 0:
                return Remedy(run.go_on_with(run.larger_groups()))
            if share == 0.0:
                return run.unscored()
            return run.silent()
        if rule == "temperature":
            return Remedy(run.go_on_with({"env.temperature": 1.0}))
        if rule == "own_advantages":
            return Remedy(run.go_on_with({"trainer.advantage": "environment"}))
        # the trainer ends itself; what it had learnt is in its last checkpoint
        if rule == "nan_loss":
            return Remedy(
                (run.resume(run.rate_times()) if resumable else run.begin_anew(run.rate_times()),)
            )
        return Remedy((run.logs("env"),))

    def look(self, processes: Mapping[str, Mapping[str, Any]], *, training: bool) -> Alert | None:
        """With every heartbeat: does anything still happen? `training`: steps are to be
        expected.
        """
        finding = self.stalls.look(processes, training=training)
        if finding:
            return _alert(STALLED, self._step, finding)
        return None

    def hang(self, silent_s: float, where: str) -> Alert:
        """The environment's event loop hung, and the environment is being started again."""
        evidence = f"The environment's event loop hung for {silent_s:.0f} s and was killed."
        if where:
            evidence = f"{evidence} It hung in {where}."
        words = "a time limit there, or work off the event loop (a thread, a process), prevents it."
        remedy = Remedy((self._run.logs("env"),), words)
        return Alert(rule="env_stuck", step=self._step, evidence=evidence, remedy=remedy)

    def look_at_calls(self, calls: Calls) -> Alert | None:
        """Before the first step, with every heartbeat: what a server says of the environment's
        calls.
        """
        finding = None
        if not self.has_trained:
            finding = self._refused_calls.look(calls)
        if finding:
            return _alert(REFUSED, self._step, finding)
        return None


def _alert(rule: str, step: int, finding: Finding) -> Alert:
    return Alert(rule=rule, step=step, evidence=finding.evidence, remedy=finding.remedy)


class StallDetector:
    """Finds that nothing happens any more, or that a process is stopped (SIGSTOP); looks with every
    heartbeat.
    """

    def __init__(self, run: RunFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._last = clock()
        self._seconds: deque[float] = deque(maxlen=8)
        # Twice: the first look after our own sleep (SIGSTOP, a closed laptop) comes before the rows
        # of meanwhile.
        self._overdue, self._stopped = Debounce(2, calm=1), Debounce(2, calm=1)

    def begin(self) -> None:
        """From here on steps can come."""
        self._last = self._clock()

    def step(self, row: Row) -> None:
        """A step is done."""
        self._last = self._clock()
        if (seconds := number(row, "time/step")) is not None:
            self._seconds.append(seconds)

    def look(self, processes: Mapping[str, Mapping[str, Any]], *, training: bool) -> Finding | None:
        """What there is to report now."""
        stopped = {
            role: str(facts["pid"])
            for role, facts in processes.items()
            if facts.get("exit") is None and is_stopped(facts)
        }
        if self._stopped.begins(bool(stopped)):
            roles = ", ".join(f"{role} (process {pid})" for role, pid in stopped.items())
            return Finding(
                evidence=f"Stopped by a signal (SIGSTOP), neither running nor ended: {roles}.",
                remedy=Remedy(
                    self._run.go_on_with({}),
                    f"or let it go on: kill -CONT {' '.join(stopped.values())}",
                ),
            )
        passed_s = self._clock() - self._last
        limit_s = FIRST_STEP_S
        if self._seconds:
            limit_s = max(LEAST_S, OVERDUE_STEPS * median(self._seconds))
        if not self._overdue.begins(training and passed_s > limit_s and not stopped):
            return None
        usual = "the first step is awaited"
        if self._seconds:
            usual = f"a step takes {median(self._seconds):.2g} s"
        return Finding(
            evidence=f"No step was done for {passed_s:.0f} s; {usual}.",
            remedy=Remedy(
                (self._run.logs("trainer"), self._run.logs("env"), *self._run.go_on_with({}))
            ),
        )


Server = Literal["inference server", "trajectory server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What one server says of an environment's calls."""

    server: Server
    refused: int  # in a row, up to now
    # HTTP, of the last refusal; 0: the call was answered, and what it brought was set aside
    status: int = 0
    path: str = ""
    why: str = ""  # in the server's words

    @classmethod
    def of_service(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of /halteres/v1/runs/RUN/requests."""
        last = {
            name: value
            for name, value in (answer.get("last_refusal") or {}).items()
            if name != "at"
        }
        return cls(server="inference server", refused=answer.get("refused_in_a_row", 0), **last)

    @classmethod
    def of_trajectories(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of /v1/diagnostics."""
        server: Server = "trajectory server"
        if answer.get("groups_accepted"):
            return cls(server=server, refused=0)
        rejecting = [env for env in answer.get("environments", ()) if env.get("last_rejection")]
        num_rejected = sum(env.get("rejected", 0) for env in rejecting)
        if last := answer.get("last_refusal"):
            return cls(
                server=server, refused=answer.get("requests_refused", 0) + num_rejected, **last
            )
        return cls(
            server=server,
            refused=num_rejected,
            why=rejecting[-1]["last_rejection"] if rejecting else "",
        )


class RefusedCalls:
    """Finds, before the first batch, that nothing which the environment asks of a server is
    answered.
    """

    def __init__(self, run: RunFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._since: dict[Server, float] = {}
        self._reported: set[Server] = set()

    def look(self, calls: Calls) -> Finding | None:
        """With every heartbeat before the first step."""
        if not calls.refused:
            self._since.pop(calls.server, None)
            self._reported.discard(calls.server)
            return None
        lasted_s = self._clock() - self._since.setdefault(calls.server, self._clock())
        if lasted_s < LASTING_S or calls.refused < LEAST_CALLS or calls.server in self._reported:
            return None
        self._reported.add(calls.server)
        why = shortened(calls.why, 200)
        evidence = f"The {calls.server} could use none of {calls.refused} groups: {why}"
        if calls.status:
            where = f"HTTP {calls.status}, {calls.path}"
            evidence = f"The {calls.server} refused {calls.refused} calls in a row ({where}): {why}"
        return Finding(evidence=evidence, remedy=self._remedy(calls.status))

    def _remedy(self, status: int) -> Remedy:
        if status >= 500:
            return Remedy((self._run.logs("service"),), "the server itself failed.")
        words = "first change what these words name: a setting, or what the request asks for."
        if status in (401, 403):
            words = (
                "first see that the key which it sends (openai.api_key) is one of this server's."
            )
        elif status in (404, 405):
            words = (
                "first let it call openai.base_url of its config as it is, with that model_name."
            )
        elif status == 0:
            words = (
                "first see that the groups which the environment makes hold what is asked of them."
            )
        return Remedy((self._run.stop(), self._run.begin_anew({})), words)
