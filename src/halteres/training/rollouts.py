"""The rollouts of a batch to look at, for environments that write none: rollouts/step_N.jsonl.

Owns: one line for each group, in the form in which our own environments write theirs.
Never: ends a run because a file cannot be written, or a foreign group not be decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.errors import boundary
from halteres.observe.metrics import WriteFailed, append_row
from halteres.text import Tokenizer
from halteres.types import CONTEXT_LOGPROB, Batch, Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Writes the groups of each step."""

    folder: Path  # rollouts/
    tokenizer: Tokenizer  # of the base model

    def write(self, step: int, batch: Batch) -> None:
        """Append the groups of this step's batch."""
        try:
            with boundary(WriteFailed, "The rollouts of a batch could not be written down"):
                for number, group in enumerate(batch.groups):
                    if group.tokens:
                        append_row(self.folder / f"step_{step}.jsonl", {"group": number, **self._line(group)})
        except WriteFailed as error:  # the metrics' next row meets the same disk, and speaks for the run
            logger.warning("%s", error.sentence)

    def _line(self, group: Group) -> dict[str, Any]:
        actions = [_actions(tokens, logprobs) for tokens, logprobs in zip(group.tokens, group.logprobs, strict=True)]
        prompt = group.tokens[0][: actions[0][0]] if actions[0] else group.tokens[0]
        return {
            "item": None,  # what the environment was asked is not part of a group
            "prompt": self.tokenizer.decode(prompt, skip_special_tokens=False),
            "completions": [
                self._completion([tokens[place] for place in places], score)
                for tokens, places, score in zip(group.tokens, actions, group.scores, strict=True)
            ],
            "failures": [],
        }

    def _completion(self, tokens: Sequence[int], score: float) -> dict[str, Any]:
        ended = bool(tokens) and tokens[-1] in self.tokenizer.eos_token_ids
        finish = "stop" if ended else "length"
        return {"text": self.tokenizer.decode(tokens), "score": score, "tokens": len(tokens), "finish": finish}


def _actions(tokens: Sequence[int], logprobs: Sequence[float]) -> list[int]:
    """Places of the sampled tokens."""
    return [place for place in range(len(tokens)) if logprobs[place] != CONTEXT_LOGPROB]
