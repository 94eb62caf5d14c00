"""A batch as it comes over the wire.

Owns: the form of the reply to a question for a batch, its translation to `types.Group`.
Never: asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from halteres.types import Batch, Group, Span


class Element(msgspec.Struct):
    """A group of a batch, as far as our trainer reads it."""

    tokens: tuple[tuple[int, ...], ...]
    masks: tuple[tuple[int, ...], ...]
    scores: tuple[float, ...]
    inference_logprobs: tuple[tuple[float, ...], ...] | None = None
    overrides: tuple[dict[str, Any], ...] | None = None
    policy_version: int | tuple[tuple[int, int], ...] | None = None
    episodes: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int, int, float], ...] | None = None
    advantages: tuple[tuple[float, ...], ...] | None = None
    ref_logprobs: tuple[tuple[float, ...], ...] | None = None
    env_id: int | None = None
    generation_params: dict[str, Any] | None = None

    def as_group(self) -> Group:
        """The group, with a span of versions per sequence, or none."""
        version = self.policy_version
        return Group(
            tokens=self.tokens,
            masks=self.masks,
            scores=self.scores,
            logprobs=self.inference_logprobs or (),
            versions=((version, version),) * len(self.tokens) if isinstance(version, int) else version or (),
            overrides=self.overrides or (),
            episodes=self.episodes or (),
            spans=tuple(
                Span(sequence=sequence, start=start, stop=stop, reward=reward)
                for sequence, start, stop, reward in self.spans or ()
            ),
            advantages=self._aligned(self.advantages),
            ref_logprobs=self._aligned(self.ref_logprobs),
            env_id=self.env_id,
            is_truncated=_truncates(self.generation_params or {}),
        )

    def _aligned(self, rows: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...]:
        """Numbers per token; none where they do not fit the tokens, as the server lets them."""
        fits = rows is not None and [*map(len, rows)] == [*map(len, self.tokens)]
        return rows if rows is not None and fits else ()


def _truncates(sampling: Mapping[str, Any]) -> bool:
    """True where these parameters leave out a token that the model might have said."""
    bounds = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
    return any(sampling.get(name) not in all_tokens for name, all_tokens in bounds.items())


class BatchReply(msgspec.Struct):
    """GET /batch."""

    batch: tuple[Element, ...] | None
    batch_id: int | None = None
    lease_expires: float | None = None  # unix s, where it was leased
    run_id: str | None = None  # these two: as in `types.Batch`
    num_stale: int | None = None
    status: str = ""
    message: str = ""

    def as_batch(self) -> Batch | None:
        """The batch; None where there is none yet."""
        if not self.batch:
            return None
        return Batch(
            groups=tuple(element.as_group() for element in self.batch), run_id=self.run_id, num_stale=self.num_stale
        )


decoder = msgspec.json.Decoder(BatchReply)
