"""The critic that a run trains next to its policy: its values make advantages, its updates follow
the batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from halteres.clients.critic import CriticClient, Rows, Targets, Updated, UpdateRequest
from halteres.config.settings import TrainerSettings
from halteres.errors import InvalidData, NotReady, ServerError
from halteres.training.failures import CriticFailed
from halteres.training.gae import SampledTokens, TokenValues
from halteres.training.policy import CALL_S, minibatches
from halteres.training.turns import FloatArray


class AsksCritic(Protocol):
    """What is asked of the critic's process (`clients.critic.CriticClient`)."""

    def values(self, step: int, sequences: Sequence[Rows]) -> Awaitable[list[list[float]]]:
        """The values of these places."""
        ...

    def update(self, request: UpdateRequest) -> Awaitable[Updated]:
        """Learn the returns."""
        ...

    def save(self, step: int) -> Awaitable[None]:
        """Keep its state."""
        ...


class Critic:
    """Values of tokens, learnt from the returns of each batch.

    Args:
        client: of its process.
        settings: of the trainer.
        seed: of the run.
        step: steps of the run that are done, each with an update of the critic.
    """

    def __init__(self, client: AsksCritic, settings: TrainerSettings, seed: int, step: int) -> None:
        self._client, self._settings, self._seed, self.step = client, settings, seed, step

    async def values(self, tokens: SampledTokens) -> FloatArray:
        """The value of what stands before each sampled token, shape (M,), in reward units.

        Raises:
            CriticFailed: its process does not answer within CALL_S, or fails: a value may not be
                finite.
        """
        values_M = np.zeros(len(tokens))
        asked = [(s, places) for s, places in enumerate(tokens.by_sequence()) if places.size]
        rows = [
            Rows(tokens=tokens.inputs_S[s].tolist(), rows=tokens.row_M[places].tolist())
            for s, places in asked
        ]
        if not rows:
            return values_M
        with _failing("values"):
            found = await self._client.values(self.step, rows)
        for (_, places), own in zip(asked, found, strict=True):
            values_M[places] = own
        return values_M

    async def update(self, values: TokenValues) -> Updated:
        """Learn the returns of a batch, in `critic_epochs` times through it. Raises CriticFailed
        as `values`.
        """
        tokens, config = values.tokens, self._settings
        targets = [
            Targets(
                tokens=tokens.inputs_S[s].tolist(),
                rows=tokens.row_M[places].tolist(),
                values=values.values_M[places].tolist(),
                returns=values.returns_M[places].tolist(),
            )
            for s, places in enumerate(tokens.by_sequence())
            if places.size
        ]
        own = config.model_copy(update={"epochs": config.critic_epochs or config.epochs})
        order = minibatches(range(len(targets)), own, self._seed, self.step + 1)
        request = UpdateRequest(
            step=self.step + 1,
            sequences=targets,
            minibatches=[list(one) for one in order],
            learning_rate=config.critic_learning_rate or config.learning_rate,
            clip=config.critic_clip,
        )
        with _failing("update"):
            updated = await self._client.update(request)
        self.step += 1
        return updated

    async def save(self) -> None:
        """Keep the present state for a run that resumes from this step. Raises CriticFailed as
        `values`.
        """
        with _failing("save"):
            await self._client.save(self.step)


@asynccontextmanager
async def critic_of(
    url: str, settings: TrainerSettings, seed: int, step: int
) -> AsyncIterator[Critic | None]:
    """The critic of a run, where it has one; its connections end with the block."""
    if not settings.uses_critic:
        yield None
        return
    async with CriticClient(url, timeout_s=CALL_S) as client:
        yield Critic(client, settings, seed, step)


@dataclass(slots=True)
class Learnt:
    """What the critic has learnt of a batch, once `learning` has ended; None without a critic."""

    update: Updated | None = None


@asynccontextmanager
async def learning(critic: Critic | None, values: TokenValues | None) -> AsyncIterator[Learnt]:
    """Let the critic learn the returns of a batch while the block runs, and wait for it at its
    end.
    """
    learnt = Learnt()
    if critic is None or values is None:
        yield learnt
        return
    update = asyncio.create_task(critic.update(values), name="the critic's update")
    try:
        yield learnt
        learnt.update = await update
    finally:
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except (NotReady, ServerError, InvalidData) as error:
        why = f"{error.what} {error.why}".strip()
        raise CriticFailed(f"The critic's process gave no answer to '{what}'.", why) from error
