"""Decisions are taken in decisions, kept before they are answered, and never built on what was not
kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import Connection

from halteres.errors import Conflict
from halteres.trajectories import group_commit
from halteres.trajectories.group_commit import QUICK_S, GroupCommit
from halteres.trajectories.records import (
    Change,
    Remembered,
    RunRecord,
    Update,
)
from halteres.trajectories.state import State
from halteres.trajectories.stores.store import Store, StoreFailed

DEADLINE_S = 10


@dataclass
class Memory(Store):
    """A store whose disk is a record, and whose failures are arranged."""

    kept: RunRecord = field(default_factory=RunRecord)
    is_shared: bool = False
    is_full: bool = False
    calls: list[Any] = field(default_factory=list)
    others: list[Update] = field(default_factory=list)  # what each turn begins with
    may_commit: threading.Event = field(default_factory=threading.Event)
    is_inside: threading.Event = field(default_factory=threading.Event)
    refuses: bool = False
    is_gone: bool = False
    is_quick: bool = False
    takes_s: float = 0.0
    clock: float = 0.0
    threads: list[str] = field(default_factory=list)  # that committed

    def __post_init__(self) -> None:
        self.may_commit.set()

    def load(self) -> Remembered:
        if self.is_gone:
            raise StoreFailed("The disk is gone.")
        return Remembered(run=self.kept)

    def begin(self) -> Update:
        self.calls.append(("begin",))
        return self.others.pop(0) if self.others else Update()

    def commit(self, changes: Sequence[Change]) -> None:
        self.is_inside.set()
        self.threads.append(threading.current_thread().name)
        self.clock += self.takes_s
        assert self.may_commit.wait(DEADLINE_S)
        self.calls.append(("commit", len(changes)))
        if self.refuses:
            raise StoreFailed("The disk is full.")
        for change in changes:
            assert isinstance(change, RunRecord)
            self.kept = change

    def abandon(self) -> None:
        self.calls.append(("abandon",))

    def catch_up(self) -> Update:
        return self.others.pop(0) if self.others else Update()

    def bodies(self, group_ids: Sequence[int]) -> dict[int, bytes]:
        return {}

    def close(self) -> None:
        return

    def _reading(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError


@asynccontextmanager
async def turning(store: Memory) -> AsyncIterator[GroupCommit]:
    """GroupCommit at a store, and the task that takes them."""
    decisions = GroupCommit(
        store, lambda remembered: State(remembered, lambda: 0.0, shared=store.is_shared)
    )
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(decisions.run())
        try:
            yield decisions
        finally:
            store.may_commit.set()
            decisions.stop()


def step(state: State) -> int:
    """One more step."""
    state.save_run(replace(state.run, step=state.run.step + 1))
    return state.run.step


def refuse(state: State) -> int:
    raise Conflict("No.")


async def test_nobody_is_answered_before_it_is_kept() -> None:
    store = Memory()
    async with turning(store) as decisions:
        store.may_commit.clear()
        answer = decisions.submit(step)
        assert await asyncio.to_thread(store.is_inside.wait, DEADLINE_S)
        # decided in memory, and not told
        assert (decisions.state.run.step, decisions.state.durable_step) == (1, 0)
        assert not answer.done()
        assert store.kept.step == 0
        store.may_commit.set()
        assert await answer == 1
        assert store.kept.step == decisions.state.durable_step == 1


async def test_what_waits_is_committed_together_and_in_order() -> None:
    store = Memory()
    async with turning(store) as decisions:
        assert await asyncio.gather(*(decisions.submit(step) for _ in range(5))) == [1, 2, 3, 4, 5]
        assert store.calls == [("commit", 5)]


async def test_a_refused_decision_spoils_no_other() -> None:
    async with turning(Memory()) as decisions:
        answers = await asyncio.gather(
            *map(decisions.submit, (step, refuse, step)), return_exceptions=True
        )
        assert (answers[0], answers[2]) == (1, 2)
        assert isinstance(answers[1], Conflict)


async def test_a_question_that_changes_nothing_touches_no_store() -> None:
    store = Memory()
    async with turning(store) as decisions:
        assert await decisions.submit(lambda state: state.run.step) == 0
        assert store.calls == []


async def test_a_failed_turn_fails_all_of_it_and_memory_goes_back() -> None:
    store = Memory()
    async with turning(store) as decisions:
        await decisions.submit(step)
        store.refuses = True
        answers = await asyncio.gather(
            *(decisions.submit(step) for _ in range(3)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [StoreFailed] * 3
        assert decisions.state.run.step == store.kept.step == 1
        store.refuses = False
        assert await decisions.submit(step) == 2


async def test_a_defect_in_a_decision_fails_its_turn_and_no_later_one() -> None:
    def break_down(state: State) -> None:
        step(state)
        raise ZeroDivisionError

    async with turning(Memory()) as decisions:
        with pytest.raises(StoreFailed, match="ZeroDivisionError"):
            await decisions.submit(break_down)
        assert await decisions.submit(step) == 1


async def test_turns_end_where_the_store_cannot_be_read_any_more() -> None:
    store = Memory()
    async with turning(store) as decisions:
        store.refuses = store.is_gone = True
        with pytest.raises(StoreFailed, match="full"):
            await decisions.submit(step)
        with pytest.raises(StoreFailed, match="gone"):
            await decisions.submit(step)


async def test_on_a_shared_store_a_turn_begins_with_what_others_did() -> None:
    store = Memory(is_shared=True, others=[Update(changes=[RunRecord(step=41)])])
    async with turning(store) as decisions:
        assert await decisions.submit(step) == 42
        assert store.calls[:2] == [("begin",), ("commit", 1)]
        assert await decisions.submit(lambda state: state.run.step) == 42
        assert store.calls[2:] == [("begin",), ("abandon",)]


async def test_whoever_missed_too_much_begins_afresh() -> None:
    store = Memory(is_shared=True, others=[Update(afresh=Remembered(run=RunRecord(step=7)))])
    async with turning(store) as decisions:
        assert await decisions.submit(step) == 8


async def test_followers_learn_what_others_did_without_asking() -> None:
    store = Memory(is_shared=True)
    async with turning(store) as decisions:
        changed = decisions.changed
        store.others.append(Update(changes=[RunRecord(step=3)]))
        await changed.wait()
        assert decisions.state.run.step == 3


async def test_a_lone_decision_is_committed_in_place_while_the_store_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a slow commit it goes to the store's thread, where nobody's request waits for the
    disk; and comes back.
    """
    store = Memory(is_quick=True)
    monkeypatch.setattr(group_commit, "monotonic", lambda: store.clock)
    async with turning(store) as decisions:
        await decisions.submit(step)
        store.takes_s = 2 * QUICK_S
        await decisions.submit(step)
        await decisions.submit(step)
        store.takes_s = 0.0
        await decisions.submit(step)
        await decisions.submit(step)
        await asyncio.gather(*(decisions.submit(step) for _ in range(3)))  # several together
    here = threading.current_thread().name
    assert [name == here for name in store.threads] == [True, True, False, False, True, False]
