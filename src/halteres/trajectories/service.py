"""The trajectory server without its wire: what each route asks for, and how long a question waits.

All decisions happen on the event loop, one at a time; the disk belongs to the store's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from halteres.errors import HalteresError, NotReady, shortened
from halteres.trajectories import batches, diagnostics
from halteres.trajectories.group_commit import GroupCommit
from halteres.trajectories.ingest import Verdict, accept_all, content_of, keyed
from halteres.trajectories.options import Rules
from halteres.trajectories.posted_group import LARGEST_ENV_ID, Scored, held_to_conventions
from halteres.trajectories.records import Delivery, EnvRecord
from halteres.trajectories.schema import (
    BatchQuery,
    EnvRegistration,
    EnvStatus,
    Registration,
    Status,
)
from halteres.trajectories.state import Clock, State
from halteres.trajectories.stores.store import Store, StoreFailed

REPEAT_S = 0.005  # pause before a decision about a batch is repeated, whatever happens meanwhile
# how often a held request looks where nothing changed but the time: patience and heartbeats run out
LOOK_S = 0.25
# How long the poll of a paused environment with a minimum share is held: its client starts work
# whatever we answer, and waits 5 minutes for an answer.
PAUSE_HOLD_S = 30.0
SEEN_EVERY_S = 5.0  # how often an environment whose poll is held counts as heard of
# for a post while the queue is full; the clients wait 5 minutes, and drop what is refused
FULL_HOLD_S = 30.0
# pause before a batch that was written is counted once more, where the store failed
RECOUNT_S = 0.2
COUNTING_S = 5.0  # how long a question about the step waits for batches that are being handed over
LONGEST_REFUSAL = 600  # characters
Gone = Callable[[], Awaitable[bool]]  # whether the client has hung up


class EnvironmentUnknown(HalteresError):
    """An environment of ours uses an id that this server never gave; it should register again."""

    code, status = "environment_unknown", 410


class QueueFull(NotReady):
    """Nothing more can be kept until the trainer takes some."""

    code, retry_after_s = "queue_full", 5


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch on its way, with the JSON elements of its groups."""

    delivery: Delivery
    step: int  # the run's, once it is delivered
    elements: list[bytes]


class TrajectoryService:
    """What the routes call. Everything raises StoreFailed where the store takes or gives
    nothing.
    """

    def __init__(self, store: Store, clock: Clock, rules: Rules | None = None) -> None:
        self.store, self._rules = store, rules or Rules()
        self.decisions = GroupCommit(
            store, lambda found: State(found, clock, self._rules, shared=store.is_shared)
        )
        # of batches that are written and not counted yet
        self._counting: set[asyncio.Future[None]] = set()
        self._no_batch_warning = diagnostics.NoBatchWarning()
        self.num_refused = 0  # posts of environments, since one registered
        self.last_refusal: dict[str, Any] | None = None  # path, status, why
        # nobody else writes replies: those of the server before this one reached nobody
        if not store.is_shared:
            self.decisions.leave(batches.take_back_offers)

    @property
    def state(self) -> State:
        """What is known now."""
        return self.decisions.state

    async def registration(self) -> Registration | None:
        """The trainer's; where none is known here, it may have registered at another server on the
        queue.
        """
        if self.state.run.registration is None and self.store.is_shared:
            await self.decisions.submit(lambda state: None)
        return self.state.run.registration

    async def batch(self, query: BatchQuery, gone: Gone) -> Batch | None:
        """GET /batch of a registered run; None if there is none within `query.wait`, or another run
        was registered.

        Whoever passes it on calls `count` or `give_back`.
        """
        run, deadline = _run_key(self.state), self._now() + query.wait

        def decide(state: State) -> Delivery | None:
            return batches.next_batch(state, query) if run == _run_key(state) else None

        while not await gone():
            made = await self.decisions.submit(decide)
            self._no_batch_warning.answered(self.state, empty=made is None)
            if made is None and not await self._hold(run, deadline, gone):
                return None
            if made is not None and (batch := await self._read(made)) is not None:
                return batch
        return None

    async def _hold(self, run: object, deadline: float, gone: Gone) -> bool:
        """Wait until a batch may be had. False: the time is up, the run is over, or nobody waits
        for the answer.
        """
        while (
            self._now() < deadline and not self.decisions.is_ending and run == _run_key(self.state)
        ):
            if await gone():
                return False
            changed, now = self.decisions.changed, self.state.clock()
            has_expired = any(
                each.expires_at and each.expires_at <= now for each in self.state.out.values()
            )
            if batches.is_ready(self.state) or has_expired:
                await asyncio.sleep(min(REPEAT_S, max(0.0, deadline - self._now())))
                return True
            await self._wait_until(min(deadline, self._now() + LOOK_S), changed)
        return False

    async def _read(self, made: Delivery) -> Batch | None:
        """The batch with its tokens. Groups whose tokens are lost are set aside: the others queue
        again, and None.
        """
        # The run's step once this batch is delivered, if those that are out before it are, too.
        step = made.step or self.state.run.step + sum(
            batch_id <= made.id for batch_id in self.state.out
        )
        try:
            found = await asyncio.to_thread(self.store.bodies, made.groups)
        except BaseException:
            self.give_back(made)
            raise
        if len(found) == len(made.groups):
            return Batch(made, step, list(found.values()))
        lost = set(made.groups) - set(found)
        await self.decisions.submit(lambda state: batches.lose_tokens(state, made.id, lost))
        return None

    async def is_out(self, batch: Delivery) -> bool:
        """Whether nobody else has the batch; on a shared store another server may have handed it
        out since.
        """

        def look(state: State) -> bool:
            return batch.id in state.out or state.run.last == batch

        return await self.decisions.submit(look) if self.store.is_shared else look(self.state)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Until it ends, questions about the step wait: a batch is written that is not counted
        yet.
        """
        counting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counting.add(counting)
        try:
            yield
        finally:
            self._counting.discard(counting)
            counting.set_result(None)

    async def count(self, batch: Delivery) -> None:
        """The reply was written whole to a live connection; a lease still wants its
        acknowledgement.

        Raises:
            StoreFailed: for longer than an offer lasts.
        """
        ends = self._now() + batches.OFFER_S
        while True:
            try:
                return await self.decisions.submit(
                    lambda state: batches.count_delivered(state, batch.id)
                )
            except StoreFailed:  # the trainer has it: uncounted, it would be served again
                if self._now() > ends or self.decisions.has_ended:
                    raise
            await asyncio.sleep(RECOUNT_S)

    def give_back(self, batch: Delivery) -> None:
        """The batch reached nobody: it answers the next question."""
        self.decisions.leave(lambda state: batches.give_back(state, batch.id))

    async def register_env(self, registration: EnvRegistration) -> EnvRecord | None:
        """POST /register-env: None until a trainer has asked for a batch."""

        def decide(state: State) -> EnvRecord | None:
            if not state.run.started:
                return None
            return state.save_env(state.envs.new_record(registration)).record

        registered = await self.decisions.submit(decide)
        self.num_refused, self.last_refusal = 0, None
        return registered

    async def disconnect_env(self, env_id: int) -> bool:
        """POST /disconnect-env: False if there is no such environment."""

        def decide(state: State) -> bool:
            env = state.envs.get(env_id)
            if env is not None:
                state.save_env(replace(env.record, connected=False))
            return env is not None

        return await self.decisions.submit(decide)

    async def accept(self, groups: Sequence[Scored], *, ours: bool = False) -> list[Verdict]:
        """POST /scored_data, /scored_data_list: when it returns, the groups survive the death of
        the process.

        `ours`: the client understands that it should register again.

        Raises:
            EnvironmentUnknown, KeyReused, QueueFull; Unprocessable in strict mode. Nothing was
            taken.
        """
        if ours:
            self._check_known(group.env_id for group in groups)
        await self._room_for(groups)
        if self._rules.validation == "strict":
            registration = self.state.run.registration
            longest = registration.max_token_len if registration else 0
            groups = await asyncio.to_thread(
                lambda: [held_to_conventions(group, longest) for group in groups]
            )
        if self._rules.same_content_s:
            contents = await asyncio.to_thread(lambda: [content_of(group) for group in groups])
            return await self.decisions.submit(
                lambda state: accept_all(state, keyed(state, groups, contents))
            )
        return await self.decisions.submit(lambda state: accept_all(state, groups))

    async def status_env(
        self, env_id: int, *, ours: bool = False, asked_for: int | None = None
    ) -> EnvStatus:
        """GET /status-env; an unknown id is adopted, or EnvironmentUnknown if it is `ours`; an
        impossible one pauses.

        `asked_for`: the answer has the policy version with which the trainer asked for the batch
        after so many.
        """
        if ours:
            self._check_known([env_id])
        if not 0 <= env_id < LARGEST_ENV_ID:
            return diagnostics.idle(self.state)
        if self.state.is_seen_lately(env_id):  # before any wait: it may have said goodbye by then
            self.state.note_seen(env_id)
        else:
            await self.decisions.submit(lambda state: state.note_seen(env_id))
        await self._settled()
        deadline = self._now() + PAUSE_HOLD_S
        # an answer that says "pause" to a client that would not listen comes late instead
        while True:
            changed, env = self.decisions.changed, self.state.envs.by_id[env_id]
            answer = diagnostics.status_env(self.state, env)
            if not env.min_share or not diagnostics.is_paused(self.state):
                break
            has_changed = await self._wait_until(min(deadline, self._now() + SEEN_EVERY_S), changed)
            if self.decisions.is_ending or (not has_changed and self._now() >= deadline):
                break
            if self.state.is_seen_lately(env_id):  # it may have said goodbye
                self.state.note_seen(env_id)
        if (
            asked_for is not None
            and (version := batches.version_at_request(self.state, asked_for)) is not None
        ):
            answer.asked_version = version
        return answer

    async def status(self) -> Status:
        """GET /status."""
        await self._settled()
        return diagnostics.status(self.state)

    def diagnose(self) -> dict[str, Any]:
        """GET /v1/diagnostics."""
        refused = {"requests_refused": self.num_refused, "last_refusal": self.last_refusal}
        return {**diagnostics.report(self.state), **refused}

    def note_refusal(self, path: str, status: int, why: str) -> None:
        """A posted request was refused, for good."""
        self.num_refused += 1
        self.last_refusal = {"path": path, "status": status, "why": shortened(why, LONGEST_REFUSAL)}

    async def _settled(self) -> None:
        """Wait until every batch that was written is counted."""
        if self._counting:
            await asyncio.wait(self._counting, timeout=COUNTING_S)

    async def _room_for(self, groups: Sequence[Scored]) -> None:
        """Wait until what is new of the groups fits onto the disk and into the queue; an empty one
        takes anything.
        """
        deadline, most = self._now() + FULL_HOLD_S, self._rules.max_queue_bytes
        while True:
            state = self.state
            num_bytes = sum(
                len(group.element) for group in groups if state.known(group.key) is None
            )
            if not num_bytes or not (self.store.is_full or 0 < state.num_bytes > most - num_bytes):
                return
            if await self._wait_until(deadline, self.decisions.changed):
                continue
            if self.store.is_full:
                why = "The disk of the trajectory database is full; batches can still be taken."
                next = "Make room on the disk; the request can be sent again."
                raise StoreFailed("The group was not stored.", why, next)
            why = f"{state.num_bytes} bytes wait for a trainer; --max-queue-bytes is {most}."
            next = "Send it again later; GET /v1/diagnostics says why no batch is taken."
            raise QueueFull("The queue is full.", why, next)

    def _check_known(self, env_ids: Iterable[int | None]) -> None:
        for env_id in env_ids:
            if env_id is not None and env_id not in self.state.envs.by_id:
                what, why = (
                    f"This server knows no environment {env_id}.",
                    "Another server, or database, gave that id.",
                )
                raise EnvironmentUnknown(what, why, "Register again, and go on with the new id.")

    async def _wait_until(self, deadline: float, changed: asyncio.Event) -> bool:
        """Wait for the next change. False: the deadline, or the server's end, came first."""
        if not self.decisions.is_ending:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
                    return not self.decisions.is_ending
        return False

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _run_key(state: State) -> tuple[object, ...]:
    """By which a request knows that its run is still served."""
    registration = state.run.registration
    if registration is None:
        return (state.run.first_group,)
    return (state.run.first_group, *registration.identity)
