"""Scores over HTTP: the client of a reward server (`halteres reward serve`), from here or
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from halteres.clients.json_client import JsonClient
from halteres.clients.trajectories.address import Address
from halteres.config import environ
from halteres.errors import NotReady, ServerError, boundary
from halteres.scores import Output, Scorable, Score
from halteres.tokenizer import Message

MOST_ITEMS = 256  # texts of one request

log = logging.getLogger(__name__)


class RewardClient(JsonClient):
    """One reward server: a `Scorer`.

    Args:
        url: its address, with or without /v1. The key that the server asks for is the password in
            it (`http://any:KEY@HOST:PORT`), else HALTERES_REWARD_KEY.
        output: in which units scores come: `raw` of the head, `standardised` or `probability` by
            its calibration.
        model: which of its models; None: its first.
        timeout_s: of one call, however often its requests are sent again.
        waits_for_start: whether a server that refuses connections is waited for; otherwise it is
            NotFound at once.
    """

    def __init__(
        self,
        url: str,
        *,
        output: Output = "standardised",
        key: str = "",
        model: str | None = None,
        timeout_s: float = 300,
        waits_for_start: bool = True,
    ) -> None:
        address = Address.of(url, environ.reward_key)
        super().__init__(
            address.url.removesuffix("/v1"),
            api_key=key or address.token or "",
            timeout_s=None,
            ready_within_s=timeout_s,
            repeatable=True,
            waits_for_start=waits_for_start,
        )
        self.name, self.output, self.model, self.timeout_s = self.root, output, model, timeout_s
        # in which the server answered: raw ones of a model without calibration
        self.units: Output | None = None

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        """One score per text, in order; None where the server could not score it: it says why, and
        the log too.

        Raises:
            InvalidData: the server refuses the request.
            NotFound: no server is there, and it is not waited for.
            NotReady: it cannot be reached, or is busy, until the deadline.
            ServerError: it failed.
        """
        async with self._deadline():
            parts = [
                texts[start : start + MOST_ITEMS] for start in range(0, len(texts), MOST_ITEMS)
            ]
            return [score for part in parts for score in await self._score(part)]

    async def health(self) -> dict[str, Any]:
        """What the server says of itself: its models, their digests, its queue. Asked once.

        Raises:
            NotReady: it does not answer, or is not ready.
        """
        async with self._deadline():
            answer = await self.get("/health")
        if not isinstance(answer, dict):
            raise ServerError(
                f"{self.root}/health answered {type(answer).__name__}, not an object."
            )
        return answer

    async def _score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        model = {} if self.model is None else {"model": self.model}
        body = {"items": [_item(text) for text in texts], **model, "output": self.output}
        answer = await self.post_when_ready("/score", body)
        with boundary(ServerError, "Reading the answer of /score"):
            scores: list[Score | None] = []
            for item in answer["items"]:
                figures = {
                    "value": item.get("score"),
                    "num_tokens": item.get("tokens", 0),
                    "disagreement": None,
                }
                scores.append(
                    None if "error" in item else msgspec.convert({**item, **figures}, Score)
                )
            self.units = answer.get("output")
        if len(scores) != len(texts):
            raise ServerError(f"{self.root}/score answered {len(scores)} items, not {len(texts)}.")
        failed = [item["error"] for item in answer["items"] if "error" in item]
        if failed:
            log.warning(
                "%s could not score %d of %d texts: %s",
                self.root,
                len(failed),
                len(texts),
                failed[0],
            )
        return scores

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError as error:
            what, why = (
                f"The reward server {self.root} gave no scores.",
                f"It had {self.timeout_s:g} s.",
            )
            raise NotReady(what, why, "Look at its log.") from error


async def score(
    url: str,
    texts: Sequence[Scorable],
    *,
    output: Output = "standardised",
    key: str = "",
    timeout_s: float = 300,
) -> list[Score | None]:
    """Score once, over connections of its own; a server that is not there is not waited for. Raises
    as `RewardClient.score` does.
    """
    async with RewardClient(
        url, output=output, key=key, timeout_s=timeout_s, waits_for_start=False
    ) as client:
        return await client.score(texts)


def _item(text: Scorable) -> dict[str, Any]:
    """What is not there is not sent: a server of an older version knows no tools."""

    def plain(side: str | Sequence[Message] | None) -> Any:
        return (
            side if side is None or isinstance(side, str) else [dict(message) for message in side]
        )

    item: dict[str, Any] = {"prompt": plain(text.prompt), "completion": plain(text.completion)}
    if text.tools:
        item["tools"] = [dict(tool) for tool in text.tools]
    if text.template_arguments:
        item["chat_template_kwargs"] = dict(text.template_arguments)
    return item
