"""tinker-cookbook 0.6.1, unmodified: two recipes train the built-in model, its validation script judges our logprobs.

The programs are run as their authors do, `python -m …` with options alone. The data sets that they name by the hub's
names are folders of those names below the current directory, which `datasets.load_dataset` takes before the hub's.
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
    *("aiohttp", "blobfile", "chz", "cloudpickle", "datasets", "pillow", "pyrage", "rich", "termcolor", "tiktoken"),
    *("math-verify", "pylatexenc", "sympy"),
)
"""What tinker-cookbook[math-rl] 0.6.1 requires but tml-renderers, which renders one vendor's models alone."""

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
QUESTION = "Guess a number between 1 and 4."
SHOWN = (
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r"
        " 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
)
"""The example that rl_loop puts before every question."""

SL_STEPS, RL_STEPS = 12, 3


@dataclass(frozen=True, slots=True)
class Cookbook:
    """The sources of a release, and an interpreter that has what they need."""

    python: str
    sources: Path

    async def run(self, *argv: Any, url: str, cwd: Path, ends: int = 0) -> str:
        """What it printed; -P keeps data set folders below the current directory from being taken for modules."""
        log = cwd / "script.log"
        return await script(
            self.python, "-P", *argv, url=url, log=log, cwd=cwd, ends=ends, PYTHONPATH=str(self.sources)
        )


@pytest.fixture(scope="module")
def cookbook(client_python: Callable[..., str]) -> Cookbook:
    import subprocess

    command = [ROOT / "scripts" / "sources", "tinker-cookbook", "0.6.1"]
    sources = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout.strip()
    return Cookbook(client_python("cookbook", *REQUIREMENTS), Path(sources))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs are run: beside their data sets."""
    register(tmp_path / "home", monkeypatch)
    asked = [{"question": QUESTION, "answer": f"Any will do.\n#### {1 + row % 4}"} for row in range(64)]
    told = [
        [*SHOWN, _user(QUESTION + SUFFIX), _assistant(f"I will guess \\boxed{{{1 + row % 4}}}.")] for row in range(96)
    ]
    _write(tmp_path / "openai" / "gsm8k", "main", asked)
    _write(tmp_path / "HuggingFaceH4" / "no_robots", "default", [{"messages": messages} for messages in told])
    return tmp_path


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _write(folder: Path, config: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = "  - split: train\n    path: train.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{split}---\n")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _sampled(url: str, path: str) -> list[int]:
    """What the weights at a path answer, greedily."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-test").create_sampling_client(model_path=path).result()
    one = tinker.SamplingParams(max_tokens=8, temperature=0)
    return client.sample(tinker.ModelInput.from_ints([1, 5, 6]), 1, one).result().sequences[0].tokens


SL_LOOP = (
    *("-m", "tinker_cookbook.recipes.sl_loop", f"model_name={NAME}", "log_path=log", "batch_size=8"),
    *("learning_rate=1e-2", "train_on_what=last_assistant_message", "save_every=5"),
)
RL_LOOP = (
    *("-m", "tinker_cookbook.recipes.rl_loop", f"model_name={NAME}", "log_path=log", "batch_size=4", "group_size=8"),
    *("max_tokens=24", "learning_rate=1e-3", "save_every=1", f"max_steps={SL_STEPS + RL_STEPS}"),
)


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo", "gspo"])
async def test_rl_loop_goes_on_where_sl_loop_ended(cookbook: Cookbook, place: Path, loss: str) -> None:
    """Both log into one folder, so the second finds the first's checkpoint; it has taught the form of an answer."""
    async with service(place) as running:
        await cookbook.run(*SL_LOOP, url=running.url, cwd=place)
        taught = _rows(place / "log" / "metrics.jsonl")
        assert [row["step"] for row in taught] == list(range(SL_STEPS))
        assert taught[-1]["train_mean_nll"] < taught[0]["train_mean_nll"] / 4
        assert [row["name"] for row in _rows(place / "log" / "checkpoints.jsonl")] == ["000005", "000010", "final"]

        printed = await cookbook.run(*RL_LOOP, f"loss_fn={loss}", url=running.url, cwd=place)
        assert f"Resuming from batch {SL_STEPS}" in printed and "Training completed" in printed
        rewarded = _rows(place / "log" / "metrics.jsonl")[SL_STEPS:]
        assert [row["step"] for row in rewarded] == list(range(SL_STEPS, SL_STEPS + RL_STEPS))
        assert all(0 < row["reward/total"] < 1 for row in rewarded)
        assert "skipping training step" not in printed
        final = _rows(place / "log" / "checkpoints.jsonl")[-1]
        assert final["name"] == "final"
        assert await asyncio.to_thread(_sampled, running.url, final["sampler_path"])


@proves("loss:stable_reinforce-refused")
async def test_the_default_loss_of_rl_loop_is_refused_with_a_sentence(cookbook: Cookbook, place: Path) -> None:
    """stable_reinforce: its formula is not public."""
    async with service(place) as running:
        await cookbook.run(*SL_LOOP, url=running.url, cwd=place)
        printed = await cookbook.run(*RL_LOOP, url=running.url, cwd=place, ends=1)
        assert "stable_reinforce" in printed and "importance_sampling" in printed


@dataclass(frozen=True, slots=True)
class Compared:
    """One row of the script's tables."""

    temperature: float
    number: int  # of pairs of tokens, or of tokens found again
    largest: float  # difference


def _tables(printed: str) -> tuple[list[Compared], Compared]:
    """The rows of temperatures, and the row of the sequence."""
    found = [line.split() for line in printed.splitlines() if line[:8].strip().replace(".", "").isdecimal()]
    rows = [Compared(float(row[0]), int(row[2]), float(row[4])) for row in found]
    return rows[:-1], rows[-1]


@pytest.mark.parametrize("kind", ["raw", "tempered"])
@proves("sample:raw-or-tempered")
async def test_validate_temperature_logprobs_sees_the_kind_that_is_served(
    cookbook: Cookbook, place: Path, kind: str
) -> None:
    """It wants differences of log-probabilities to be those at temperature 1, divided by the temperature."""
    async with service(place, "--sample-logprobs", kind) as running:
        program = cookbook.sources / "tests" / "validate_temperature_logprobs.py"
        printed = await cookbook.run(program, f"base_model={NAME}", "num_trials=40", url=running.url, cwd=place)
    rows, sequence = _tables(printed)
    compared = {row.temperature: row.largest for row in rows if row.number}
    assert [row.temperature for row in rows] == [0.5, 0.7, 1.0, 1.2, 1.5, 1.8]
    assert compared.keys() >= {1.0, 1.2, 1.5, 1.8}
    assert compared[1.0] < 1e-4
    off = [temperature for temperature, largest in compared.items() if not largest < 1e-4]
    assert not math.isnan(sum(compared.values()))
    assert off == ([] if kind == "tempered" else [t for t in compared if t != 1.0])
    assert sequence.number > 10 and sequence.largest < 1e-4
