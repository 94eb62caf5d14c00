"""docs/environments.md: success by a tag of the task is measured and shown as the page says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from statistics import fmean

import pytest
from agent.run_fixtures import RUN, add_step, make_run, supervised, told
from environments.fakes import Trainer, at_work, inference_server, server

from halteres.environments.single_turn import SingleTurnEnv
from halteres.observe.metrics import read_rows
from halteres.runs.reading.rollouts import recorded_groups

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[SingleTurnEnv]:
    """The page's environment, from its two files."""
    for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        if name := re.match(r'"""(\w+\.py)', text):
            (tmp_path / name[1]).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return runpy.run_path(str(tmp_path / "tagged.py"), run_name="tagged")["TaggedEnv"]


async def test_success_by_a_tag_is_the_mean_over_the_answers_that_have_it(
    tagged: type[SingleTurnEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training, in an evaluation, in a status, and next to a step's rollouts."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    run = make_run()
    changes = {"group_size": 2, "max_new_tokens": 64, "max_token_length": 256, "eval_tasks": 40}
    settings = tagged.env_config_cls(
        **changes, eval_samples=1, ensure_scores_are_not_same=False, run_dir=str(run.path)
    )
    trainer = Trainer(batch_size=64, group_size=2)
    async with inference_server() as inference:
        # every product is right whose factors are equal, or end in an even digit
        inference.answer = lambda prompt, digest: answered(prompt)
        env = tagged(settings, [server(inference)])
        async with at_work(env, trainer):
            await trainer.until(lambda: len(trainer.batches) == 1)
            trainer.ask()
            await trainer.until(lambda: len(trainer.batches) == 2)
            await trainer.until(lambda: bool(list(read_rows(run.path / "metrics.jsonl"))))
            evaluated = await env.evaluate()

    groups = recorded_groups(run.path / "rollouts" / "step_1.jsonl")
    by_tag = {
        tag: fmean(group.completions[0].score for group in groups if tag_of(group.item) == tag)
        for tag in ("easy", "hard")
    }
    assert 0 < by_tag["hard"] < 1 and by_tag["easy"] != by_tag["hard"]
    row = next(iter(read_rows(run.path / "metrics.jsonl")))
    measured = {tag: row[f"train/correct_{tag}"] for tag in by_tag}
    assert (row["step"], measured) == (1, pytest.approx(by_tag))

    items = env.eval_items()
    for tag in by_tag:
        tasks = [item for item in items if tag_of(item) == tag]
        assert evaluated[f"eval/correct_{tag}"] == pytest.approx(fmean(map(is_solved, tasks)))

    shown = (await told("rl_get_rollouts", run_id=RUN, step=1))["figures"]
    assert shown["train/correct_hard"] == pytest.approx(by_tag["hard"], abs=1e-3)
    add_step(run, 1)  # the trainer's own row
    with supervised(run):
        trend = (await told("rl_check_status", run_id=RUN))["trend"]
    assert trend["train/correct_hard"].startswith(f"{by_tag['hard']:.3g}->")


def tag_of(item: tuple[int, int]) -> str:
    return "hard" if min(item) > 5 else "easy"


def is_solved(item: tuple[int, int]) -> bool:
    return item[0] == item[1] or item[1] % 2 == 0


def answered(prompt: str) -> str:
    a, b = map(int, re.findall(r"(\d+) \* (\d+)", prompt)[0])
    return f"\\boxed{{{a * b if is_solved((a, b)) else 0}}}."
