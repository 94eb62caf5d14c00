"""Environments and trainers in threads of their own, which go on although the server is killed
again and again.

Owns: how each of them insists; what it was told, and so may rely on.
Never: kills, judges (`test_chaos` does).
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from .server_fixtures import group, marks

Json = dict[str, Any]

LEASE_S = 2.0
REPLY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply that arrived whole."""

    status: int
    content: Any


class Over(Exception):
    """The test has ended; nobody will answer any more."""


class Line:
    """A client's connection, kept alive while the server lives."""

    def __init__(self, url: str, over: threading.Event) -> None:
        self._address, self._over = urlsplit(url), over
        self._connection: http.client.HTTPConnection | None = None

    def once(self, method: str, path: str, body: Any = None, **headers: str) -> Answer | None:
        """One try; None: nobody knows what came of it."""
        connection = self._connection or http.client.HTTPConnection(
            str(self._address.hostname), self._address.port, timeout=REPLY_S
        )
        self._connection = None
        try:
            content = None if body is None else json.dumps(body)
            connection.request(
                method,
                path,
                content,
                {name.replace("_", "-"): value for name, value in headers.items()},
            )
            reply = connection.getresponse()
            answer = Answer(reply.status, json.loads(reply.read()))
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            connection.close()
            return None
        self._connection = connection
        return answer

    def insist(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Again and again, until there is an answer."""
        while (answer := self.once(method, path, body, **headers)) is None or answer.status == 503:
            if self._over.is_set():
                raise Over
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()


Work = Callable[[Line], None]
"""What one client does until it is told to go home."""


@dataclass
class Events:
    """What has happened so far; whoever kills waits for so many."""

    num: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self) -> None:
        """One more."""
        with self.changed:
            self.num += 1
            self.changed.notify_all()

    def wait_for(self, more: int, within_s: float) -> None:
        """Until so many more have happened."""
        with self.changed:
            wanted = self.num + more
            assert self.changed.wait_for(lambda: self.num >= wanted, within_s), (
                f"{self.num} of {wanted} events"
            )


@dataclass
class ConcurrentClients:
    """Everybody who talks to one server."""

    url: str
    events: Events = field(default_factory=Events)
    acknowledged: list[int] = field(default_factory=list)
    """Marks of groups whose reply arrived."""
    batches: list[list[int]] = field(default_factory=list)
    """Batches that a trainer may count on, by their marks."""
    uncertain: list[list[int]] = field(default_factory=list)
    """Batches that arrived whole from a server that was killed before it said anything else."""
    failures: list[AssertionError] = field(default_factory=list)
    _enough: threading.Event = field(default_factory=threading.Event)
    _taken: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _environments: list[threading.Thread] = field(default_factory=list)
    _trainers: list[threading.Thread] = field(default_factory=list)

    def come(self, environments: Sequence[Work], trainers: Sequence[Work]) -> None:
        """Let them work, each in its thread."""
        self._environments = [
            threading.Thread(target=self._run, args=(work,)) for work in environments
        ]
        self._trainers = [threading.Thread(target=self._run, args=(work,)) for work in trainers]
        for thread in (*self._environments, *self._trainers):
            thread.start()

    def end_posting(self) -> None:
        """Environments finish what they began, and go home."""
        self._enough.set()
        self._gone_home(self._environments)

    def end_training(self) -> None:
        """Trainers, too."""
        self._taken.set()
        self._gone_home(self._trainers)

    def end(self) -> None:
        """Nobody insists on anything any more."""
        for event in (self._enough, self._taken, self._over):
            event.set()

    def _gone_home(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            thread.join(REPLY_S)
            assert not thread.is_alive()
        if self.failures:
            raise self.failures[0]

    def _run(self, work: Work) -> None:
        line = Line(self.url, self._over)
        try:
            work(line)
        except AssertionError as failure:
            self.failures.append(failure)
        except Over:
            pass
        finally:
            line.close()

    # -- environments

    def poster(self, env_id: int, first_mark: int, seed: int) -> Work:
        """An environment that sends each group, with its key, until it is told that it arrived."""
        chance = random.Random(seed)

        def post(line: Line) -> None:
            for mark in itertools.count(first_mark):
                if self._enough.is_set():
                    return
                body = group(2, mark=mark, env_id=env_id)
                if chance.random() < 0.25:
                    answer = line.insist(
                        "POST", "/scored_data_list", [{**body, "halteres_key": f"k{mark}"}]
                    )
                else:
                    answer = line.insist("POST", "/scored_data", body, Idempotency_Key=f"k{mark}")
                assert (answer.status, answer.content["status"]) == (200, "received"), answer
                self.acknowledged.append(mark)
                self.events.add()

        return post

    def poller(self, env_id: int) -> Work:
        """An environment that asks how far the trainer is: steps never go back."""

        def poll(line: Line) -> None:
            step = 0
            while not self._enough.is_set():
                answer = line.insist("GET", "/status-env", {"env_id": env_id})
                assert answer.status == 200, answer
                assert answer.content["current_step"] >= step, (answer, step)
                step = answer.content["current_step"]

        return poll

    # -- trainers

    def leasing(self, seed: int) -> Work:
        """A trainer that acknowledges what it leased, now and then gives it back, or forgets it."""
        chance = random.Random(seed)

        def train(line: Line) -> None:
            while not self._taken.is_set():
                answer = line.once("GET", f"/batch?lease={LEASE_S}&wait=0.2")
                if answer is None or answer.status == 503 or answer.content["batch"] is None:
                    continue
                whim, batch_id = chance.random(), answer.content["batch_id"]
                if whim < 0.05:
                    continue
                settled = line.insist(
                    "POST", f"/v1/batches/{batch_id}/{'nack' if whim < 0.15 else 'ack'}"
                )
                assert settled.status in (200, 409), settled
                if whim >= 0.15 and settled.status == 200:
                    self.batches.append(marks(answer.content["batch"]))
                self.events.add()

        return train

    def holding(self) -> Work:
        """A trainer that names the last batch it holds when it asks for the next, as ours does."""

        def train(line: Line) -> None:
            held = 0  # none
            while not self._taken.is_set():
                answer = line.once("GET", f"/batch?after={held}&wait=0.2")
                if answer is None or answer.status == 503 or answer.content["batch"] is None:
                    continue
                held = answer.content["batch_id"]
                self.batches.append(marks(answer.content["batch"]))
                self.events.add()

        return train

    def plain(self) -> Work:
        """The original's trainer: it knows no leases. Its last batch before a reply was lost may
        come again.
        """

        def train(line: Line) -> None:
            while not self._taken.is_set():
                answer = line.once("GET", "/batch")
                if answer is None:
                    self.uncertain += self.batches[-1:]
                elif answer.status == 200 and answer.content["batch"] is not None:
                    self.batches.append(marks(answer.content["batch"]))
                    self.events.add()

        return train
