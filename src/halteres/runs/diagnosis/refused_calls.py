"""The rule of refused calls: before the first batch, everything that the environment asks is refused.

Owns: reading what the training service and the trajectory server say of refusals, from when on they are an alert, the
remedy for each kind.
Never: asks a server (the supervisor does); speaks once a step is done: `pulse` watches what comes later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from halteres.errors import shortened
from halteres.next_step import Remedy
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import Finding

Server = Literal["inference server", "trajectory server"]

RULE = "calls_refused"

LASTING_S, LEAST = 15.0, 3
"""So long nothing was answered, and so many calls were refused: one that is refused now and then is no trouble."""

WORDS = 200
"""Characters of the refusal's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What one server says of an environment's calls."""

    server: Server
    refused: int  # in a row, up to now
    status: int = 0  # HTTP, of the last refusal; 0: the call was answered, and what it brought was set aside
    path: str = ""
    why: str = ""  # in the server's words

    @classmethod
    def of_service(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of /halteres/v1/runs/RUN/requests."""
        last = answer.get("last_refusal") or {}
        return cls(server="inference server", refused=answer.get("refused_in_a_row", 0), **_words(last))

    @classmethod
    def of_trajectories(cls, answer: Mapping[str, Any]) -> Self:
        """From the answer of /v1/diagnostics."""
        server: Server = "trajectory server"
        if answer.get("groups_accepted"):
            return cls(server=server, refused=0)
        rejected = [env for env in answer.get("environments", ()) if env.get("last_rejection")]
        set_aside = sum(env.get("rejected", 0) for env in rejected)
        if last := answer.get("last_refusal"):
            return cls(server=server, refused=answer.get("requests_refused", 0) + set_aside, **_words(last))
        return cls(server=server, refused=set_aside, why=rejected[-1]["last_rejection"] if rejected else "")


class RefusedCalls:
    """Nothing that the environment asks of a server is answered, and no batch was trained on yet."""

    def __init__(self, case: Case, clock: Callable[[], float] = time.monotonic) -> None:
        self._case, self._clock = case, clock
        self._since: dict[Server, float] = {}
        self._alerted: set[Server] = set()

    def look(self, calls: Calls) -> Finding | None:
        """With every heartbeat before the first step."""
        if not calls.refused:
            self._since.pop(calls.server, None)
            self._alerted.discard(calls.server)
            return None
        lasted_s = self._clock() - self._since.setdefault(calls.server, self._clock())
        if lasted_s < LASTING_S or calls.refused < LEAST or calls.server in self._alerted:
            return None
        self._alerted.add(calls.server)
        return Finding(evidence=_evidence(calls), remedy=self._remedy(calls))

    def _remedy(self, calls: Calls) -> Remedy:
        match calls:
            case Calls(status=status) if status >= 500:
                return Remedy((self._case.logs("service"),), "the server itself failed.")
            case Calls(status=401 | 403):
                words = "first see that the key which it sends (openai.api_key) is one of this server's."
            case Calls(status=404 | 405):
                words = "first let it call openai.base_url of its config as it is, with that model_name."
            case Calls(status=0):
                words = "first see that the groups which the environment makes hold what is asked of them."
            case _:
                words = "first change what these words name: a setting, or what the request asks for."
        return Remedy((self._case.stop(), self._case.begin_anew({})), words)


def _evidence(calls: Calls) -> str:
    why = shortened(calls.why, WORDS)
    if not calls.status:
        return f"The {calls.server} could use none of {calls.refused} groups: {why}"
    return f"The {calls.server} refused {calls.refused} calls in a row (HTTP {calls.status}, {calls.path}): {why}"


def _words(last: Mapping[str, Any]) -> dict[str, Any]:
    return {"status": last.get("status", 0), "path": last.get("path", ""), "why": last.get("why", "")}
