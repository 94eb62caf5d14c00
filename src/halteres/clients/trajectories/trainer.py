"""A trainer's client of the trajectory server: plain calls, no event loop.

Owns: waiting for a batch, its translation to `types.Batch`, and naming the last batch held when it asks for the next.
Never: trains; imports torch or an asynchronous HTTP library.

    client = TrainerClient(url)
    client.register(TrainerRegistration(batch_size=128, max_token_len=256, num_steps=40, run_id="r1", max_staleness=0))
    batch = client.batch(policy_version=0, deadline_s=600)
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from halteres.clients.trajectories.calls import JSON, POLL_S, REPLY_S, Patience, checked, encode, unreachable
from halteres.errors import InvalidData, NotReady
from halteres.types import Batch, Group

HOLD_S = 1.0
"""How long one question for a batch asks the server to hold its reply; a stop is noticed as late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRegistration:
    """POST /register: what a trainer says about its run."""

    batch_size: int  # sequences
    max_token_len: int  # of one sequence
    num_steps: int  # optimiser steps in all
    starting_step: int = 0  # optimiser steps done
    run_id: str | None = None  # the run it goes on with when it registers again; None: named by the strings below
    max_staleness: int | None = None  # policy versions; None: unbounded; 0: environments pause while the trainer works
    checkpoint_dir: str = ""  # told to environments
    save_checkpoint_interval: int = 0  # steps; told to environments
    wandb_group: str = ""
    wandb_project: str = ""


class TrainerClient:
    """A trainer's client: one connection, one caller at a time, any thread.

    Every call is repeated while the server is away, as long as `patience` says.

    Raises:
        NotReady: it stayed away, or knows no trainer.
        InvalidData: it refuses the request.
    """

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self._url, self._patience = url.rstrip("/"), patience or Patience()
        self._connection: http.client.HTTPConnection | None = None
        self._held: int | None = None  # id of the last batch received whole

    def register(self, registration: TrainerRegistration, /) -> int:
        """Register; gives the registration's uuid. Registering again goes on with the same run."""
        self._held = None
        answer = self._call("POST", "/register", asdict(registration))
        return json.loads(answer)["uuid"]  # not msgspec: it has no integers of 128 bits

    def batch(
        self, policy_version: int, /, *, deadline_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> Batch | None:
        """The next batch for this version, as soon as there is one.

        Args:
            policy_version: of the trainer's weights; groups too far from it are set aside by the server.
            deadline_s: how long to wait; a question under way is waited for.
            stopped: asked after every question, answered or not (a server holds it for HOLD_S at most); where it says
                yes, the answer is None.

        Raises:
            NotReady: no batch came in time; the sentence says why, as the server sees it.
        """
        ends = time.monotonic() + deadline_s
        while not stopped():
            asked = time.monotonic()
            try:
                reply = self._ask(policy_version, max(0.0, min(HOLD_S, ends - asked)), ends, stopped)
            except NotReady:
                if stopped():
                    break
                raise
            if reply.batch:
                self._held = reply.batch_id
                return Batch(groups=tuple(element.as_group() for element in reply.batch))
            now = time.monotonic()
            if now >= ends:
                raise self._no_batch(deadline_s)
            time.sleep(max(0.0, min(asked + POLL_S, ends) - now))  # no pause where the server held its reply
        return None

    def diagnostics(self) -> dict[str, Any]:
        """GET /v1/diagnostics: why there is no batch, who sent what."""
        return json.loads(self._call("GET", "/v1/diagnostics"))

    def reset(self) -> None:
        """GET /reset_data: forget the run on the server; its groups are archived."""
        self._held = None
        self._call("GET", "/reset_data")

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, policy_version: int, hold_s: float, ends: float, stopped: Callable[[], bool]) -> _BatchReply:
        after = "" if self._held is None else f"&after={self._held}"
        path = f"/batch?policy_version={policy_version}{after}&wait={hold_s:.3f}"
        reply = _batch_reply.decode(
            self._call("GET", path, over=lambda: stopped() or time.monotonic() >= ends),
        )
        if reply.status == "error":
            raise NotReady("The trajectory server knows no trainer.", reply.message, "Register first.")
        return reply

    def _no_batch(self, deadline_s: float) -> NotReady:
        try:
            why = " ".join(reason["sentence"] for reason in self.diagnostics()["reasons"])
        except InvalidData:  # the original server has no diagnostics
            why = ""
        return NotReady(f"No batch came within {deadline_s:g} s.", why, "Does the environment's log show groups?")

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> bytes:
        data = None if body is None else encode(body)
        pauses = self._patience.pauses()
        while True:
            try:
                return checked(*self._once(method, path, data), path)
            except NotReady:
                pause = None if over() else next(pauses, None)
                if pause is None:
                    raise
            time.sleep(pause)

    def _once(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        if self._connection is None:
            address = urlsplit(self._url)
            kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(address.hostname or "127.0.0.1", address.port, timeout=REPLY_S)
        try:
            self._connection.request(method, path, data, JSON)
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise unreachable(self._url, error) from error


class _Element(msgspec.Struct):
    """A group of a batch, as far as our trainer reads it."""

    tokens: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    inference_logprobs: tuple[tuple[float, ...], ...] | None = None
    overrides: tuple[dict[str, Any], ...] | None = None
    policy_version: int | tuple[tuple[int, int], ...] | None = None

    def as_group(self) -> Group:
        version = self.policy_version
        return Group(
            tokens=self.tokens,
            masks=self.masks,
            scores=self.scores,
            logprobs=self.inference_logprobs or (),
            versions=((version, version),) * len(self.tokens) if isinstance(version, int) else version or (),
            overrides=self.overrides or (),
        )


class _BatchReply(msgspec.Struct):
    batch: tuple[_Element, ...] | None
    batch_id: int | None = None
    status: str = ""
    message: str = ""


_batch_reply = msgspec.json.Decoder(_BatchReply)
