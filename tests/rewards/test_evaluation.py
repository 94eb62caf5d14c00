"""Evaluation: the figures of scorers whose scores are known."""

from __future__ import annotations

from typing import Any

import pytest

from halteres.errors import InvalidData
from halteres.rewards.evaluation import PROBED, TEXTS_AT_ONCE, evaluate
from halteres.rewards.model_folder import RewardFile, ScoringTemplate
from halteres.rewards.preferences import read_preferences, read_rewardbench
from halteres.rewards.scorer import Ensemble
from halteres.scores import Scorable, Score
from rewards.scorers import Scripted


def number(text: str) -> float:
    """A scorer that scores "a 3" with 3."""
    return float(text.split()[-1])


def pair(chosen: object, rejected: object, **more: Any) -> dict[str, Any]:
    return {"prompt": "?", "chosen": f"a {chosen}", "rejected": f"b {rejected}", **more}


async def test_pairs_are_counted_overall_and_by_kind() -> None:
    rows = [pair(n + 1, n, kind="easy") for n in range(40)] + [
        pair(n % 2, (n + 1) % 2, kind="hard") for n in range(20)
    ]
    found = await evaluate(
        Scripted(number), read_preferences([*rows, pair(1, 2, kind="hard", tie=True)])
    )
    assert (found.overall.accuracy.value, found.overall.accuracy.count) == (50 / 60, 60)
    assert {kind: figures.accuracy.value for kind, figures in found.by_kind.items()} == {
        "easy": 1.0,
        "hard": 0.5,
    }
    assert found.warnings[0].startswith(
        "Kind 'hard': 50.0% of 20, too few to tell from a coin (29.9% to 70.1%)"
    )
    assert not any("easy" in warning for warning in found.warnings)
    assert [(pair.lead, pair.scored.comparison.row) for pair in found.mistakes[:2]] == [
        (-1.0, 41),
        (-1.0, 43),
    ]


async def test_what_is_no_better_than_a_coin_is_told_from_what_is_too_few_to_say() -> None:
    one, many = [
        await evaluate(Scripted(number), read_preferences(rows))
        for rows in ([pair(2, 1)], [pair(n % 2, (n + 1) % 2) for n in range(30)])
    ]
    assert one.warnings == ("Overall: 100.0% of 1, too few to tell from a coin (20.7% to 100.0%).",)
    assert many.warnings[0].startswith("Overall: 50.0% of 30 is no better than a coin")


@pytest.mark.parametrize("in_steps", [False, True])
async def test_a_model_that_was_trained_on_the_other_form_is_noted(in_steps: bool) -> None:
    steps = {"prompt": "?", "completions": ["a 1", "b -1"], "labels": [True, False]}
    rows = read_preferences([steps if in_steps else pair(2, 1)] * 30)
    template = ScoringTemplate(form="standard", eos_token="<end>")
    for data, noted in (
        ({"in_steps": in_steps}, False),
        ({"in_steps": not in_steps}, True),
        ({}, False),
    ):
        found = await evaluate(
            Scripted(number), rows, stored=RewardFile(template=template, data=data), probe=False
        )
        assert any("was trained on" in warning for warning in found.warnings) == noted


async def test_an_ensemble_is_not_evaluated_on_steps() -> None:
    steps = {"prompt": "?", "completions": ["a 1", "b -1"], "labels": [True, False]}
    both = Ensemble([Scripted(number), Scripted(number)])
    with pytest.raises(InvalidData, match="An ensemble cannot be evaluated on steps"):
        await evaluate(both, read_preferences([steps]))


async def test_a_text_that_could_not_be_scored_is_counted_and_is_never_wrong() -> None:
    scorer = Scripted(lambda text: None if "99" in text else number(text))
    found = await evaluate(scorer, read_preferences([pair(2, 1), pair(99, 1)]))
    assert (found.num_unscored, found.overall.accuracy.count, found.overall.accuracy.value) == (
        1,
        1,
        1.0,
    )
    with pytest.raises(InvalidData, match="0 of 1 comparisons could be scored"):
        await evaluate(scorer, read_preferences([pair(99, 1)]))


async def test_groups_have_best_of_n_and_kendalls_tau() -> None:
    rows = [
        {"prompt": "?", "completions": ["a 3", "b 2", "c 1", "d 0"], "ranks": [0, 1, 2, 3]},
        {"prompt": "!", "completions": ["a 1", "b 2", "c 3", "d 4"], "ranks": [0, 1, 2, 3]},
    ]
    found = await evaluate(Scripted(number), read_preferences(rows))
    assert found.groups is not None
    assert (found.groups.best_of_n, found.groups.random_best_of_n, found.groups.kendall_tau) == (
        0.5,
        0.25,
        0.0,
    )
    assert (found.overall.accuracy.value, found.overall.accuracy.count) == (0.5, 12)


async def test_a_scorer_of_length_is_found_out() -> None:
    rows = [{"prompt": str(n), "chosen": "long enough", "rejected": "short"} for n in range(3)]
    rows += [{"prompt": str(n), "chosen": "yes", "rejected": "by no means"} for n in range(3)]
    found = await evaluate(Scripted(lambda text: float(len(text))), read_preferences(rows))
    assert (found.length.chosen_longer.value, found.length.chosen_shorter.value) == (1.0, 0.0)
    assert found.length.spearman == found.length.spearman_within == pytest.approx(1.0)
    assert any("longer texts score higher" in warning for warning in found.warnings)


class Leaky(Scripted):
    """Its scores depend on what else is in the call."""

    async def close(self) -> None: ...

    async def score(self, texts: Any) -> list[Score | None]:
        scores = await super().score(texts)
        return [score and Score(value=score.value + 0.01 * len(texts)) for score in scores]


async def test_a_score_that_depends_on_its_batch_fails_its_probe() -> None:
    rows = [pair(n + 1, n) for n in range(20)]
    steady, leaky = [
        await evaluate(kind(number), read_preferences(rows)) for kind in (Scripted, Leaky)
    ]
    assert [probe.name for probe in steady.probes] == ["alone", "beside_longer"]
    assert all(probe.passed and probe.num_texts == 2 * PROBED for probe in steady.probes)
    assert not any(probe.passed for probe in leaky.probes)
    assert leaky.probes[0].mean_shift == pytest.approx(0.01 - 0.40)
    assert any("Probe 'alone'" in warning for warning in leaky.warnings)


async def test_what_the_end_token_and_the_template_do_to_scores_is_probed() -> None:
    """This scorer does not know its own end token, and adds 1 to every message."""

    class Templated(Scripted):
        async def close(self) -> None: ...

        async def score(self, texts: Any) -> list[Score | None]:
            scores = await super().score(texts)
            pairs = zip(texts, scores, strict=True)
            return [
                s and Score(value=s.value + (not isinstance(text.completion, str)))
                for text, s in pairs
            ]

    scorer = Templated(lambda text: len(text) / 8)
    said = {"role": "assistant", "content": "yes"}
    chat = {
        "chosen": [said],
        "rejected": [{**said, "content": "n"}],
        "prompt": [{"role": "user", "content": ""}],
    }
    template = ScoringTemplate(form="standard", eos_token="<end>")
    stored = RewardFile(template=template)
    texts = await evaluate(scorer, read_preferences([pair(1, 22)]), stored=stored)
    assert [(probe.name, probe.passed) for probe in texts.probes][-1] == ("with_end_token", False)
    (*_, probe) = (await evaluate(scorer, read_preferences([chat]))).probes
    assert (probe.name, probe.passed, probe.mean_shift) == (
        "without_template",
        True,
        pytest.approx(1 / 8 - 1),
    )
    assert probe.scale_ratio == pytest.approx(1.0)


async def test_calls_are_bounded() -> None:
    scorer = Scripted(number)
    await evaluate(
        scorer, read_preferences([pair(n + 1, n) for n in range(TEXTS_AT_ONCE)]), probe=False
    )
    assert scorer.calls == [TEXTS_AT_ONCE, TEXTS_AT_ONCE]


async def test_token_ids_are_refused() -> None:
    with pytest.raises(InvalidData, match="Row 1 holds token ids"):
        await evaluate(
            Scripted(number), read_preferences([{"chosen_ids": [1], "rejected_ids": [2]}])
        )


async def test_tools_of_a_row_reach_the_scorer() -> None:
    seen: list[Scorable] = []

    class Watching(Scripted):
        async def close(self) -> None: ...

        async def score(self, texts: Any) -> list[Score | None]:
            seen.extend(texts)
            return await super().score(texts)

    tools = [{"type": "function"}]
    rows = read_preferences([pair(1, 0, tools=tools, chat_template_kwargs={"thinking": False})])
    await evaluate(Watching(number), rows, probe=False)
    assert [text.tools for text in seen] == [tuple(tools)] * 2
    assert seen[0].template_arguments == {"thinking": False}


def answers(*numbers: float) -> list[str]:
    return [f"answer {number}" for number in numbers]


async def test_rewardbench_2_is_read_and_scored() -> None:
    rows = [
        {
            "id": "1",
            "prompt": "q",
            "chosen": answers(5),
            "rejected": answers(1, 2, 3),
            "subset": "Math",
        },
        {
            "id": "2",
            "prompt": "r",
            "chosen": answers(5),
            "rejected": answers(1, 5.0, 3),
            "subset": "Focus",
        },
        {
            "id": "ref:7",
            "prompt": "s",
            "chosen": answers(3),
            "rejected": answers(1, 0),
            "subset": "Ties",
        },
        {
            "id": "tied:7",
            "prompt": "s",
            "chosen": answers(4, 3.5),
            "rejected": answers(1.5, 0),
            "subset": "Ties",
        },
    ]
    preferences = read_rewardbench(
        [{**row, "num_correct": len(row["chosen"]), "models": ["m"]} for row in rows]
    )
    assert preferences.form == "conversational"
    found = (await evaluate(Scripted(number), preferences)).benchmark
    assert found is not None and found.ties is not None
    assert (found.by_subset["Math"], found.by_subset["Focus"]) == (1.0, 0.5)
    assert found.by_subset["Ties"] == pytest.approx(1.0 + 0.01 * found.ties.mean_excess)
    assert found.overall == pytest.approx(sum(found.by_subset.values()) / 3)


async def test_rewardbench_1_is_read_as_conversations() -> None:
    row = {
        "id": 30,
        "prompt": "q",
        "chosen": "answer 2",
        "rejected": "answer 1",
        "subset": "alpacaeval-easy",
    }
    found = await evaluate(Scripted(number), read_rewardbench([{**row, "chosen_model": "m"}]))
    assert (found.by_kind["alpacaeval-easy"].accuracy.value, found.benchmark) == (1.0, None)
