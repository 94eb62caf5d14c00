"""tinker-cookbook 0.6.1, unmodified: its recipes train the built-in model, its validation script
judges our logprobs.

The programs are run as their authors do, `python -m …` with options alone. The data sets that they
name by the hub's names are folders of those names below the current directory, which
`datasets.load_dataset` takes before the hub's.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves

from .conftest import ROOT
from .registered import NAME, register, script, service

pytestmark = pytest.mark.clients

REQUIREMENTS = (
    "torch",
    "tinker==0.38.0",
    "transformers>=5.17,<6",
    *(
        "aiohttp",
        "blobfile",
        "chz",
        "cloudpickle",
        "datasets",
        "pillow",
        "pyrage",
        "rich",
        "termcolor",
        "tiktoken",
    ),
    *("math-verify", "pylatexenc", "sympy"),
)
"""What tinker-cookbook[math-rl] 0.6.1 requires but tml-renderers, which renders one vendor's models
alone.
"""

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
QUESTION = "Guess a number between 1 and 4."
SHOWN = (
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r"
        " 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
"""The example that rl_loop puts before every question."""

SL_STEPS, RL_STEPS = 12, 3
STAND_IN = "stable_reinforce is computed by a formula of Halteres's own"


@dataclass(frozen=True, slots=True)
class Cookbook:
    """The sources of a release, and an interpreter that has what they need."""

    python: str
    sources: Path

    async def run(self, *argv: Any, url: str, cwd: Path, ends: int = 0) -> str:
        """What it printed; -P keeps data set folders below the current directory from being taken
        for modules.
        """
        log = cwd / "script.log"
        return await script(
            self.python,
            "-P",
            *argv,
            url=url,
            log=log,
            cwd=cwd,
            ends=ends,
            PYTHONPATH=str(self.sources),
        )


@pytest.fixture(scope="module")
def cookbook(client_python: Callable[..., str]) -> Cookbook:
    import subprocess

    command = [ROOT / "scripts" / "sources", "tinker-cookbook", "0.6.1"]
    sources = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    ).stdout.strip()
    return Cookbook(client_python("cookbook", *REQUIREMENTS), Path(sources))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs are run: beside their data sets."""
    register(tmp_path / "home", monkeypatch)
    asked = [
        {"question": QUESTION, "answer": f"Any will do.\n#### {1 + row % 4}"} for row in range(64)
    ]
    told = [
        [*SHOWN, _user(QUESTION + SUFFIX), _assistant(f"I will guess \\boxed{{{1 + row % 4}}}.")]
        for row in range(96)
    ]
    _write(tmp_path / "openai" / "gsm8k", "main", train=asked, test=asked[:4])
    _write(
        tmp_path / "HuggingFaceH4" / "no_robots",
        "default",
        train=[{"messages": messages} for messages in told],
    )
    _write_rows(tmp_path / "rubrics.jsonl", [_graded(number) for number in range(8)])
    _write_rows(tmp_path / "rubrics_test.jsonl", [_graded(0)])
    return tmp_path


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _graded(number: int) -> dict[str, Any]:
    """A question, and how its answer is graded: by the first digit that the grader writes, whatever
    it means.
    """
    rubric = {
        "rubric_str": f"Is it {number}?",
        "extraction_regex": r"(\d)",
        "grader_output_format_instruction": "Answer with a digit.",
    }
    return {"convo": [_user(f"What is {number} + 0?")], "rubric_items": [rubric]}


def _write(folder: Path, config: str, **splits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        _write_rows(folder / f"{split}.jsonl", rows)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _sampled(url: str, path: str) -> list[int]:
    """What the weights at a path answer, greedily."""
    client = (
        tinker.ServiceClient(base_url=url, api_key="tml-test")
        .create_sampling_client(model_path=path)
        .result()
    )
    one = tinker.SamplingParams(max_tokens=8, temperature=0)
    return (
        client.sample(tinker.ModelInput.from_ints([1, 5, 6]), 1, one).result().sequences[0].tokens
    )


SL_LOOP = (
    *(
        "-m",
        "tinker_cookbook.recipes.sl_loop",
        f"model_name={NAME}",
        "log_path=log",
        "batch_size=8",
    ),
    *("learning_rate=1e-2", "train_on_what=last_assistant_message", "save_every=5"),
)
RL_LOOP = (
    *(
        "-m",
        "tinker_cookbook.recipes.rl_loop",
        f"model_name={NAME}",
        "log_path=log",
        "batch_size=4",
        "group_size=8",
    ),
    *("max_tokens=24", "learning_rate=1e-3", "save_every=1", f"max_steps={SL_STEPS + RL_STEPS}"),
)


@pytest.mark.parametrize(
    "loss", ["", "importance_sampling", "cispo", "gspo"], ids=lambda loss: loss or "by default"
)
@proves("loss:stable_reinforce")
async def test_rl_loop_goes_on_where_sl_loop_ended(
    cookbook: Cookbook, place: Path, loss: str
) -> None:
    """Both log into one folder, so the second finds the first's checkpoint; it has taught the form
    of an answer.

    The default loss is stable_reinforce, with provenance.
    """
    async with service(place) as running:
        await cookbook.run(*SL_LOOP, url=running.url, cwd=place)
        taught = _rows(place / "log" / "metrics.jsonl")
        assert [row["step"] for row in taught] == list(range(SL_STEPS))
        assert taught[-1]["train_mean_nll"] < taught[0]["train_mean_nll"] / 4
        assert [row["name"] for row in _rows(place / "log" / "checkpoints.jsonl")] == [
            "000005",
            "000010",
            "final",
        ]

        chosen = (f"loss_fn={loss}",) if loss else ()
        printed = await cookbook.run(*RL_LOOP, *chosen, url=running.url, cwd=place)
        assert printed.count(STAND_IN) == (0 if loss else 1)
        assert f"Resuming from batch {SL_STEPS}" in printed and "Training completed" in printed
        rewarded = _rows(place / "log" / "metrics.jsonl")[SL_STEPS:]
        assert [row["step"] for row in rewarded] == list(range(SL_STEPS, SL_STEPS + RL_STEPS))
        assert all(0 < row["reward/total"] < 1 for row in rewarded)
        assert "skipping training step" not in printed
        final = _rows(place / "log" / "checkpoints.jsonl")[-1]
        assert final["name"] == "final"
        assert await asyncio.to_thread(_sampled, running.url, final["sampler_path"])


RECIPE = (f"model_name={NAME}", "log_path=rl", "max_steps=2", "eval_every=0", "max_tokens=24")
MATH = (
    "-m",
    "tinker_cookbook.recipes.math_rl.train",
    *RECIPE,
    "groups_per_batch=4",
    "group_size=16",
)
RUBRIC = (
    *(
        "-m",
        "tinker_cookbook.recipes.rubric.train",
        *RECIPE,
        "groups_per_batch=2",
        "train_group_size=4",
    ),
    *(
        "renderer_name=qwen3_instruct",
        "grader_renderer_name=qwen3_instruct",
        f"grader_llm_name={NAME}",
    ),
    *("train_jsonl_path=rubrics.jsonl", "test_jsonl_path=rubrics_test.jsonl"),
)


def _trained_by_default_loss(place: Path, printed: str) -> None:
    """Two batches moved the policy by the default loss, and its user has read once whose formula
    that is.
    """
    first, second = [
        row for row in _rows(place / "rl" / "metrics.jsonl") if "grad_norm:mean" in row
    ]
    assert second["policy_version:max"] == first["policy_version:max"] + 1
    assert all(row["grad_norm:mean"] > 0 for row in (first, second))
    assert json.loads((place / "rl" / "config.json").read_text())["loss_fn"] == "stable_reinforce"
    assert [row["name"] for row in _rows(place / "rl" / "checkpoints.jsonl")][-1] == "final"
    assert printed.count(STAND_IN) == 1


@proves("loss:stable_reinforce")
async def test_math_rl_trains_by_its_default_loss_from_what_sl_loop_taught(
    cookbook: Cookbook, place: Path
) -> None:
    """On a data set of the test's own under GSM8K's name."""
    async with service(place) as running:
        await cookbook.run(*SL_LOOP, url=running.url, cwd=place)
        taught = _rows(place / "log" / "checkpoints.jsonl")[-1]["state_path"]
        begun = ("env=gsm8k", f"load_checkpoint_path={taught}", "renderer_name=qwen3_instruct")
        _trained_by_default_loss(
            place, await cookbook.run(*MATH, *begun, url=running.url, cwd=place)
        )


@proves("loss:stable_reinforce")
async def test_math_rl_trains_by_its_default_loss_while_it_samples(
    cookbook: Cookbook, place: Path
) -> None:
    """Asynchronously, on the sums that the recipe makes up."""
    async with service(place) as running:
        printed = await cookbook.run(*MATH, "max_steps_off_policy=1", url=running.url, cwd=place)
        _trained_by_default_loss(place, printed)


@proves("loss:stable_reinforce")
async def test_the_rubric_recipe_trains_by_its_default_loss_and_is_graded_by_the_same_service(
    cookbook: Cookbook, place: Path
) -> None:
    async with service(place) as running:
        _trained_by_default_loss(place, await cookbook.run(*RUBRIC, url=running.url, cwd=place))


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of the script's tables."""

    temperature: float
    number: int  # of pairs of tokens, or of tokens found again
    largest: float  # difference


def _tables(printed: str) -> tuple[list[Compared], Compared]:
    """The rows of temperatures, and the row of the sequence."""
    found = [
        line.split()
        for line in printed.splitlines()
        if line[:8].strip().replace(".", "").isdecimal()
    ]
    rows = [Compared(float(row[0]), int(row[2]), float(row[4])) for row in found]
    return rows[:-1], rows[-1]


@pytest.mark.parametrize("kind", ["raw", "tempered"])
@proves("sample:raw-or-tempered")
async def test_validate_temperature_logprobs_sees_the_kind_that_is_served(
    cookbook: Cookbook, place: Path, kind: str
) -> None:
    """It wants differences of log-probabilities to be those at temperature 1, divided by the
    temperature.
    """
    async with service(place, "--sample-logprobs", kind) as running:
        program = cookbook.sources / "tests" / "validate_temperature_logprobs.py"
        printed = await cookbook.run(
            program, f"base_model={NAME}", "num_trials=40", url=running.url, cwd=place
        )
    rows, sequence = _tables(printed)
    compared = {row.temperature: row.largest for row in rows if row.number}
    assert [row.temperature for row in rows] == [0.5, 0.7, 1.0, 1.2, 1.5, 1.8]
    assert compared.keys() >= {1.0, 1.2, 1.5, 1.8}
    assert compared[1.0] < 1e-4
    off = [temperature for temperature, largest in compared.items() if not largest < 1e-4]
    assert not math.isnan(sum(compared.values()))
    assert off == ([] if kind == "tempered" else [t for t in compared if t != 1.0])
    assert sequence.number > 10 and sequence.largest < 1e-4
