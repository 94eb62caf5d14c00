"""The environment's side of the trajectory server: registered, polled, fed, left.

Owns: this environment's registration, how many groups the server still has room for, the keys that make a repeated post
harmless.
Never: decides how many groups to make; repeats a request (its client does, while the server is away).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from halteres.clients.trajectories import EnvStatus, Patience, Posted, Registered
from halteres.environments.config import BaseEnvConfig
from halteres.errors import HalteresError, InvalidConfig, NotReady

log = logging.getLogger(__name__)

PATIENCE = Patience(total_s=600.0, longest_s=0.5)
"""How long the server may be away (its restart takes under a second) before the environment gives up."""

GOODBYE_S = 2.0


class TrajectoryClient(Protocol):
    """What is asked of `clients.trajectories.EnvironmentClient`, which describes it."""

    async def register_env(
        self, *, name: str, group_size: int, max_token_length: int, weight: float, min_batch_allocation: float | None
    ) -> Registered:
        """Register, as soon as a trainer has asked for its first batch."""
        ...

    async def info(self) -> tuple[int, int]:
        """batch_size in sequences, and max_token_len."""
        ...

    async def status(self, env_id: int) -> EnvStatus:
        """Step, queue and allowance."""
        ...

    async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
        """Send one scored group."""
        ...

    async def disconnect(self, env_id: int) -> None:
        """Leave."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One look at the server."""

    step: int  # batches delivered
    room: int  # groups that may be under way, those of before the question included


class TrajectoryLink:
    """One environment's registration at one server."""

    def __init__(self, client: TrajectoryClient, config: BaseEnvConfig, name: str) -> None:
        self._client, self._config, self._name = client, config, name
        self._registered: Registered | None = None
        self._batch_size = config.batch_size
        self._incarnation = uuid.uuid4().hex[:12]  # so that no group of an earlier life is taken for one of ours

    @property
    def registered(self) -> Registered:
        """The answer to `register`."""
        if self._registered is None:
            raise NotReady("The environment is not registered yet.")
        return self._registered

    @property
    def life(self) -> int:
        """How many environments of this name registered before: the server numbers its names, from NAME_0."""
        number = self.registered.name.removeprefix(f"{self._name}_")
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
        self._batch_size, _ = await self._client.info()
        if self._config.group_size > self._batch_size > 0:
            raise InvalidConfig(
                f"A group of {self._config.group_size} does not fit into a batch of {self._batch_size}.",
                "The trainer's batch_size counts sequences.",
                "Lower group_size, or raise batch_size.",
            )
        return self._registered

    async def status(self) -> Status:
        """Ask how far the trainer is, and what it still wants."""
        answer = await self._client.status(self.registered.env_id)
        room = self._room_by_queue(answer) if answer.allowance is None else answer.allowance
        return Status(step=answer.current_step, room=room)

    async def send(self, body: Mapping[str, Any], place: str) -> Posted:
        """Deliver one group; returns when the server has acknowledged it.

        Raises:
            InvalidData: the server refuses the group.
            NotReady: the server stayed away.
        """
        return await self._client.post(
            {**body, "env_id": self.registered.env_id}, key=f"{self._incarnation}/{self._name}/{place}"
        )

    async def leave(self) -> None:
        """Tell the server that no more groups come, if it listens."""
        if self._registered is None:
            return
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._client.disconnect(self._registered.env_id)
        except (HalteresError, TimeoutError) as error:
            log.info("The trajectory server heard no goodbye: %s", error)

    def _room_by_queue(self, answer: EnvStatus) -> int:
        """Groups that may wait at a server without allowances: Atropos's own bound."""
        wanted = self._config.max_batches_offpolicy * self._batch_size // self._config.group_size
        return max(0, wanted - answer.queue_size)
