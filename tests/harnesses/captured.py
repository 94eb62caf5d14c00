"""An episode of a harness within a gateway session: what is trained on is what the engine gave.

The service is in the test's own process, so that its engine is seen (`EngineTap`); the harness has
nothing but the session's addresses and key. Answers are split into tokens as no tokenizer splits
them: whoever makes tokens from text again has others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from service.gateway.episodes import EngineTap, Episode, opened, trained
from service.inference_fixtures import Speaker, speaking

CONTEXT = 8192
"""Tokens that the model reads: most harnesses tell their tools at length."""


@dataclass(frozen=True, slots=True)
class CapturedEpisode:
    """A session, the engine behind it, and what the engine was asked for and gave."""

    session: Episode
    speaker: Speaker
    tap: EngineTap

    @property
    def openai_base_url(self) -> str:
        return self.session.opened["openai_base_url"]

    @property
    def key(self) -> str:
        return self.session.opened["api_key"]

    @property
    def variables(self) -> dict[str, str]:
        """What a program's clients read."""
        opened = self.session.opened
        return {
            "OPENAI_BASE_URL": opened["openai_base_url"],
            "OPENAI_API_KEY": opened["api_key"],
            "ANTHROPIC_BASE_URL": opened["anthropic_base_url"],
            "ANTHROPIC_API_KEY": opened["api_key"],
        }

    async def nodes(self) -> list[dict[str, Any]]:
        """The calls, as the session's owner sees them."""
        return (await self.session.view())["nodes"]

    async def check_tokens(self) -> None:
        """Every call is a turn: its prompt and what was sampled are the engine's, token by token,
        and so are the log-probabilities, bit for bit; nothing else is trained on.
        """
        await self.session.reward(reward=1.0)
        found = await self.session.sequences()
        given = [(one.tokens, one.logprobs) for one in self.tap.samplings]
        assert given
        assert trained(found) == given
        for turn, sampling in zip(found["turns"], self.tap.samplings, strict=True):
            sequence = found["sequences"][turn["sequence"]]
            assert sequence["tokens"][: turn["start"]] == sampling.prompt
        masks = [mask for sequence in found["sequences"] for mask in sequence["masks"]]
        assert sum(mask >= 0 for mask in masks) == sum(len(tokens) for tokens, _ in given)


@asynccontextmanager
async def captured(
    folder: Path, says: str, says_to_results: str | None = None, **opening: Any
) -> AsyncIterator[CapturedEpisode]:
    """A session of a model that says this, and something else to a tool's result. Its template has
    no place for tools. `opening`: fields of the session.
    """
    async with speaking(folder, says, template=None, context=CONTEXT) as (scene, speaker):
        speaker.says_to_results = says_to_results
        speaker.varied = np.random.default_rng(0)
        tap = EngineTap(scene)
        yield CapturedEpisode(await opened(scene, **opening), speaker, tap)
