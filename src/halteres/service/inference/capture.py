"""How a gateway session sees the calls that are made in it: what it gives them, and what it gets.

Dialects know nothing of it. A chat, a text or tokens become a prompt (`Capture.prompt`), a request
is sampled as the session says (`version`, `sampling`), and what is sampled is recorded before a
client has it (`recorded`). `service.gateway` implements these protocols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from halteres.engine.protocol import SampleResult
from halteres.service.inference.requests import (
    Chat,
    InferenceRequest,
    Prompt,
    SamplingFields,
)
from halteres.service.keys import Tenant

if TYPE_CHECKING:
    from halteres.service.inference.answering import Output


class Origin(Protocol):
    """What a session made a prompt of, for itself alone."""


class Record(Protocol):
    """One request in a session's journal."""

    @property
    def seed(self) -> int:
        """Of its first prompt."""
        ...

    @property
    def stored(self) -> Sequence[SampleResult] | None:
        """What was sampled for this very request before, of each prompt; None: it is to be sampled
        now.
        """
        ...

    def add(self, output: Output) -> None:
        """A sequence of the answer, or its next piece."""
        ...

    async def keep(self) -> None:
        """All sequences are whole: return once the journal has them. NotReady where it cannot be
        written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Unkept:
    """The record of a call outside of any gateway session: what is sampled is kept by nobody."""

    seed: int
    stored: None = None

    def add(self, output: Output) -> None:
        """Nothing."""

    async def keep(self) -> None:
        """Nothing."""


class Capture(Protocol):
    """One call within a session."""

    @property
    def model(self) -> str | None:
        """The name of the weights to sample from; None: the run's policy."""
        ...

    @property
    def version(self) -> int | None:
        """The policy version to sample from; None: the newest."""
        ...

    def prompt(
        self, given: Chat | str | list[int], context: int, *, special: bool | None
    ) -> Prompt:
        """The prompt that this becomes, `context` tokens at most: token ids that the session has
        sampled stay what they were. It may run in a thread. Raises as `Prompt.of` and `render`.
        """
        ...

    def sampling(self, asked: SamplingFields) -> SamplingFields:
        """How the session samples, where a client asks for this."""
        ...

    def recorded(self, request: InferenceRequest, seed: int) -> AbstractAsyncContextManager[Record]:
        """The journal has the request while the block runs, and then how it ended. `seed`: for a
        request that was not made before.
        """
        ...


class CapturedSession(Protocol):
    """A gateway session as the guard lets requests into it."""

    @property
    def tenant(self) -> Tenant:
        """Whose it is."""
        ...

    @property
    def policy_name(self) -> str:
        """The run that it samples from, or the base model."""
        ...

    async def call(self, path: str, headers: Mapping[str, str], body: bytes) -> Capture:
        """A call that comes now, to this path below the session. Raises where the session is over
        or holds as much as it may.
        """
        ...
