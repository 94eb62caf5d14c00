"""What the files of a test come to: figures, whether one can train on them, an answer that fits."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from halteres.agent.trial import folder as test_folder
from halteres.agent.trial.folder import TestFolder, find_test
from halteres.agent.trial.outcome import Ended
from halteres.agent.trial.relay import Traffic
from halteres.agent.trial.report import BUDGET, Steps, brief, report
from halteres.agent.trial.request import Request, TestedModel
from halteres.agent.trial.tester import exited, folded, timed_out
from halteres.config.program import EnvironmentProgram
from halteres.errors import NotFound
from halteres.next_step import for_agents
from halteres.observe.metrics import append_row
from halteres.runs.reading.failures import frame_in
from halteres.runs.state import lock_taken

TRUNCATED = Ended(seconds=2.0, traffic=Traffic(completions=10, truncated=5, tokens=400, busy_s=2.0))
WELL = Ended(seconds=2.0, traffic=Traffic(completions=10, tokens=400, busy_s=2.0))
BROKEN = Ended(error="Process exited with code 1", why="ValueError: no.", fault="environment")
BLAME = "too hard, or the scorer in mine.py is at fault: read the samples"
DIFFER = "1 of 2 groups have answers of different scores"
NOBODY = "no answer is right, if a right one scores 1"
SILENT = Ended(error="Process exited with code 1", why="the endpoint answered 500.", fault="model")


def model_of(model: str = "local:m") -> TestedModel:
    return TestedModel(
        model=model,
        name=model,
        scale="local" if model.startswith("local:") else "custom",
        base=model.removeprefix("local:"),
        tokenizer="/nowhere",
        stem=f"test_mine_{model.replace('/', '_')}",
        wandb_run="test_inference_RSIAgent_mine_00000000",
    )


class Written:
    """A test's folder, as its tester leaves it."""

    def __init__(self, home: Path, *models: TestedModel, **asked: Any) -> None:
        self.folder = TestFolder(home / "tests" / "t-0123abcd")
        self.folder.path.mkdir(parents=True)
        self.file = home / "mine.py"
        self.file.write_text(
            "from halteres.environments.base import BaseEnv\n\n\nclass Mine(BaseEnv): ...\n"
        )
        facts: dict[str, Any] = {"env": {"max_new_tokens": 64}, "num_steps": 3, "group_size": 4}
        is_foreign = asked.pop("is_foreign", False)
        facts["draft"] = "default"
        self.request = Request(
            program=EnvironmentProgram(
                name="mine",
                path=self.file,
                interpreter="/nowhere",
                working_directory=home,
                is_foreign=is_foreign,
            ),
            models=models or (model_of(),),
            base_model="m",
            created_at=time.time(),
            **{**facts, **asked},
        )
        self.folder.write("request.json", self.request)

    def groups(
        self, *scores: Sequence[float], one: TestedModel | None = None, answer: str = "text"
    ) -> Written:
        """Groups of these scores, with messages."""
        file = self.folder.groups(one or self.request.models[0])
        for group in scores:
            chats = [
                [
                    {"role": "user", "content": "Is it?"},
                    {"role": "assistant", "content": f"{answer} {score}"},
                ]
                for score in group
            ]
            append_row(file, {"scores": group, "messages": chats, "tokens": [[1]] * len(group)})
        return self

    def failures(self, *codes: str, one: TestedModel | None = None) -> Written:
        """A group that was given up, with these failures."""
        folder = self.folder.work(one or self.request.models[0]) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        failures = [{"code": code, "why": f"why of {code}."} for code in codes]
        append_row(folder / "step_1.jsonl", {"prompt": "", "completions": [], "failures": failures})
        return self

    def ended(self, how: Ended, one: TestedModel | None = None) -> Written:
        """One model is through."""
        stem = (one or self.request.models[0]).stem
        (self.folder.path / stem).mkdir(exist_ok=True)
        self.folder.write(f"{stem}/ended.json", how)
        return self

    def told(self, status: str = "done") -> dict[str, Any]:
        """The whole answer; it is JSON."""
        return json.loads(
            json.dumps(
                msgspec.to_builtins(report(self.folder, self.request, status)), allow_nan=False
            )
        )


Make = Callable[..., Written]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short, as people's paths are: answers with absolute paths are measured."""
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        yield Path(folder)


@pytest.fixture
def test_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return lambda *models, **asked: Written(tmp_path, *models, **asked)


def shown(whole: dict[str, Any]) -> dict[str, Any]:
    """The answer that a call gives."""
    told = brief(whole)
    return {**told, "next": for_agents(told["next"])}


def summary(written: Written) -> tuple[bool | None, str, str]:
    told = written.told()
    return (
        told["summary"]["trainable"],
        told["summary"]["why"],
        for_agents(msgspec.convert(told["next"], Steps)),
    )


def test_rewards_that_vary_within_a_group_can_be_trained_on(test_of: Make) -> None:
    written = test_of().groups([1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]).ended(WELL)
    assert summary(written) == (
        True,
        "1 of 3 groups have both good and bad answers.",
        "rl_start_training(dry_run=true)",
    )
    (one,) = written.told()["models_tested"]
    assert (one["accuracy"], one["mean_score"], one["score_range"]) == (0.5, 0.5, [0, 1])
    assert (one["groups_with_variance"], one["step_success_rate"], one["tokens_per_s"]) == (
        0.333,
        0.667,
        200,
    )


@pytest.mark.parametrize(
    ("groups", "trainable", "says"),
    [
        ([[1, 1], [1, 1]], False, "Too easy: all 4 answers are right."),
        ([[0, 0], [-1, -1]], False, "Too hard: none of 4 answers is right."),
        ([[0.5, 0.5], [0, 0]], False, "Within every group all answers score the same."),
        ([[0, 0], [0, 0]], False, f"All 4 scores are equal (0): {BLAME}."),
        ([[0.7, 0.6], [0, 0]], True, f"{DIFFER}."),
        ([[0.02, 0], [0, 0]], True, f"{DIFFER}, but the best is 0.02: {NOBODY}."),
        (
            [[-1, 0], [0, 0]],
            True,
            f"{DIFFER}, but the best is 0: no answer is right.",
        ),
        ([[1], [0]], None, "A group of one answer has no variance: ask for more."),
    ],
)
def test_rewards_that_do_not_vary_teach_nothing(
    test_of: Make, groups: list[list[float]], trainable: bool | None, says: str
) -> None:
    assert summary(test_of().groups(*groups).ended(WELL))[:2] == (trainable, says)


def test_where_everything_scores_the_same_the_scorer_is_to_be_read(test_of: Make) -> None:
    """It may know no right answer: the samples show two answers and what would have been right."""
    written = test_of().groups([0, 0, 0]).ended(WELL)
    one = written.request.models[0]
    file = written.folder.groups(one)
    chats = [
        [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": text}]
        for text in ("4", "4", "42")
    ]
    file.unlink()
    append_row(file, {"scores": [0, 0, 0], "messages": chats, "tokens": [[1]] * 3})
    rollouts = written.folder.work(one) / "rollouts"
    rollouts.mkdir()
    told = {
        "item": {"question": "6*7?", "answer": 42},
        "prompt": "",
        "completions": [{"text": "4"}],
        "failures": [],
    }
    append_row(rollouts / "step_1.jsonl", told)
    (sample,) = written.told()["samples"]
    assert ({sample["best"], sample["worst"]}, sample["reference"]) == ({"4", "42"}, "42")
    assert (
        summary(written)[2]
        == f"read {written.file} and {file}, mend or ease it, then rl_test_inference()"
    )


def test_partial_credit_is_none_where_the_environment_says_what_success_is(test_of: Make) -> None:
    written = test_of(env={"success_threshold": 0.1}).groups([0.2, 0.0]).ended(WELL)
    assert summary(written)[1] == "1 of 1 groups have both good and bad answers."


def test_a_line_that_is_said_again_and_again_is_told_once() -> None:
    said = [f"2026-01-01 10:00:00,00{number} env WARNING x: It failed." for number in range(4)]
    text = "\n".join([*said, "", "", "Traceback"])
    assert folded(text) == f"{said[0]} (4 times)\n\nTraceback"


def test_success_is_what_the_environment_says_it_is(test_of: Make) -> None:
    env = {"success_threshold": 0.6}
    written = test_of(env=env).groups([0.5, 0.7], [0.5, 0.9]).ended(WELL)
    assert written.told()["models_tested"][0]["accuracy"] == 0.5


def test_answers_that_are_cut_off_are_said_to_be_with_the_call_that_mends_it(test_of: Make) -> None:
    written = test_of().groups([0, 0], [0, 0]).ended(TRUNCATED)
    _, why, call = summary(written)
    assert why == f"All 4 scores are equal (0): {BLAME}; 50% of the answers are cut off."
    longer, _, shorter = call.partition(", or ")
    assert longer == 'rl_edit_config("max_new_tokens", 128) then rl_test_inference()'
    assert shorter == (
        "ask for a short answer in the prompt, or show one or two as chat turns (`prompt` may "
        "return whole messages)"
    )


def test_answers_that_are_mostly_cut_off_are_mended_before_training(test_of: Make) -> None:
    trainable, why, call = summary(test_of().groups([1, 0], [1, 0]).ended(TRUNCATED))
    assert trainable and "50% of the answers are cut off" in why
    assert call.startswith('rl_edit_config("max_new_tokens", 128) then rl_test_inference(), or ask')
    assert call.endswith("; else rl_start_training(dry_run=true)")


def test_prompts_that_leave_no_room_are_mended_by_a_length_that_fits(test_of: Make) -> None:
    written = test_of(env={"max_new_tokens": 64, "max_token_length": 100})
    folder = written.folder.work(written.request.models[0]) / "rollouts"
    folder.mkdir(parents=True)
    why = "A prompt of 150 tokens leaves no room for an answer. max_token_length is 100."
    failures = [
        {"code": "context_overflow", "why": why, "prompt_tokens": tokens} for tokens in (120, 150)
    ]
    append_row(folder / "step_1.jsonl", {"prompt": "", "completions": [], "failures": failures})
    assert summary(written.ended(BROKEN)) == (
        False,
        f"No answer was scored: {why}",
        'rl_edit_config("env.max_token_length", 256) then rl_test_inference()',
    )


def test_a_rare_right_answer_is_called_a_poor_bet_with_the_share_of_groups_kept(
    test_of: Make,
) -> None:
    """One right answer of 48 does not rule out fewer than one in fifty."""
    rare = test_of(group_size=16).groups([1, *[0] * 15], [0] * 16, [0] * 16).ended(WELL)
    assert summary(rare) == (
        True,
        "1 of 3 groups have both good and bad answers; 1 of 48 answers are right, and at that "
        "rate 29% of groups of 16 have both kinds and are kept: a poor bet, for the rate may well "
        "be below 1 in 50.",
        'rl_get_current_config(detail="full"): make its tasks easier, or choose a stronger model; '
        "else rl_start_training(dry_run=true)",
    )


def test_an_easy_task_is_no_poor_bet_though_few_groups_are_kept(test_of: Make) -> None:
    easy = test_of(group_size=16).groups([0, *[1] * 15], [1] * 16, [1] * 16).ended(WELL)
    _, why, call = summary(easy)
    assert "47 of 48 answers are right" in why and "poor bet" not in why
    assert call == "rl_start_training(dry_run=true)"


def test_an_environment_of_others_is_not_told_to_change_a_setting_that_it_has_not(
    test_of: Make,
) -> None:
    written = test_of(env={}, max_tokens=16, is_foreign=True).groups([0, 0]).ended(TRUNCATED)
    assert summary(written)[2].startswith("rl_test_inference(max_tokens=32), or ask for a short")


def test_a_scorer_that_sometimes_fails_is_a_caveat_and_counted(test_of: Make) -> None:
    written = (
        test_of()
        .groups([1, 0])
        .failures("env_error", "sampler_error")
        .failures("too_long")
        .ended(WELL)
    )
    assert summary(written)[1] == (
        "1 of 1 groups have both good and bad answers; 1 times its code failed (why of env_error)."
    )
    (one,) = written.told()["models_tested"]
    assert one["failures"] == {"env_error": 1, "sampler_error": 1, "too_long": 1}
    assert (one["groups_dropped"], one["parse_failures"]) == (1, 0.333)


def test_nothing_scored_is_the_environments_fault_or_the_models(test_of: Make) -> None:
    written = test_of().failures("env_error").ended(BROKEN)
    mend = f"mend {written.file}, then rl_test_inference()"
    assert summary(written) == (False, "No answer was scored: why of env_error.", mend)
    trainable, why, call = summary(written.ended(SILENT))
    assert (trainable, call) == (None, 'rl_test_inference(backend="local")')
    assert why.startswith("The model gave nothing to judge by: ")


def test_the_model_that_would_be_trained_decides_else_the_one_that_varies_most(
    test_of: Make,
) -> None:
    base, other = model_of("local:m"), model_of("big/model")
    written = test_of(other, base).groups([1, 1], one=base).groups([1, 0], one=other)
    written.ended(WELL, base).ended(WELL, other)
    assert summary(written)[:2] == (False, "local:m: Too easy: all 2 answers are right.")
    assert [one["trainable"] for one in written.told()["models_tested"]] == [True, False]
    assert written.told()["summary"]["best_model"] == "local:m"


def test_a_test_that_goes_on_tells_what_there_is(test_of: Make) -> None:
    written = test_of().groups([1, 0])
    with written.folder.groups(written.request.models[0]).open("ab") as file:
        file.write(b'{"scores": [1, 0')  # being written
    told = written.told("running")
    assert told["models_tested"][0]["steps_tested"] == 1
    assert told["summary"]["trainable"] is True


def test_lines_of_other_forms_are_read_or_passed_over(test_of: Make) -> None:
    """Atropos's own: scores and tokens alone; and whatever else a stranger's file may hold."""
    written = test_of()
    file = written.folder.groups(written.request.models[0])
    file.write_text(
        '{"scores": [1, 0], "tokens": [[1], [2]], "masks": []}\nnothing\n{"scores": '
        '["a"]}\n{}\n[1]\n'
    )
    told = written.ended(WELL).told()
    assert told["models_tested"][0]["steps_tested"] == 1
    assert told["samples"] == []


@pytest.mark.parametrize(
    ("num_models", "num_groups", "size"), [(1, 3, 16), (3, 3, 16), (1, 50, 64), (5, 50, 8)]
)
def test_every_answer_fits_and_says_where_the_rest_is(
    test_of: Make, num_models: int, num_groups: int, size: int
) -> None:
    models = [model_of(f"vendor/model-of-some-length-{number}") for number in range(num_models)]
    written = test_of(*models)
    for one in models:
        written.groups(
            *[[0.25, *[1.0] * (size - 1)]] * num_groups, one=one, answer="long text " * 200
        )
        written.ended(
            msgspec.structs.replace(
                WELL, error="It went wrong", stderr="x" * 1000, stdout="y" * 1000
            ),
            one,
        )
    whole = written.told()
    told = shown(whole)
    assert len(json.dumps(told, separators=(",", ":"), ensure_ascii=False)) <= BUDGET
    assert [one["model"] for one in told["models_tested"]] == [one.model for one in models]
    assert all(one["steps_tested"] == num_groups for one in told["models_tested"])
    assert told["summary"] == whole["summary"]
    assert told["samples"]
    if "left_out" in told:
        assert "scores" in told["left_out"]["what"]


def test_many_free_prompts_are_shortened_before_any_is_left_out(test_of: Make) -> None:
    written = test_of(prompts=tuple(f"prompt {number} {'word ' * 50}" for number in range(10)))
    file = written.folder.groups(written.request.models[0])
    for prompt in written.request.prompts:
        append_row(
            file,
            {
                "prompt": prompt,
                "completion": "word " * 99,
                "finish": "stop",
                "score": None,
                "note": "n" * 90,
            },
        )
    told = shown(written.ended(WELL).told())
    assert len(json.dumps(told, separators=(",", ":"), ensure_ascii=False)) <= BUDGET
    assert len(told["responses"]) == 10
    assert told["test_config"]["rollouts_per_model"] == 10


def test_how_a_process_ended_is_told_in_the_words_of_the_seeds() -> None:
    assert timed_out(600, 2, "")[0] == "Process timed out after 10 minutes"
    assert timed_out(5, 0, "score (mine.py:7)") == (
        "Process timed out after 5 s",
        "It hung in score (mine.py:7).",
        "environment",
    )
    assert exited(1, Traffic(), "first\nerror: It is so.\n") == (
        "Process exited with code 1",
        "It is so.",
        "environment",
    )
    assert exited(1, Traffic(last_error="e"), "error: x") == (
        "Process exited with code 1",
        "e",
        "model",
    )
    assert exited(-9, Traffic(completions=1, last_error="e"), "")[1:] == (
        "It said nothing.",
        "environment",
    )
    dump = (
        'Thread 1 (most recent call first):\n  File "/a/re.py", line 1 in f\n  File '
        '"/x/mine.py", line 7 in score\n'
    )
    assert frame_in("/x/mine.py", dump) == "score (mine.py:7)"
    assert frame_in("/x/other.py", dump) == ""


def test_a_test_without_a_result_runs_as_long_as_its_lock_is_held(test_of: Make) -> None:
    written = test_of()
    with lock_taken(written.folder.lock):
        assert written.folder.phase() == "running"
    assert written.folder.phase() == "lost"
    written.folder.write("result.json", written.told("done"))
    assert written.folder.phase() == "done"
    with pytest.raises(NotFound) as refused:
        find_test("t-0123abce")
    assert for_agents(refused.value.next) == 'rl_test_inference(test_id="t-0123abcd")'


def test_the_newest_test_counts_unless_the_environment_has_changed(test_of: Make) -> None:
    written = test_of().groups([1, 0]).ended(WELL)
    file = str(written.file)
    assert test_folder.latest_test(file, "m") is None, "it has not ended"
    written.folder.write("result.json", written.told())
    told = test_folder.latest_test(file, "m")
    assert told is not None
    assert (told.groups_with_variance, told.trainable) == (1.0, True)
    assert test_folder.latest_test(file, "other") is None
    assert test_folder.latest_test("arithmetic", "m") is None
    os.utime(written.file, (time.time() + 60, time.time() + 60))
    assert test_folder.latest_test(file, "m") is None


def test_a_test_of_one_variant_of_a_family_says_nothing_of_another(test_of: Make) -> None:
    written = test_of().groups([1, 0]).ended(WELL)
    program = replace(written.request.program, name="mine:Hard-v0")
    written.request = msgspec.structs.replace(written.request, program=program)
    written.folder.write("request.json", written.request)
    written.file.write_text("class Mine(BaseEnv):\n    variants = ('Easy-v0', 'Hard-v0')\n")
    written.folder.write("result.json", written.told())
    assert test_folder.latest_test(f"{written.file}:Hard-v0", "m") is not None
    assert test_folder.latest_test(f"{written.file}:Easy-v0", "m") is None


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.0}, {"group_size": 2}, {"max_tokens": 8}],
    ids=["greedy", "two answers", "cut"],
)
def test_a_test_that_was_not_like_training_says_nothing_of_it(
    test_of: Make, asked: dict[str, Any]
) -> None:
    written = test_of(**asked).groups([0, 0]).ended(WELL)
    written.folder.write("result.json", written.told())
    assert test_folder.latest_test(str(written.file), "m") is None


def test_a_test_of_the_same_draft_comes_before_a_newer_one_of_another(test_of: Make) -> None:
    mine = test_of(draft="mine").groups([1, 0]).ended(WELL)
    mine.folder.write("result.json", mine.told())
    os.utime(mine.folder.path / "result.json", (time.time() - 60, time.time() - 60))
    os.utime(mine.file, (time.time() - 120, time.time() - 120))
    mine.folder.path.rename(mine.folder.path.with_name("t-00000001"))
    theirs = test_of(draft="theirs").groups([0, 0]).ended(WELL)
    theirs.folder.write("result.json", theirs.told())
    os.utime(mine.file, (time.time() - 120, time.time() - 120))
    found = [
        test_folder.latest_test(str(mine.file), "m", draft) for draft in ("mine", "theirs", "")
    ]
    assert [told and told.groups_with_variance for told in found] == [1.0, 0.0, 0.0]


def test_an_answer_too_long_is_cut_also_where_samples_have_no_scores() -> None:
    sample = {"step": 1, "prompt": "p" * 3000, "best": "b" * 3000, "worst": "w" * 3000}
    model = {
        "model": "a/b",
        "output_file": "/tmp/a.json",
        "steps": [{"step": n, "scores": [0.5] * 64} for n in range(50)],
    }
    cut = brief(
        {
            "models_tested": [model],
            "summary": {"why": "x"},
            "samples": [sample, sample],
            "next": "rl_list_runs()",
        }
    )
    assert "scores" in cut["left_out"]["what"] and cut["samples"]
