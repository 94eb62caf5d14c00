"""What OpenAI-shaped answers have around their choices.

Owns: id, time, model, usage, policy version; the same id in every chunk of a stream.
Never: shapes a choice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halteres.service.inference.written import Written


@dataclass(slots=True, kw_only=True)
class Count:
    """Tokens and policy versions of an answer, as far as it is written."""

    prompts: dict[int, int] = field(default_factory=dict)  # tokens, by the place of a prompt's first sequence
    completion: int = 0
    versions: set[int] = field(default_factory=set)

    def add(self, one: Written) -> None:
        """Count a sequence, or a piece of one."""
        self.prompts[one.place - one.sample] = len(one.prompt.tokens)
        self.completion += len(one.tokens)
        self.versions.add(one.version)

    @staticmethod
    def of(written: Sequence[Written]) -> Count:
        """Of a whole answer."""
        count = Count()
        for one in written:
            count.add(one)
        return count

    @property
    def prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(self.prompts.values())

    @property
    def usage(self) -> dict[str, int]:
        """OpenAI's."""
        both = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": both}

    @property
    def policy_version(self) -> list[int]:
        """Smallest and largest."""
        return [min(self.versions, default=0), max(self.versions, default=0)]


class Envelope:
    """One answer's, or all chunks' of a stream."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        created = int(time.time())
        self._facts = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": created, "model": model}

    def whole(self, choices: Sequence[Any], count: Count) -> dict[str, Any]:
        """An answer."""
        return {**self._facts, "choices": choices, "usage": count.usage, "policy_version": count.policy_version}

    def chunk(self, choice: dict[str, Any], count: Count) -> dict[str, Any]:
        """A piece; the last of a choice carries the policy version."""
        chunk = {**self._facts, "choices": [choice]}
        return chunk if choice["finish_reason"] is None else {**chunk, "policy_version": count.policy_version}

    def usage(self, count: Count) -> dict[str, Any]:
        """The chunk without choices that ends a stream whose client asked for it."""
        return self.whole([], count)
