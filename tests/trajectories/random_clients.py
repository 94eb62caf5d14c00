"""Environments and trainers that play any history against a server, and look after each step
whether all is well.

Owns: each step that a history may have, and what it teaches the clients; the look at everything
after it. Never: chooses the steps (`test_model` does).

A request under which the server died has an outcome that its client does not know: it is looked up
afterwards, and must be all or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from .expected_state import (
    ENV_TIMEOUT_S,
    WAITING,
    Env,
    Json,
    Knowledge,
    Lease,
    Posted,
    Seen,
    check_fresh,
    check_none,
)
from .killable_server import Died, Instant, KillableServer, Leaves
from .server_fixtures import ENV, TRAINER, group

T = TypeVar("T", int, str)

BATCH_SIZES = (4, 6)
OVERSIZED = 9
STRANGER = 7
"""An environment that registered with another server."""

LEASE_S = 30.0


class RandomClients:
    """The environments and the trainers of one server after the other."""

    def __init__(self, folder: Path) -> None:
        self.world, self.knows = KillableServer(folder), Knowledge()
        self.listing: list[Seen] = []
        self.marks: dict[int, int] = {}  # by the server's number of the group
        # body, group, first reply where it arrived
        self.keyed: dict[str, tuple[bytes, Posted, bytes | None]] = {}
        self.last_mark = 100

    def close(self) -> None:
        self.world.close()

    # -- environments

    def post(self, size: int, whose: int, keyed: bool) -> None:
        posted = self._new(size, whose)
        self._post(posted, json.dumps(_body(posted)).encode(), f"k{posted.mark}" if keyed else None)

    def post_list(self, parts: list[tuple[int, int]]) -> None:
        """All of them are taken, or none."""
        groups = [self._new(size, whose) for size, whose in parts]
        try:
            answer = self.world.ask(
                "POST", "/scored_data_list", [_body(each, f"k{each.mark}") for each in groups]
            )
        except Died:
            self._look_up(groups)
            there = [each.mark in self.knows.accepted for each in groups]
            assert len(set(there)) == 1, "a part of a list was taken"
            return
        assert answer.json()["groups_processed"] == len(groups)
        self._accept(groups)

    def post_useless(self, useless: str, whose: int) -> None:
        posted = self._new(OVERSIZED if useless == "oversized" else 2, whose)
        body = _body(posted)
        if useless == "not finite":
            body["scores"][0] = float("nan")
        if useless == "uneven":
            body["masks"] = body["masks"][:1]
        self.knows.useless[posted.mark] = posted
        try:
            answer = self.world.ask("POST", "/scored_data", body).json()
        except Died:
            self._know_envs()
            return
        assert "set_aside" in answer or (useless == "oversized" and not self.knows.batch_size)
        self._know_envs()

    def send_again(self, which: int) -> None:
        if (key := _pick(self.keyed, which)) is None:
            return
        body, posted, first = self.keyed[key]
        answer = self._post(posted, body, key)
        assert first is None or answer is None or answer == first

    def use_a_key_for_another_body(self, which: int) -> None:
        if (
            key := _pick([key for key, (_, _, first) in self.keyed.items() if first], which)
        ) is None:
            return
        try:
            answer = self.world.ask(
                "POST", "/scored_data", _body(self._new(1, 0)), idempotency_key=key
            )
        except Died:
            return
        assert answer.status_code == 409

    def register_env(self, size: int, share: float | None) -> None:
        try:
            answer = self.world.ask(
                "POST", "/register-env", {**ENV, "group_size": size, "min_batch_allocation": share}
            ).json()
        except Died:
            self._know_envs()
            return
        if answer["status"] == "success":
            assert answer["env_id"] not in self.knows.envs
            assert answer["starting_step"] == self.knows.step
            self.knows.envs[answer["env_id"]] = Env(size, share or 0.0, self.world.clock.now)

    def disconnect_env(self, which: int) -> None:
        if (env_id := _pick(self.knows.envs, which)) is None:
            return
        try:
            assert self.world.ask("POST", "/disconnect-env", {"env_id": env_id}).json() == {
                "status": "success"
            }
        except Died:
            self._know_envs()
            return
        self.knows.envs[env_id].connected = False

    def poll(self, which: int) -> None:
        if (env_id := _pick(self.knows.envs, which)) is None:
            return
        try:
            answer = self.world.ask("GET", "/status-env", {"env_id": env_id}).json()
        except Died:
            self._know_envs()
            return
        self._hear(env_id, polls=True)
        own = sum(seen.size for seen in self._at("queued", "out") if seen.env_id == env_id)
        assert answer["current_step"] == self.knows.step
        if self.knows.batch_size:
            assert answer["self_queue_size"] <= own

    def silence(self, seconds: float) -> None:
        self.world.clock.now += seconds

    # -- trainers

    def begin(self, shares: Sequence[float | None]) -> None:
        """A trainer that has asked once, and environments with these parts of every batch."""
        self.register(0)
        self.world.question("never")
        for share in shares:
            self.register_env(2, share)

    def register(self, size: int, another: bool = False) -> None:
        """The same run again, or another one."""
        identity = f"{self.knows.identity}+" if another else self.knows.identity or "run"
        batch_size = BATCH_SIZES[size % len(BATCH_SIZES)]

        def registered() -> None:
            if identity == self.knows.identity:
                self.knows.batch_size = batch_size
            else:
                self._forget_keys()
                self.knows.begin_run(identity, batch_size)

        body = {**TRAINER, "wandb_group": identity, "batch_size": batch_size}
        self._change(
            "POST", "/register", body, lambda: self._run() == (identity, batch_size), registered
        )

    def reset(self) -> None:
        def over() -> None:
            self._forget_keys()
            # groups that came before any trainer go, too
            self.knows.batch_size = self.knows.batch_size or 1
            self.knows.begin_run("", 0)

        self._change(
            "GET",
            "/reset_data",
            None,
            self._is_reset,
            over,
        )

    def _is_reset(self) -> bool:
        """Whether nothing is left of a run; an environment that polled since is part of one."""
        if self._run() != (None, -1) or self._at(*WAITING):
            return False
        told = self.world.get("/v1/diagnostics")
        return not any(env["connected"] for env in told["environments"])

    def ask_for_a_batch(self, leaves: Leaves) -> None:
        before = self.listing
        try:
            body = self.world.question(leaves)
        except Died as death:
            self._settle_after_death(before, death.body)
            return
        if leaves == "never":
            marks = self._served(before, body)
            if marks:
                self.knows.deliver(marks)

    def lease(self) -> None:
        before = self.listing
        try:
            body = self.world.question("never", lease=LEASE_S)
        except Died as death:
            self._settle_after_death(before, death.body)
            for batch_id in {seen.batch_id for seen in self._at("out")} - {
                seen.batch_id for seen in before
            }:
                lost = [seen.mark for seen in self._at("out") if seen.batch_id == batch_id]
                self.knows.leases[batch_id or 0] = Lease(lost, self.world.clock.now + LEASE_S)
            return
        if marks := self._served(before, body):
            told = json.loads(body)
            assert told["lease_expires"] == self.world.clock.now + LEASE_S
            self.knows.leases[told["batch_id"]] = Lease(marks, told["lease_expires"])

    def ask_with_the_last_in_hand(self, which: int) -> None:
        """Our TrainerClient's way to acknowledge."""
        if (batch_id := _pick(self._open(), which)) is None:
            return
        before = [seen for seen in self.listing if seen.batch_id != batch_id]
        try:
            body = self.world.question("never", after=batch_id)
        except Died as death:
            self._settle_after_death(self.listing, death.body)
            return
        self.knows.deliver(self.knows.leases[batch_id].marks, batch_id)
        if marks := self._served(before, body):
            others = any(seen.place == "out" for seen in before)  # they may be delivered before it
            assert others or json.loads(body)["step"] == self.knows.step + 1
            self.knows.deliver(marks)

    def settle(self, which: int, what: str) -> None:
        if (batch_id := _pick(self._open(), which)) is not None:
            self._settle(batch_id, what)

    def _settle(self, batch_id: int, what: str) -> None:
        body = {"lease": LEASE_S} if what == "extend" else None
        try:
            answer = self.world.ask("POST", f"/v1/batches/{batch_id}/{what}", body)
        except Died:
            self._settle_after_death(self.listing, b"")
            if what != "ack" and batch_id in self._open():
                # whether it was heard is told nowhere, and it may be said again
                self._settle(batch_id, what)
            return
        assert answer.status_code == 200, answer.text
        lease = self.knows.leases[batch_id]
        if what == "ack":
            self.knows.deliver(lease.marks, batch_id)
            assert answer.json()["step"] == self.knows.step
        else:
            lease.expires_at = self.world.clock.now + (LEASE_S if what == "extend" else -1.0)

    def settle_what_is_settled(self, which: int, what: str) -> None:
        """An acknowledgement may be repeated; what was served to another cannot be acknowledged."""
        if (batch_id := _pick(self.knows.leases.keys() - self._open(), which)) is None:
            return
        try:
            answer = self.world.ask("POST", f"/v1/batches/{batch_id}/{what}")
        except Died:
            return
        repeated = what == "ack" and batch_id in self.knows.acknowledged
        assert answer.status_code == (200 if repeated else 409), answer.text

    # -- deaths

    def die(self) -> None:
        self.world.crash()
        self._know_envs()

    def doom(self, num_commits: int, instant: Instant) -> None:
        self.world.doom(num_commits, instant)

    # -- what must be true

    def everything_is_where_it_belongs(self) -> None:
        self._look()
        self.knows.check_places(self.listing)
        status = self.world.get("/status")
        assert status == {
            "current_step": self.knows.step,
            "queue_size": len(self._at("queued", "out")),
        }
        told = self.world.get("/v1/diagnostics")
        queued = self._at("queued")
        assert (told["queued_groups"], told["queued_sequences"]) == (
            len(queued),
            sum(seen.size for seen in queued),
        )
        now = self.world.clock.now
        live = {env["env_id"]: env["connected"] for env in told["environments"]}
        assert live == {env_id: env.is_live(now) for env_id, env in self.knows.envs.items()}

    # -- how

    def _new(self, size: int, whose: int) -> Posted:
        self.last_mark += 1
        senders = [None, *sorted(self.knows.envs), STRANGER]
        return Posted(self.last_mark, size, senders[whose % len(senders)])

    def _post(self, posted: Posted, body: bytes, key: str | None) -> bytes | None:
        """Send a group, perhaps again; gives the reply, if one came."""
        again = posted.mark in self.knows.accepted
        try:
            answer = self.world.ask(
                "POST", "/scored_data", body, **({"idempotency_key": key} if key else {})
            )
        except Died:
            if key is not None and not again:
                self.keyed[key] = (body, posted, None)
            self._look_up([posted])
            return None
        assert answer.json()["status"] in ("received", "buffered")
        assert "set_aside" not in answer.json()
        if again:
            self._know_envs()  # whether a repeated group is a sign of life is not promised
        self._accept([posted])
        if key is not None:
            self.keyed[key] = (body, posted, answer.content)
        return answer.content

    def _accept(self, groups: Sequence[Posted]) -> None:
        for posted in groups:
            if posted.mark not in self.knows.accepted:
                self.knows.accepted[posted.mark] = posted
                self._hear(posted.env_id)

    def _hear(self, env_id: int | None, *, polls: bool = False) -> None:
        """A sign of life; only a poll brings back one that said goodbye, or is of an earlier
        run.
        """
        if env_id is not None:
            env = self.knows.envs.setdefault(env_id, Env(0, 0.0, 0.0))
            env.seen_at, env.connected = self.world.clock.now, env.connected or polls

    def _look(self) -> None:
        listed = self.world.get("/v1/groups", limit=1000)["groups"]
        if any(each["id"] not in self.marks for each in listed):
            last = max(self.marks, default=0)
            for told in self.world.get("/v1/groups", after=last, limit=1000, bodies=True)["groups"]:
                element = told["element"]
                self.marks[told["id"]] = element["tokens"][0][0] if element else -told["id"]
        self.listing = [
            Seen(
                each["id"],
                self.marks[each["id"]],
                each["size"],
                each["env_id"],
                each["place"],
                each["batch_id"],
            )
            for each in listed
        ]

    def _at(self, *places: str) -> list[Seen]:
        return [seen for seen in self.listing if seen.place in places]

    def _open(self) -> set[int]:
        """Leases that their trainer may still acknowledge."""
        return {seen.batch_id for seen in self._at("out") if seen.batch_id in self.knows.leases}  # type: ignore[misc]

    def _served(self, before: Sequence[Seen], body: bytes) -> list[int]:
        """The marks of a reply, which must be right for what was there before."""
        told = json.loads(body)
        if not self.knows.batch_size:
            assert told["status"] == "error"
            return []
        queued, back = self._returned(before)
        minima = self.knows.minima(self.world.clock.now)
        if told["batch"] is None:
            assert not back
            check_none(queued, self.knows.batch_size, minima)
            return []
        marks = [element["tokens"][0][0] for element in told["batch"]]
        assert not set(marks) & self.knows.useless.keys()
        if back:
            assert sorted(marks) == sorted(back), (
                "the batch that came back with the oldest group goes first, unchanged"
            )
        else:
            by_mark = {seen.mark: seen for seen in queued}
            check_fresh([by_mark[mark] for mark in marks], queued, self.knows.batch_size, minima)
        return marks

    def _returned(self, before: Sequence[Seen]) -> tuple[list[Seen], list[int]]:
        """What queues when a question comes, in order, and the batch that has to be served again,
        if there is one.
        """
        now = self.world.clock.now
        held = {batch_id for batch_id, lease in self.knows.leases.items() if lease.expires_at > now}
        back: dict[int, list[Seen]] = {}
        for seen in before:
            if seen.place == "out" and seen.batch_id is not None and seen.batch_id not in held:
                back.setdefault(seen.batch_id, []).append(seen)
        exact = {
            batch_id: groups
            for batch_id, groups in back.items()
            if sum(seen.size for seen in groups) == self.knows.batch_size
        }
        queues = {
            seen.id
            for seen in before
            if seen.place == "queued" and seen.mark not in self.knows.useless
        }
        queues |= {seen.id for batch_id in back.keys() - exact.keys() for seen in back[batch_id]}
        queued = [seen for seen in before if seen.id in queues]
        oldest = min(exact.values(), key=lambda groups: min(seen.id for seen in groups), default=[])
        return queued, [seen.mark for seen in oldest]

    def _change(
        self,
        method: str,
        path: str,
        body: Json | None,
        is_done: Callable[[], bool],
        happened: Callable[[], None],
    ) -> None:
        """A request that changes the run; where the server died under it, the run says whether it
        did.
        """
        try:
            assert self.world.ask(method, path, body).status_code == 200
        except Died:
            self._know_envs()
            self._look()
            if not is_done():
                return
        happened()

    def _run(self) -> tuple[str | None, int]:
        """What the run is called, and its batch size."""
        return self.world.get("/wandb_info")["group"], self.world.get("/info")["batch_size"]

    def _forget_keys(self) -> None:
        """Keys live for the run; a client that comes back with one later sends a new group."""
        self.keyed.clear()

    def _look_up(self, groups: Sequence[Posted]) -> None:
        """The server died under these groups: those that are there were taken."""
        self._look()
        there = {seen.mark for seen in self.listing}
        for posted in groups:
            if posted.mark in there:
                self.knows.accepted[posted.mark] = posted
        self._know_envs()

    def _settle_after_death(self, before: Sequence[Seen], body: bytes) -> None:
        """The server died under a question or an acknowledgement: each batch is delivered whole, or
        not at all.
        """
        self._know_envs()
        self._look()
        was = {seen.mark: seen for seen in before}
        now = {seen.mark: seen for seen in self.listing if seen.place == "delivered"}
        fresh = [mark for mark in now if was[mark].place != "delivered"]
        batches: dict[int | None, list[int]] = {}
        for mark in fresh:
            batches.setdefault(now[mark].batch_id, []).append(mark)
        for batch_id, marks in sorted(batches.items(), key=lambda each: each[0] or 0):
            whole = (
                self.knows.leases[batch_id].marks
                if batch_id in self.knows.leases
                else _marks_of(body)
            )
            assert sorted(marks) == sorted(whole)
            self.knows.deliver(whole, batch_id)

    def _know_envs(self) -> None:
        """A server that has just begun waits for its environments anew; one that was not heard of
        may be known.
        """
        for told in self.world.get("/v1/diagnostics")["environments"]:
            env_id, seen_at = told["env_id"], self.world.clock.now - told["last_seen_s"]
            connected = told["connected"]
            if told["last_seen_s"] > ENV_TIMEOUT_S:  # it would not be live in any case
                connected = env_id not in self.knows.envs or self.knows.envs[env_id].connected
            self.knows.envs[env_id] = Env(told["group_size"], told["min_share"], seen_at, connected)


def _body(posted: Posted, key: str | None = None) -> Json:
    return group(
        posted.size, posted.mark, env_id=posted.env_id, **({"halteres_key": key} if key else {})
    )


def _marks_of(body: bytes) -> list[int]:
    return [element["tokens"][0][0] for element in json.loads(body)["batch"]]


def _pick(options: Collection[T], which: int) -> T | None:
    """One of them, if there are any."""
    return sorted(options)[which % len(options)] if options else None
