"""A trainer's client of the trajectory server: plain calls, no event loop.

    client = TrainerClient(url)
    client.register(TrainerRegistration(batch_size=128, max_token_len=256, num_steps=40,
    run_id="r1", max_staleness=0)) batch = client.batch(0, deadline_s=600)

A question names the batch that its asker holds, or 0, and so acknowledges it: whoever lost a reply
asks again and gets the same batch. That takes no clock and no further request, and is what our own
trainer does. Leases are for a trainer that works on several batches at a time, or wants one back in
the queue when it dies before it has learnt from it, and for several trainers on one queue:

    batch = client.batch(0, deadline_s=600, lease_s=60)
    client.extend(client.leased.id, 60)      # before it expires, while the work goes on
    client.acknowledge(client.leased.id)     # or nack: another trainer gets it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import msgspec

from halteres.clients.retries import Retries
from halteres.clients.trajectories.calls import (
    EVERYWHERE,
    POLL_S,
    RETRIES,
    LeaseLost,
    PlainClient,
    Refusals,
)
from halteres.errors import InvalidData, NotFound, NotReady
from halteres.types import Batch, Group, Span

# how long one question for a batch asks the server to hold its reply; a stop is noticed as late
HOLD_S = 1.0


class Element(msgspec.Struct):
    """A group of a batch, as far as our trainer reads it."""

    tokens: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    inference_logprobs: tuple[tuple[float, ...], ...] | None = None
    overrides: tuple[dict[str, Any], ...] | None = None
    policy_version: int | tuple[tuple[int, int], ...] | None = None
    episodes: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int, int, float], ...] | None = None
    advantages: tuple[tuple[float, ...], ...] | None = None
    ref_logprobs: tuple[tuple[float, ...], ...] | None = None
    env_id: int | None = None
    generation_params: dict[str, Any] | None = None

    def as_group(self) -> Group:
        """The group, with a span of versions per sequence, or none."""
        version = self.policy_version
        return Group(
            tokens=self.tokens,
            masks=self.masks,
            scores=self.scores,
            logprobs=self.inference_logprobs or (),
            versions=((version, version),) * len(self.tokens)
            if isinstance(version, int)
            else version or (),
            overrides=self.overrides or (),
            episodes=self.episodes or (),
            spans=tuple(
                Span(sequence=sequence, start=start, stop=stop, reward=reward)
                for sequence, start, stop, reward in self.spans or ()
            ),
            advantages=self._aligned(self.advantages),
            ref_logprobs=self._aligned(self.ref_logprobs),
            env_id=self.env_id,
            is_truncated=any(
                (self.generation_params or {}).get(name) not in off
                for name, off in _UNTRUNCATED.items()
            ),
        )

    def _aligned(self, rows: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...]:
        """Numbers per token; none where they do not fit the tokens, as the server lets them."""
        fits = rows is not None and [*map(len, rows)] == [*map(len, self.tokens)]
        return rows if rows is not None and fits else ()


_UNTRUNCATED = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
"""Sampling parameters that leave out no token that the model might have said."""


class BatchReply(msgspec.Struct):
    """GET /batch."""

    batch: tuple[Element, ...] | None
    batch_id: int | None = None
    lease_expires: float | None = None  # unix s, where it was leased
    run_id: str | None = None  # these two: as in `types.Batch`
    num_stale: int | None = None
    status: str = ""
    message: str = ""


decoder = msgspec.json.Decoder(BatchReply)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRegistration:
    """POST /register: what a trainer says about its run."""

    batch_size: int  # sequences
    max_token_len: int  # of one sequence
    num_steps: int  # optimiser steps in all
    starting_step: int = 0  # optimiser steps done
    # the run it goes on with when it registers again; None: named by the strings below
    run_id: str | None = None
    # policy versions; None: unbounded; 0: environments pause while the trainer works
    max_staleness: int | None = None
    updates_per_batch: int = 1  # policy versions that one batch may make
    checkpoint_dir: str = ""  # told to environments
    save_checkpoint_interval: int = 0  # steps; told to environments
    wandb_group: str = ""
    wandb_project: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A batch that is ours until we settle it, or until it expires."""

    id: int  # of the batch
    expires_at: float  # unix s, by the server's clock


class TrainerClient(PlainClient):
    """A trainer's client: one connection, one caller at a time, any thread.

    Every call is repeated while the server is away, as long as `retries` say.

    Raises:
        NotReady: it stayed away, or knows no trainer.
        InvalidData: it refuses the request.
    """

    refusals: ClassVar[Refusals] = {**EVERYWHERE, 404: NotFound, 409: LeaseLost}

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        super().__init__(url, retries)
        self._held = 0  # id of the last batch received whole without a lease; 0: none
        self._leased: Lease | None = None

    @property
    def leased(self) -> Lease:
        """The lease of the batch that came last. NotFound where none was asked for."""
        if self._leased is None:
            raise NotFound("No batch is leased.", "Only `batch(..., lease_s=...)` leases one.")
        return self._leased

    def register(self, registration: TrainerRegistration, /) -> int:
        """Register; gives the registration's uuid. Registering again goes on with the same run."""
        self._held, self._leased = 0, None
        answer = self.ask("POST", "/register", asdict(registration))
        return json.loads(answer)["uuid"]  # not msgspec: it has no integers of 128 bits

    def batch(
        self,
        policy_version: int,
        /,
        *,
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
        lease_s: float | None = None,
    ) -> Batch | None:
        """The next batch for this version, as soon as there is one.

        Args:
            policy_version: of the trainer's weights; groups too far from it are set aside by the
                server.
            deadline_s: how long to wait; a question under way is waited for.
            stopped: asked after every question, answered or not (a server holds it for HOLD_S at
                most); where it says yes, the answer is None.
            lease_s: how long the batch stays ours without a word; `leased` then has its id. None:
                the next question settles it.

        Raises:
            NotReady: no batch came in time; the sentence says why, as the server sees it.
        """
        ends = time.monotonic() + deadline_s
        while not stopped():
            began = time.monotonic()
            lease = "" if lease_s is None else f"&lease={lease_s:.3f}"
            path = f"/batch?policy_version={policy_version}&after={self._held}{lease}"
            path += f"&wait={max(0.0, min(HOLD_S, ends - began)):.3f}"
            try:
                answer = self.ask(
                    "GET", path, is_over=lambda: stopped() or time.monotonic() >= ends
                )
            except NotReady:
                if stopped():
                    break
                raise
            if (batch := self._read(answer)) is not None:
                return batch
            now = time.monotonic()
            if now >= ends:
                raise self._no_batch(deadline_s)
            # no pause where the server held its reply
            time.sleep(max(0.0, min(began + POLL_S, ends) - now))
        return None

    def acknowledge(self, batch_id: int) -> None:
        """A leased batch was learnt from: it counts as a step. Again is harmless.

        Raises:
            LeaseLost: it expired and was leased again meanwhile. NotFound: there is no such batch.
        """
        self._settle(batch_id, "ack")

    def nack(self, batch_id: int) -> None:
        """Give a leased batch back: it answers the next question, unchanged. Raises as
        `acknowledge`.
        """
        self._settle(batch_id, "nack")

    def extend(self, batch_id: int, lease_s: float) -> None:
        """Let a lease end in `lease_s` seconds from now. Raises as `acknowledge`."""
        self._settle(batch_id, f"extend?lease={lease_s:.3f}")

    def diagnostics(self) -> dict[str, Any]:
        """GET /v1/diagnostics: why there is no batch, who sent what."""
        return json.loads(self.ask("GET", "/v1/diagnostics"))

    def reset(self) -> None:
        """GET /reset_data: forget the run on the server; its groups are archived."""
        self._held, self._leased = 0, None
        self.ask("GET", "/reset_data")

    def _read(self, answer: bytes) -> Batch | None:
        reply = decoder.decode(answer)
        if reply.status == "error":
            raise NotReady(
                "The trajectory server knows no trainer.", reply.message, "Register first."
            )
        if reply.batch and (reply.lease_expires is None or reply.batch_id is None):
            self._held = reply.batch_id or 0  # the original server names none
        elif reply.batch and reply.lease_expires is not None and reply.batch_id is not None:
            self._leased = Lease(id=reply.batch_id, expires_at=reply.lease_expires)
        if not reply.batch:
            return None
        groups = tuple(element.as_group() for element in reply.batch)
        return Batch(groups=groups, run_id=reply.run_id, num_stale=reply.num_stale)

    def _settle(self, batch_id: int, how: str) -> None:
        self.ask("POST", f"/v1/batches/{batch_id}/{how}", {})

    def _no_batch(self, deadline_s: float) -> NotReady:
        try:
            found = self.diagnostics()
            why = found.get("why") or " ".join(reason["sentence"] for reason in found["reasons"])
        except (InvalidData, NotFound):  # the original server has no diagnostics
            why = ""
        return NotReady(
            f"No batch came within {deadline_s:g} s.",
            why,
            "Does the environment's log show groups?",
        )
