"""How long prompts and answers of a run will be.

Owns: the noun `Lengths`; reading them off a test's groups; what is assumed where nothing was tried.
Never: runs anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halteres.agent.starting.estimate_range import Span
from halteres.agent.trial.tests_store import TestOutcome
from halteres.runs.starting.workload import Workload

CONTEXT = -100
"""A group's mask on tokens that the policy did not write (atroposlib's)."""

PROMPT_TOKENS = Span(32, 256)
"""Assumed of prompts that nobody has seen yet."""

SHORTEST_ANSWER = 0.25
"""Of the limit: assumed of answers, likewise."""

TRAINED_ANSWERS = (0.6, 1.3)
"""By what factor answers may become shorter or longer in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean tokens of one rollout."""

    prompt: Span
    answer: Span
    longest: int  # tokens that both together may have
    source: str  # in words

    @property
    def sequence(self) -> Span:
        """Prompt and answer."""
        return (self.prompt + self.answer).within(1, self.longest)


class _Group(msgspec.Struct):
    """One line of a test's groups."""

    masks: list[list[int]]


def assumed(work: Workload) -> Lengths:
    """Where nothing is known but the limits."""
    answer = Span(SHORTEST_ANSWER * work.answer_tokens, work.answer_tokens)
    prompt = PROMPT_TOKENS.within(1, max(1, work.positions - answer.low))
    source = (
        f"prompts of {prompt.low:g} to {prompt.high:g} and answers of {answer.low:g} to {answer.high:g} tokens assumed"
    )
    return Lengths(prompt=prompt, answer=answer, longest=work.positions, source=source)


def tested(outcome: TestOutcome, work: Workload) -> Lengths | None:
    """As a test's groups had them; None where its files are gone."""
    pairs = list(_read(outcome.output_file))
    if not pairs:
        return None
    prompt, answer = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return Lengths(
        prompt=Span(prompt, prompt).wider(0.9, 1.1),
        answer=Span(answer, answer).wider(*TRAINED_ANSWERS).within(1, work.answer_tokens),
        longest=work.positions,
        source=f"{len(pairs)} rollouts of test {outcome.test_id}",
    )


def _read(file: Path) -> Iterator[tuple[int, int]]:
    """Prompt and answer tokens of every rollout in a file of groups."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            group = msgspec.json.decode(line, type=_Group)
        except msgspec.DecodeError:
            continue
        for mask in group.masks:
            context = sum(token == CONTEXT for token in mask)
            yield context, len(mask) - context
