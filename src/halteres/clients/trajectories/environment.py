"""An environment's client of the trajectory server, for many tasks of one event loop.

async with EnvironmentClient(url) as client:
    registered = await client.register_env(name="arithmetic", group_size=8, max_token_length=256)
    status = await client.status(registered.env_id)      # at most `allowance` groups in flight
    await client.post(group, key=new_key())
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from halteres.clients.json_client import Connected
from halteres.clients.retries import Retries
from halteres.clients.trajectories.address import Address
from halteres.clients.trajectories.calls import (
    EVERYWHERE,
    LEAST_COMPRESSED,
    POLL_S,
    REPLY_S,
    RETRIES,
    KeyReused,
    checked,
    compress,
    encode,
    unreachable,
)
from halteres.errors import NotReady


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An environment's place on the server."""

    env_id: int
    name: str  # unique on the server
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int  # steps
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStatus:
    """What the server tells an environment that polls."""

    current_step: int  # batches delivered
    queue_size: int  # groups
    self_queue_size: int  # groups of this environment
    max_group_size: int  # sequences
    unallocated_fraction: float
    env_weight: float
    allowance: int | None = None  # groups to have in flight at most; None: an original server
    # the trainer's, with its question for the batch that was named; None: not yet
    asked_version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What became of a posted group."""

    status: str  # "received" or "buffered"
    set_aside: str | None = None  # why it will never be delivered


def new_key() -> str:
    """An Idempotency-Key: one per group, kept for its retries, however many processes they take."""
    return uuid.uuid4().hex


class EnvironmentClient(Connected):
    """An environment's client.

    Raises:
        NotReady: the server stayed away for as long as `retries` say.
        UnknownEnvironment: it knows no environment of that id; register again, and go on under the
            new one.
        InvalidData: it refuses the request.
    """

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        self._at, self._retries = Address.of(url), retries

    async def register_env(
        self,
        *,
        name: str,
        group_size: int,
        max_token_length: int,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        deadline_s: float = 600.0,
    ) -> Registered:
        """Register, as soon as a trainer has asked for its first batch.

        Raises:
            NotReady: no trainer did within `deadline_s`.
        """
        sizes = {"group_size": group_size, "max_token_length": max_token_length}
        shares = {"weight": weight, "min_batch_allocation": min_batch_allocation}
        body = {"desired_name": name, **sizes, **shares}
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    answer = await self._call("POST", "/register-env", body)
                    if answer.get("status") == "success":
                        return msgspec.convert(answer | {"name": answer["wandb_name"]}, Registered)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            what = f"No trainer asked {self._at.url} for a batch within {deadline_s:g} s."
            raise NotReady(
                what, "Environments may register only then.", "Look at the trainer's log."
            ) from None

    async def status(self, env_id: int, asked_for: int | None = None) -> EnvStatus:
        """Step, queue and allowance. Groups in flight when this is *sent* count against the
        allowance of the answer.

        `asked_for`: the number of batches before one of which `asked_version` is to be told.
        """
        more = {} if asked_for is None else {"asked_for": asked_for}
        return msgspec.convert(
            await self._call("GET", "/status-env", {"env_id": env_id, **more}), EnvStatus
        )

    async def info(self) -> tuple[int, int]:
        """batch_size in sequences, and max_token_len; -1, -1 before a trainer registered."""
        answer = await self._call("GET", "/info")
        return answer["batch_size"], answer["max_token_len"]

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """The trainer's group and project; None before it registered."""
        answer = await self._call("GET", "/wandb_info")
        return answer["group"], answer["project"]

    async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
        """Send one scored group (keys of ScoredData). The same key never counts twice.

        Raises:
            KeyReused: another group came with this key.
        """
        answer = await self._call("POST", "/scored_data", group, {"Idempotency-Key": key})
        problem = answer.get("set_aside")
        return Posted(status=answer["status"], set_aside=problem["why"] if problem else None)

    async def disconnect(self, env_id: int) -> None:
        """Leave; what is queued stays."""
        await self._call("POST", "/disconnect-env", {"env_id": env_id})

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        import aiohttp  # here: the trainer's client does without these 0.3 s

        data, headers = None if body is None else encode(body), {**self._at.headers, **(more or {})}
        if data is not None and not self._at.is_here and len(data) >= LEAST_COMPRESSED:
            data = await asyncio.to_thread(compress, data)
            headers["Content-Encoding"] = "gzip"

        async def attempt() -> bytes:
            if self._session is None:
                self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REPLY_S))
            try:
                async with self._session.request(
                    method, self._at.url + path, data=data, headers=headers
                ) as response:
                    return checked(response.status, await response.read(), path, _REFUSALS)
            except (OSError, aiohttp.ClientError) as error:  # a timeout is an OSError
                raise unreachable(self._at.url, error) from error

        return msgspec.json.decode(await self._retries.call(attempt))


_REFUSALS = {**EVERYWHERE, 409: KeyReused}
