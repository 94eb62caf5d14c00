"""Checks of what gives rewards, before a policy learns to exploit it: rubrics read, verifiers tried
on odd answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from halteres.errors import HalteresError
from halteres.rewards.components import Rubric
from halteres.rewards.functions import RewardFunction, Sample

ALLOWED = ("boxless",)  # an odd answer that may be paid: the right one in another form
_TWO_THINGS = re.compile(r"\b(?:and(?!/or)|as well as)\b|[;&]|\?.*\?", re.IGNORECASE | re.DOTALL)
_BETTER = {
    "yes",
    "good",
    "right",
    "correct",
    "complete",
    "excellent",
    "always",
    "fully",
    "true",
    "high",
}
_WORSE = {
    "no",
    "not",
    "bad",
    "wrong",
    "incorrect",
    "incomplete",
    "poor",
    "never",
    "false",
    "low",
    "none",
    "missing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a policy could exploit, or that spoils a reward."""

    # compound_criterion, reversed_choices, unequal_weights, pays_for_nothing, pays_for_prompt,
    # fails
    code: str
    subject: str  # the criterion, or the odd answer
    why: str


def odd_answers(prompt: str, reference: str = "") -> dict[str, str]:
    """Answers that models give sooner or later; all but the right one without its box are worth
    nothing.
    """
    bare = {}
    if reference:
        bare = {"boxless": reference}
    return {
        "empty": "",
        "blank": " \n\t",
        **bare,
        "no_answer": "I do not know.",
        "open_box": "So it is \\boxed{",
        "prompt": prompt,
        "symbols": "\x00 \N{PILE OF POO} \u202e \\frac{}{} {{{ <answer>",
        "scripts": "Я не знаю. わかりません。 لا أعرف. 我不知道。",
        "long": "1 " * 20_000,
    }


def check_rubric(rubric: Rubric) -> list[Finding]:
    """Criteria that ask for two things at once, whose choices run from best to worst, or of which
    one decides alone.
    """
    found: list[Finding] = []
    for one in rubric.criteria:
        if (two := _TWO_THINGS.search(one.text)) is not None:
            sign = "? … ?"
            if not two.group().startswith("?"):
                sign = two.group()
            why = f"'{sign}' joins two questions, to which one grade cannot do justice: split it."
            found.append(Finding(code="compound_criterion", subject=one.name, why=why))
        levels: list[int] = []  # -1 for a choice that is bad by its words, 1 for a good one
        for choice in one.choices:
            words = set(re.findall(r"[a-z]+", choice.lower()))
            if words & (_WORSE | _BETTER):
                levels.append(-1 if words & _WORSE else 1)
        if any(first > second for first, second in pairwise(levels)):
            why = (
                f"Choices run from worst to best, and '{one.choices[0]}' stands before "
                f"'{one.choices[-1]}'."
            )
            found.append(Finding(code="reversed_choices", subject=one.name, why=why))
    whole = sum(one.weight for one in rubric.criteria)
    for one in rubric.criteria:
        if len(rubric.criteria) > 2 and one.weight > 0.8 * whole:
            why = f"It has {one.weight / whole:.0%} of the weight: the others hardly count."
            found.append(Finding(code="unequal_weights", subject=one.name, why=why))
    return found


def check_answers(
    scores: Mapping[str, float | str | None], paid_above: float = 0.0
) -> list[Finding]:
    """What is wrong with a verifier, by its scores of odd answers; a text is why there is none."""
    found: list[Finding] = []
    for name, score in scores.items():
        if isinstance(score, str):
            found.append(Finding(code="fails", subject=name, why=score))
        elif score is not None and score > paid_above and name not in ALLOWED:
            code = "pays_for_nothing"
            if name == "prompt":
                code = "pays_for_prompt"
            found.append(
                Finding(
                    code=code, subject=name, why=f"It pays {score:g} for an answer that is none."
                )
            )
    return found


async def function_scores(
    function: RewardFunction,
    prompt: str,
    reference: str = "",
    columns: Mapping[str, Any] | None = None,
) -> dict[str, float | str | None]:
    """What a reward function gives for odd answers to a prompt; a text is what it raised."""
    found: dict[str, float | str | None] = {}
    for name, text in odd_answers(prompt, reference).items():
        question, answer = (
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": text},
        )
        try:
            (found[name],) = await function(
                dict(columns or {}), [Sample(prompt=(question,), completion=(answer,))]
            )
        except HalteresError as error:
            found[name] = error.sentence
        except Exception as error:  # noqa: BLE001 - the user's code, which is what is tried here
            found[name] = f"{type(error).__name__}: {error}"
    return found
