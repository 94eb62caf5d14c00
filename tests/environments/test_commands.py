"""`describe`, `evaluate`, `process`, and what a broken file says, as processes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from deadlines import until

from halteres.config.program import NOTHING_TO_EVALUATE
from halteres.environments import commands
from halteres.environments.arithmetic import ArithmeticEnv
from halteres.observe.metrics import read_rows

from .fakes import ARITHMETIC, ENVIRONMENTS, Inference, environment, run, write_config

pytestmark = pytest.mark.runs

RUNNER = ENVIRONMENTS / "__main__.py"

AUTHORS = '''
from halteres.environments.single_turn import SingleTurnEnv

print("a greeting")

class Mine(SingleTurnEnv):
    """Mine."""

    name = "mine"

    async def get_next_item(self):
        return self.rng.randint(0, 9)

    def prompt(self, item):
        return f"Say {item} <b>"

    def score(self, item, text):
        SCORE

    def eval_items(self):
        return range(self.config.eval_tasks)

if __name__ == "__main__":
    Mine.cli()
'''


def author_file(
    folder: Path, score: str = "return float(len(text) % 2)", text: str = AUTHORS
) -> Path:
    file = folder / "mine.py"
    file.write_text(dedent(text).replace("SCORE", score))
    return file


async def test_describe_answers_with_one_json_object_also_where_there_are_problems(
    tmp_path: Path,
) -> None:
    ended = await run(author_file(tmp_path), "describe", "--env.group_sise", "8", "--env.seed", "4")
    assert ended.code == 0, ended.stderr
    shown = json.loads(ended.stdout.splitlines()[-1])
    assert (shown["name"], shown["class_name"], shown["description"]) == ("mine", "Mine", "Mine.")
    assert shown["problems"][0]["did_you_mean"] == "group_size"
    assert (shown["config"]["seed"], shown["config"]["group_size"]) == (4, 4)


async def test_a_wrong_setting_ends_every_other_command_with_one_sentence() -> None:
    ended = await run(ARITHMETIC, "serve", "--env.group_sise", "8")
    assert (ended.code, ended.stdout) == (1, "")
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert "did you mean 'group_size'?" in line


async def test_no_command_is_a_usage_error() -> None:
    ended = await run(ARITHMETIC, "train")
    assert ended.code == 2
    assert "usage: arithmetic.py serve|process|evaluate|describe" in ended.stderr


@pytest.mark.parametrize(
    ("text", "line", "exception"),
    [
        ("x = 1\nclass A(\n", 2, "SyntaxError"),
        ("import json\n\njson.nothing\n", 3, "AttributeError"),
        (
            AUTHORS.replace(
                '    name = "mine"',
                "    name = 'mine'\n    @classmethod\n    def config_init(cls): 1 / 0",
            ),
            11,
            "Zero",
        ),
    ],
)
async def test_a_broken_file_is_told_with_file_line_and_exception(
    tmp_path: Path, text: str, line: int, exception: str
) -> None:
    file = author_file(tmp_path, text=text)
    ended = await run(RUNNER, str(file), "describe")
    assert ended.code == 1
    assert ended.stderr.startswith("error: ")
    assert f"{file}:{line}" in ended.stderr
    assert exception in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_file_runs_through_the_module_as_it_does_alone(tmp_path: Path) -> None:
    file = author_file(tmp_path)
    alone, through = await asyncio.gather(run(file, "describe"), run(RUNNER, str(file), "describe"))
    assert (alone.code, alone.stdout) == (through.code, through.stdout)
    missing = await run(RUNNER, str(tmp_path / "none.py"), "describe")
    assert missing.code == 1
    assert "none.py" in missing.stderr


async def test_evaluate_prints_one_json_line_and_writes_its_files(
    inference: Inference, tmp_path: Path
) -> None:
    inference.version = 5
    config = write_config(tmp_path, inference)
    evals = tmp_path / "evals"
    arguments = (
        "--env.eval_tasks=6",
        "--env.eval_samples=3",
        f"--env.data_dir_to_save_evals={evals}",
    )
    path = "tinker://r/sampler_weights/step-000010"
    ended = await run(
        ARITHMETIC, "evaluate", "--config", str(config), *arguments, "--openai.model_name", path
    )
    assert ended.code == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    metrics = json.loads(line)
    assert (metrics["eval/num_tasks"], metrics["eval/num_samples"], metrics["eval/num_failed"]) == (
        6,
        3,
        0,
    )
    assert metrics["eval/policy_version"] == 5
    assert {"eval/percent_correct", "eval/percent_correct_greedy", "eval/worked_share"} <= set(
        metrics
    )
    assert {request["model"] for request in inference.requests} == {path}
    asked = sorted(
        (r["sampling_params"]["temperature"], r["sampling_params"]["n"]) for r in inference.requests
    )
    assert asked == [(0.0, 1)] * 6 + [(1.0, 3)] * 6
    report = json.loads((evals / "metrics.json").read_text())
    assert report["results"]["all"] == report["results"]["atropos|arithmetic|0"] == metrics
    assert report["config_general"]["model_name"] == path
    samples = read_rows(evals / "samples.jsonl")
    assert len(samples) == 6 * 4
    assert {"prompt", "completion", "score"} <= set(samples[0])
    assert samples[0]["prompt"].startswith("Question: ")
    greedy = [sample["score"] for sample in samples if sample["temperature"] == 0]
    assert sum(greedy) / 6 == metrics["eval/percent_correct_greedy"]
    assert yaml.safe_load((evals / "evaluate_config.yaml").read_text())["eval_tasks"] == 6
    assert not list(evals.glob("*.tmp"))


async def test_evaluations_repeat_exactly_whatever_the_runs_seed(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(tmp_path, inference, eval_tasks=8)
    first, second = [
        await run(ARITHMETIC, "evaluate", "--config", str(config), "--env.seed", seed)
        for seed in ("1", "2")
    ]
    assert first.stdout == second.stdout


async def test_a_failed_task_is_counted_and_the_others_stand(
    inference: Inference, tmp_path: Path
) -> None:
    file = author_file(tmp_path, score="return 1 / (item - 2)")
    config = write_config(tmp_path, inference, eval_tasks=4, rollout_retries=0)
    ended = await run(file, "evaluate", "--config", str(config))
    assert ended.code == 0, ended.stderr
    metrics = json.loads(ended.stdout.splitlines()[-1])
    assert (metrics["eval/num_tasks"], metrics["eval/num_failed"]) == (3, 1)


async def test_an_evaluation_of_which_nothing_is_left_is_an_error(
    inference: Inference, tmp_path: Path
) -> None:
    file = author_file(tmp_path, score="raise KeyError(text)")
    config = write_config(tmp_path, inference, eval_tasks=2, rollout_retries=0)
    ended = await run(file, "evaluate", "--config", str(config))
    assert ended.code == 1
    assert "All 2 held-out tasks failed" in ended.stderr
    assert "KeyError" in ended.stderr


async def test_an_environment_without_held_out_tasks_says_so_with_a_code_of_its_own(
    tmp_path: Path,
) -> None:
    """So that a supervisor asks once, and takes it for no failure."""
    single = AUTHORS.replace(
        "    def eval_items(self):\n        return range(self.config.eval_tasks)\n", ""
    )
    several = single.replace("single_turn import SingleTurnEnv", "base import BaseEnv").replace(
        "SingleTurnEnv", "BaseEnv"
    )
    for text, lacks in ((single, "eval_items"), (several, "evaluate")):
        ended = await run(author_file(tmp_path, text=text), "evaluate")
        assert ended.code == NOTHING_TO_EVALUATE
        assert ended.stderr.splitlines()[-1].startswith(
            f"error: mine cannot be evaluated. Its class has no {lacks}."
        )


async def test_process_writes_groups_and_a_page_and_never_over_a_file(
    inference: Inference, tmp_path: Path
) -> None:
    target = tmp_path / "data" / "groups.jsonl"
    config = write_config(tmp_path, inference, group_size=3, data_path_to_save_groups=str(target))
    file = author_file(tmp_path)
    first = await run(file, "process", "--config", str(config), "--env.total_steps", "5")
    again = await run(file, "process", "--config", str(config), "--env.total_steps", "2")
    assert (first.code, again.code) == (0, 0), first.stderr + again.stderr
    assert first.stdout.splitlines()[-1] == str(target)
    assert again.stdout.splitlines()[-1] == str(tmp_path / "data" / "groups_1.jsonl")
    groups = read_rows(target)
    assert len(groups) == 5
    assert [len(group["scores"]) for group in groups] == [3] * 5
    assert groups[0]["messages"][0][-1]["role"] == "assistant"
    assert groups[:2] == read_rows(tmp_path / "data" / "groups_1.jsonl")
    page = target.with_suffix(".html").read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None and len(json.loads(found[1])["groups"]) == 5
    # what a model wrote ends no element
    assert "\\u003cb>" in found[1]


async def test_process_needs_a_number_of_groups_and_gives_up_on_a_file_that_makes_none(
    inference: Inference, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, inference, rollout_retries=0, data_path_to_save_groups=str(tmp_path / "g.jsonl")
    )
    ended = await run(ARITHMETIC, "process", "--config", str(config))
    assert ended.code == 1
    assert "--env.total_steps" in ended.stderr
    file = author_file(tmp_path, score="raise KeyError(text)")
    ended = await run(file, "process", "--config", str(config), "--env.total_steps", "1")
    assert ended.code == 1
    assert "0 of 1 groups" in ended.stderr
    assert "KeyError" in ended.stderr


async def test_a_signal_ends_an_evaluation_without_an_answer_and_not_as_a_success(
    inference: Inference, tmp_path: Path
) -> None:
    inference.failures = [503] * 10_000
    config = write_config(tmp_path, inference)
    async with (
        asyncio.timeout(15),
        environment(ARITHMETIC, "evaluate", "--config", str(config)) as process,
    ):
        await inference.asked.wait()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(5):
            stdout, _ = await process.communicate()
    assert (process.returncode, stdout) == (143, b"")


async def test_a_second_interrupt_ends_a_command_whose_loop_stands_still(
    inference: Inference, tmp_path: Path
) -> None:
    hangs = tmp_path / "hangs"
    file = author_file(
        tmp_path, score=f"open({str(hangs)!r}, 'w').close()\n        while True: pass"
    )
    config = write_config(
        tmp_path, inference, total_steps=1, data_path_to_save_groups=str(tmp_path / "g.jsonl")
    )

    async def interrupted(process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            process.send_signal(signal.SIGINT)
            # a signal that is still to be handled takes the next one in
            await asyncio.wait([asyncio.create_task(process.wait())], timeout=0.2)

    async with (
        asyncio.timeout(15),
        environment(file, "process", "--config", str(config)) as process,
    ):
        await until(hangs.exists, within_s=10)
        async with asyncio.timeout(5):
            await interrupted(process)
    assert process.returncode == 130


async def test_a_missing_tokenizer_is_named() -> None:
    ended = await run(ARITHMETIC, "serve", "--env.tokenizer_name", "Qwen/Qwen3-8B")
    assert ended.code == 1
    assert "'Qwen/Qwen3-8B'" in ended.stderr


async def test_an_environment_needs_no_torch_and_nothing_that_pulls_it_in(tmp_path: Path) -> None:
    file = tmp_path / "loaded.py"
    heavy = ("torch", "transformers", "tinker", "sqlalchemy", "starlette", "matplotlib", "numpy")
    file.write_text(
        f"import runpy, sys\nsys.argv = ['x', 'describe']\n"
        f"try: runpy.run_path({str(ARITHMETIC)!r}, run_name='__main__')\n"
        f"except SystemExit: pass\n"
        f"print([name for name in {heavy!r} if sys.modules.get(name)])"
    )
    ended = await run(file)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stderr


async def test_an_environment_may_import_torch_while_it_runs(tmp_path: Path) -> None:
    # quicker than the real one, and found before it
    (tmp_path / "torch.py").write_text("loaded = 'for the author'\n")
    importing = """
    @classmethod
    def config_init(cls):
        import torch
        print(torch.loaded)
        return super().config_init()

if __name__"""
    ended = await run(
        author_file(tmp_path, text=AUTHORS.replace("\nif __name__", importing)), "describe"
    )
    assert (ended.code, "for the author" in ended.stderr) == (0, True), ended.stderr


def test_help_is_an_answer_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(ArithmeticEnv, ["serve", "--help"]) == 0
    assert capsys.readouterr().out.startswith(
        "usage: arithmetic.py serve|process|evaluate|describe"
    )


@pytest.mark.parametrize("verb", ["process", "evaluate"])
async def test_a_scorer_that_never_ends_ends_its_command_with_its_frame(
    inference: Inference, tmp_path: Path, verb: str
) -> None:
    file = author_file(tmp_path, "while True: pass")
    # on a busy machine the first imports of a loop take a second
    given = write_config(tmp_path, inference, stuck_s=5, total_steps=1, eval_tasks=1)
    ended = await run(file, verb, "--config", str(given), within_s=40)
    assert ended.code == 1
    assert re.search(r'mine\.py", line \d+ in score', ended.stderr)
