"""The trajectory server without its wire: what each route asks for, and how long a question waits.

All decisions happen on the event loop, one at a time; the disk belongs to the store's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from halteres.errors import HalteresError, NotReady, shortened
from halteres.trajectories import batches, diagnostics, status
from halteres.trajectories.batch_reply import Batch, BatchReplies, Gone
from halteres.trajectories.batches import asked_with, take_back_offers
from halteres.trajectories.diagnostics import NoBatchWarning
from halteres.trajectories.group_checks import LARGEST_ENV_ID, Problem, broken_convention
from halteres.trajectories.group_commit import GroupCommit
from halteres.trajectories.ingest import Content, Verdict, accept_all
from halteres.trajectories.options import Rules
from halteres.trajectories.posted_group import Scored
from halteres.trajectories.records import Delivery, EnvRecord, GroupRecord, Remembered
from halteres.trajectories.schema import BatchQuery, EnvRegistration, Registration
from halteres.trajectories.state import Clock, State
from halteres.trajectories.stores.store import GroupsQuery, Store, StoreFailed

AGAIN_S = 0.005
"""Pause before a question is asked again, whatever happens meanwhile."""

LOOK_S = 0.25
"""How often a held question looks again where nothing changed but the time: patience and heartbeats run out."""

RunKey = tuple[object, ...]

PAUSE_HOLD_S = 30.0
"""How long the poll of a paused environment with a minimum share is held: its client starts work whatever we answer,
and waits 5 minutes for an answer."""

SEEN_EVERY_S = 5.0
"""How often an environment whose poll is held counts as heard of."""

FULL_HOLD_S = 30.0
"""How long a post is held while the queue is full; the clients wait 5 minutes, and drop what is refused."""

LONGEST_REFUSAL = 600
"""Characters."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, about the run that was registered when it came."""

    query: BatchQuery
    run: RunKey | None
    deadline: float  # on the loop's clock

    @classmethod
    def of(cls, state: State, query: BatchQuery) -> Question:
        """A question that comes now."""
        return cls(query, _key(state), asyncio.get_running_loop().time() + query.wait)

    def decide(self, state: State) -> Delivery | None:
        """The batch that answers it; none where another run was registered meanwhile."""
        return batches.next_batch(state, self.query) if self._is_about(state) else None

    async def may_ask_again(self, decisions: GroupCommit, gone: Gone) -> bool:
        """Hold it until a batch may be had. False: its time is up, its run is over, or nobody waits for the answer."""
        while self._left() > 0 and not decisions.is_ending and self._is_about(decisions.state) and not await gone():
            changed = decisions.changed
            if batches.is_ready(decisions.state) or _has_expired(decisions.state):
                await asyncio.sleep(min(AGAIN_S, self._left()))
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._left(), LOOK_S)):
                    await changed.wait()
        return False

    def _is_about(self, state: State) -> bool:
        return self.run is not None and self.run == _key(state)

    def _left(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()


def _key(state: State) -> RunKey | None:
    run = state.run
    return None if run.registration is None else (*run.registration.identity, run.first_group)


def _has_expired(state: State) -> bool:
    """Whether a batch has come back since anybody asked."""
    now = state.clock()
    return any(batch.expires_at is not None and batch.expires_at <= now for batch in state.out.values())


class EnvironmentUnknown(HalteresError):
    """An environment of ours uses an id that this server never gave; it should register again."""

    code, status = "environment_unknown", 410


class QueueFull(NotReady):
    """Nothing more can be kept until the trainer takes some."""

    code, retry_after_s = "queue_full", 5


class TrajectoryService:
    """What the routes call. Everything raises StoreFailed where the store takes or gives nothing."""

    def __init__(self, store: Store, clock: Clock, rules: Rules | None = None) -> None:
        self._store, self._clock, self._rules = store, clock, rules or Rules()
        self.decisions = GroupCommit(store, self._remember)
        self.batch_replies = BatchReplies(self.decisions, is_shared=store.is_shared)
        self._no_batch_warning = NoBatchWarning()
        self.num_refused = 0  # posts of environments, since one registered
        self.last_refusal: dict[str, Any] | None = None  # path, status, why
        if not store.is_shared:  # nobody else writes replies: those of the server before this one reached nobody
            self.decisions.leave(take_back_offers)

    @property
    def state(self) -> State:
        """What is known now."""
        return self.decisions.state

    async def run(self) -> StoreFailed | None:
        """Take turns until `stop`; gives the failure that ended them earlier. Whoever made the service owns this."""
        return await self.decisions.run()

    def release(self) -> None:
        """The server is to end: nobody is held any more."""
        self.decisions.release()

    def stop(self) -> None:
        """Let `run` return once nothing waits."""
        self.decisions.stop()

    # -- the trainer ---------------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> int:
        """POST /register: gives the uuid."""
        return await self.decisions.submit(lambda state: batches.register(state, registration))

    async def registration(self) -> Registration | None:
        """The trainer's. That there is none is said only after asking: it may have registered at another server."""
        if self.state.run.registration is None and self._store.is_shared:
            await self.decisions.submit(lambda state: None)
        return self.state.run.registration

    async def reset(self) -> None:
        """GET /reset_data."""
        await self.decisions.submit(batches.reset)

    async def batch(self, query: BatchQuery, gone: Gone) -> Batch | None:
        """GET /batch of a registered run; None if there is none within `query.wait`.

        Whoever passes it on does so with `batch_replies`.
        """
        question, asks = Question.of(self.state, query), not await gone()
        while asks:
            made = await self.decisions.submit(question.decide)
            self._no_batch_warning.answered(self.state, empty=made is None)
            if made is not None and (batch := await self._read(made)) is not None:
                return batch
            asks = made is not None or await question.may_ask_again(self.decisions, gone)
        return None

    async def acknowledge(self, batch_id: int) -> Delivery:
        """POST /v1/batches/{id}/ack. Raises NotFound, LeaseLost."""
        looks = batches.must_look_up(self.state, batch_id)
        known = await asyncio.to_thread(self._store.delivery, batch_id) if looks else None
        return await self.decisions.submit(lambda state: batches.acknowledge(state, batch_id, known))

    async def nack(self, batch_id: int) -> Delivery:
        """POST /v1/batches/{id}/nack. Raises NotFound, LeaseLost."""
        return await self.decisions.submit(lambda state: batches.nack(state, batch_id))

    async def extend(self, batch_id: int, lease_s: float) -> Delivery:
        """POST /v1/batches/{id}/extend. Raises NotFound, LeaseLost."""
        return await self.decisions.submit(lambda state: batches.extend(state, batch_id, lease_s))

    # -- environments --------------------------------------------------------------------------------------------------

    async def register_env(self, registration: EnvRegistration) -> EnvRecord | None:
        """POST /register-env: None until a trainer has asked for a batch."""
        registered = await self.decisions.submit(lambda state: _register_env(state, registration))
        self.num_refused, self.last_refusal = 0, None
        return registered

    async def disconnect_env(self, env_id: int) -> bool:
        """POST /disconnect-env: False if there is no such environment."""
        return await self.decisions.submit(lambda state: _disconnect(state, env_id))

    async def accept(self, groups: Sequence[Scored], *, ours: bool = False) -> list[Verdict]:
        """POST /scored_data, /scored_data_list: when it returns, the groups survive the death of the process.

        `ours`: the client understands that it should register again.

        Raises:
            EnvironmentUnknown, KeyReused, QueueFull; Unprocessable in strict mode. Nothing was taken.
        """
        if ours:
            self._check_known(group.env_id for group in groups)
        if not self._have_room(groups):
            await self._room_for(groups)
        if self._rules.validation == "strict":
            groups = await asyncio.to_thread(self._held_to_conventions, groups)
        if window_s := self._rules.same_content_s:
            contents = await asyncio.to_thread(lambda: [Content.of(group, window_s) for group in groups])
            return await self._accept_by_content(contents)
        keys = [group.key for group in groups if group.key is not None]
        return await self.decisions.submit(lambda state: accept_all(state, groups), keys)

    def _held_to_conventions(self, groups: Sequence[Scored]) -> list[Scored]:
        registration = self.state.run.registration
        longest = registration.max_token_len if registration else 0
        return [
            group if group.problem else replace(group, problem=broken_convention(group.element, longest))
            for group in groups
        ]

    async def _accept_by_content(self, contents: Sequence[Content]) -> list[Verdict]:
        keys = [key for content in contents for key in content.keys(self._clock())]
        return await self.decisions.submit(
            lambda state: accept_all(state, [each.keyed(state) for each in contents]), keys
        )

    async def status_env(self, env_id: int, *, ours: bool = False, asked_for: int | None = None) -> dict[str, Any]:
        """GET /status-env; an unknown id is adopted, an impossible one is told to pause.

        Args:
            asked_for: tell with which policy version the trainer asked for the batch after so many.

        Raises:
            EnvironmentUnknown: one of ours.
        """
        if ours:
            self._check_known([env_id])
        if not 0 <= env_id < LARGEST_ENV_ID:
            return status.idle(self.state)
        if self.state.is_seen_lately(env_id):  # before any wait: it may have said goodbye by then
            self.state.note_seen(env_id)
        else:
            await self.decisions.submit(lambda state: state.note_seen(env_id))
        await self.batch_replies.settled()
        answer = await self._unparked(env_id)
        version = None if asked_for is None else asked_with(self.state, asked_for)
        return answer if version is None else {**answer, "asked_version": version}

    async def _unparked(self, env_id: int) -> dict[str, Any]:
        """The answer; one that says "pause" to a client that would not listen comes late instead."""
        deadline = self._now() + PAUSE_HOLD_S
        while True:
            changed, env = self.decisions.changed, self.state.envs.by_id[env_id]
            answer = status.status_env(self.state, env)
            if not env.min_share or not status.is_paused(self.state):
                return answer
            changed_again = await self._wait_until(min(deadline, self._now() + SEEN_EVERY_S), changed)
            if self.decisions.is_ending or (not changed_again and self._now() >= deadline):
                return answer
            if self.state.is_seen_lately(env_id):  # it may have said goodbye
                self.state.note_seen(env_id)

    # -- whoever looks -------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, int]:
        """GET /status."""
        await self.batch_replies.settled()
        return status.status(self.state)

    async def latest_example(self) -> bytes | None:
        """GET /latest_example: the element of the newest group."""
        return await asyncio.to_thread(self._store.latest_body)

    async def groups(self, query: GroupsQuery) -> list[GroupRecord]:
        """GET /v1/groups: the oldest first."""
        return await asyncio.to_thread(self._store.groups, query)

    async def bodies_of(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        """The JSON elements of these groups, of those still kept."""
        return await asyncio.to_thread(self._store.find_bodies, group_ids)

    def diagnose(self) -> dict[str, Any]:
        """GET /v1/diagnostics."""
        refused = {"requests_refused": self.num_refused, "last_refusal": self.last_refusal}
        return {**diagnostics.report(self.state), **refused}

    def note_refusal(self, path: str, status: int, why: str) -> None:
        """A posted request was refused, for good."""
        self.num_refused += 1
        self.last_refusal = {"path": path, "status": status, "why": shortened(why, LONGEST_REFUSAL)}

    # -- how -----------------------------------------------------------------------------------------------------------

    def _remember(self, remembered: Remembered) -> State:
        return State(remembered, self._clock, self._rules, shared=self._store.is_shared)

    async def _read(self, made: Delivery) -> Batch | None:
        """The batch with its tokens. Groups whose tokens are lost are set aside: the others queue again, and None."""
        step = made.step or self._step_of(made)
        try:
            return Batch(made, step, await asyncio.to_thread(self._store.bodies, made.groups))
        except BaseException as error:
            self.batch_replies.give_back(Batch(made, step, []))
            if not isinstance(error, StoreFailed):
                raise
            found = await asyncio.to_thread(self._store.find_bodies, made.groups)
            if len(found) == len(made.groups):
                raise
        await self.decisions.submit(lambda state: _without(state, made.id, set(made.groups) - set(found)))
        return None

    def _step_of(self, made: Delivery) -> int:
        """The run's step once this batch is delivered, if those that are out before it are, too."""
        return self.state.run.step + sum(batch_id <= made.id for batch_id in self.state.out)

    def _have_room(self, groups: Sequence[Scored]) -> bool:
        """Whether what is new of the groups fits onto the disk and into the queue; an empty one takes anything."""
        state = self.state
        num_bytes = sum(len(group.element) for group in groups if state.known(group.key) is None)
        if not num_bytes:
            return True
        return not self._store.is_full and not 0 < state.num_bytes > self._rules.max_queue_bytes - num_bytes

    async def _room_for(self, groups: Sequence[Scored]) -> None:
        """Wait until groups fit into the queue."""
        deadline = self._now() + FULL_HOLD_S
        while not self._have_room(groups):
            if not await self._wait_until(deadline, self.decisions.changed):
                if self._store.is_full:
                    raise StoreFailed(
                        "The group was not stored.",
                        "The disk of the trajectory database is full; batches can still be taken.",
                        "Make room on the disk; the request can be sent again.",
                    )
                raise QueueFull(
                    "The queue is full.",
                    f"{self.state.num_bytes} bytes wait for a trainer; --max-queue-bytes is "
                    f"{self._rules.max_queue_bytes}.",
                    "Send it again later; GET /v1/diagnostics says why no batch is taken.",
                )

    def _check_known(self, env_ids: Iterator[int | None] | Sequence[int | None]) -> None:
        for env_id in env_ids:
            if env_id is not None and env_id not in self.state.envs.by_id:
                raise EnvironmentUnknown(
                    f"This server knows no environment {env_id}.",
                    "It was given by another server, or on another database.",
                    "Register again, and go on with the new id.",
                )

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


def _without(state: State, batch_id: int, lost: set[int]) -> None:
    why = Problem("tokens_lost", "Its tokens cannot be read any more.")
    if batch_id in state.out:
        batches.dissolve(state, state.out[batch_id], dict.fromkeys(lost, why))
    elif state.run.last is not None and state.run.last.id == batch_id:
        state.save_run(replace(state.run, last=None, parked=False))  # it was counted, and is served no more


def _register_env(state: State, registration: EnvRegistration) -> EnvRecord | None:
    return state.save_env(state.envs.new_record(registration)).record if state.run.started else None


def _disconnect(state: State, env_id: int) -> bool:
    env = state.envs.by_id.get(env_id)
    if env is not None:
        state.save_env(replace(env.record, connected=False))
    return env is not None
