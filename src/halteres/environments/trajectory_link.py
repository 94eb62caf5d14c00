"""An environment's connection to the trajectory server: register, ask how it stands, post groups,
disconnect.

The keys of groups make a repeated group harmless. A group that cannot be delivered goes to disk, in
its order:

    send ──▶ acknowledged
      │ the server is away for SEND_S, or this process ends meanwhile
      ▼
    outbox ── the next look at the server, of this process or its successor ──▶ acknowledged, once,
    by the same key
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from halteres.clients.retries import Retries
from halteres.clients.trajectories import (
    EnvironmentClient,
    EnvStatus,
    KeyReused,
    Posted,
    Registered,
    UnknownEnvironment,
)
from halteres.environments.config import BaseEnvConfig
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotReady
from halteres.files import replace_file

PATIENCE = Retries.for_seconds(600.0, longest_wait_s=0.5)
"""How long the server may be away (its restart takes under a second) before the environment gives
up.
"""

SEND_S = 60.0
"""How long a group may wait for its acknowledgement before it goes to disk, where there is a folder
for it.
"""

GOODBYE_S = 2.0

RECEIVED, STORED = "received", "kept"
"""Status of a group that was delivered, and of one that lies on disk and will be."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class TrajectoryLink:
    """One environment's registration at one server, also after the server has forgotten it."""

    def __init__(
        self, client: EnvironmentClient, config: BaseEnvConfig, name: str, send_s: float = SEND_S
    ) -> None:
        self._client, self._config, self._name = client, config, name
        self._registered: Registered | None = None
        # one of those who learn at once that the server forgot us
        self._registering = asyncio.Lock()
        # rollouts of a batch; once registered, as the trainer said
        self.batch_size = config.batch_size
        folder = Path(config.run_dir) / "spool" if config.run_dir else None
        self._folder = folder = Path(config.spool_dir) if config.spool_dir else folder
        # The same for whoever uses the folder after this process: a repeated group has its first
        # key.
        place = (
            uuid.uuid4().hex
            if folder is None
            else hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        )
        self._identity = place[:12]
        self._outbox = Outbox(folder)
        # None: as long as the client has patience
        self._send_s = None if folder is None else send_s

    @property
    def registered(self) -> Registered:
        """The answer to `register`."""
        if self._registered is None:
            raise NotReady("The environment is not registered yet.")
        return self._registered

    @property
    def life(self) -> int:
        """Which of several environments of this name it is: the server numbers their names, from
        NAME_0.

        One with a folder is always the first: started again, it draws what it drew before. What the
        server has of that already has its key, and counts once, so that the batch, and all later
        ones, are those of an environment that was never interrupted. One without a folder cannot be
        told from a twin that goes on beside it, and draws something else.
        """
        number = "" if self._folder else self.registered.name.removeprefix(f"{self._name}_")
        return int(number) if number.isdecimal() else 0

    async def register(self) -> Registered:
        """Register, waiting for the server and for its trainer.

        Raises:
            InvalidConfig: a group is larger than the trainer's batch.
            NotReady: the server stayed away, or its trainer did.
        """
        self._registered = await self._client.register_env(
            name=self._name,
            group_size=self._config.group_size,
            max_token_length=self._config.max_token_length,
            weight=self._config.inference_weight,
            min_batch_allocation=self._config.min_batch_allocation,
        )
        self.batch_size, _ = await self._client.info()
        if self._config.group_size > self.batch_size > 0:
            raise InvalidConfig(
                f"A group of {self._config.group_size} does not fit into a batch of "
                f"{self.batch_size}.",
                "The trainer's batch_size counts sequences.",
                "Lower group_size, or raise batch_size.",
            )
        return self._registered

    async def status(self, num_before: int | None = None) -> EnvStatus:
        """Deliver what could not be delivered before; then ask how far the trainer is, and for how
        many groups there is room (`allowance`): those under way before the question included.
        """
        for file, group in self._outbox.groups():
            try:
                posted = await self._post(group)
                if posted.set_aside:
                    log.warning(
                        "The trajectory server set aside a group that lay on disk: %s",
                        posted.set_aside,
                    )
            except KeyReused:
                # it did arrive, from an environment that had another id, and only the answer was
                # lost
                pass
            except InvalidData as error:
                log.warning("A group that lay on disk is refused: %s", error.sentence)
            file.unlink(missing_ok=True)
        answer = await self._as_known(lambda env_id: self._client.status(env_id, num_before))
        if answer.allowance is not None:
            return answer
        # A server without allowances: Atropos's own bound of what may wait there.
        most = self._config.max_batches_offpolicy * self.batch_size // self._config.group_size
        return replace(answer, allowance=max(0, most - answer.queue_size))

    async def send(self, body: Mapping[str, Any], place: str) -> Posted:
        """Deliver one group; returns when the server has acknowledged it, or it is STORED.

        Raises:
            InvalidData: the server refuses the group.
            NotReady: the server stayed away, and the group could not be stored.
        """
        group = OutgoingGroup(key=f"{self._identity}/{place}", body=body)
        # no group overtakes one that lies there
        if self._outbox.files() and self._outbox.store(group):
            return Posted(status=STORED)
        try:
            async with asyncio.timeout(self._send_s):
                return await self._post(group)
        except KeyReused:  # an earlier life of this environment has sent the group of this place
            return Posted(status=RECEIVED)
        except (NotReady, TimeoutError) as error:
            if not self._outbox.store(group):
                if isinstance(error, NotReady):
                    raise
                raise NotReady(
                    f"The trajectory server acknowledged no group within {self._send_s:g} s."
                ) from None
        except asyncio.CancelledError:
            self._outbox.store(group)  # this process ends; the next one finds it
            raise
        log.warning("The trajectory server does not answer; a group lies on disk until it does.")
        return Posted(status=STORED)

    def drop_undelivered(self) -> None:
        """The trainer wants no more: what was not delivered is not needed."""
        for file in self._outbox.files():
            file.unlink(missing_ok=True)
        self._outbox = Outbox(None)

    async def leave(self) -> None:
        """Tell the server that no more groups come, if it listens."""
        if self._registered is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._client.disconnect(self._registered.env_id)
        except (HalteresError, TimeoutError) as error:
            log.info("The trajectory server heard no goodbye: %s", error)

    async def _post(self, group: OutgoingGroup) -> Posted:
        return await self._as_known(
            lambda env_id: self._client.post({**group.body, "env_id": env_id}, key=group.key)
        )

    async def _as_known(self, ask: Callable[[int], Awaitable[T]]) -> T:
        """Ask under our id; where the server knows it no more, under a new one."""
        known = self.registered
        try:
            return await ask(known.env_id)
        except UnknownEnvironment as error:
            async with self._registering:
                if self.registered is known:
                    log.warning("%s Registering again.", error.sentence)
                    await self.register()
            return await ask(self.registered.env_id)


LARGEST_BYTES = 1024**3
"""Of all groups on disk. No group is begun while the server is away, so there are about as many as
workers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingGroup:
    """One group on its way to the trajectory server."""

    key: str  # Idempotency-Key: the same at every attempt, of whichever process
    body: Mapping[str, Any]  # without the sender's env_id, which may be another by then


class Outbox:
    """The folder of one environment, a file for each group; without one (None), nothing is ever
    stored.
    """

    def __init__(self, folder: Path | None, largest_bytes: int = LARGEST_BYTES) -> None:
        self._folder, self._largest_bytes = folder, largest_bytes
        self._numbers = itertools.count()

    def files(self) -> list[Path]:
        """The oldest first."""
        return sorted(self._folder.glob("*.group")) if self._folder is not None else []

    def store(self, group: OutgoingGroup) -> bool:
        """Write a group down. False where there is no folder, no room, or the disk refuses."""
        if self._folder is None:
            return False
        content = json.dumps({"key": group.key, "body": group.body}).encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if (
                len(content) + sum(file.stat().st_size for file in self.files())
                > self._largest_bytes
            ):
                log.warning(
                    "%s holds %d MiB already.", self._folder, self._largest_bytes // 1024**2
                )
                return False
            replace_file(
                self._folder / f"{time.time_ns():020}-{next(self._numbers)}.group", content
            )
        except OSError as error:
            log.warning("A group cannot be written into %s: %s.", self._folder, error.strerror)
            return False
        return True

    def groups(self) -> Iterator[tuple[Path, OutgoingGroup]]:
        """Every group with its file, the oldest first; a file that holds none is moved out of the
        way.
        """
        for file in self.files():
            try:
                content = json.loads(file.read_bytes())
                group = OutgoingGroup(key=str(content["key"]), body=dict(content["body"]))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.warning(
                    "%s holds no group (%s); it is left there under another name.", file, error
                )
                file.rename(file.with_suffix(".damaged"))
                continue
            yield file, group
