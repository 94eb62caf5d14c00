"""The installed wheel does what README.md promises, in an empty folder and without the repository.

`make test-wheel` makes the environment and names it in WHEEL_ENVIRONMENT.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from deadlines import wait_until

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

STARTS_WITHIN_S = 90
TRAINS_WITHIN_S = 400
ROOT = Path(__file__).resolve().parents[3]

SDK_PROGRAM = """
import tinker

service = tinker.ServiceClient()
training = service.create_lora_training_client("halteres/tiny", rank=8).result()
tokens = training.get_tokenizer().encode("3 + 4 = 7")
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
)
passed = training.forward_backward([datum], "cross_entropy")
training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
print(passed.result().metrics["loss:sum"])
"""

Run = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder to work in: nothing of the repository is found from there."""
    made = tmp_path / "empty"
    made.mkdir()
    return made


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """What a new user's shell has."""
    commands = Path(os.environ["WHEEL_ENVIRONMENT"]) / "bin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **kept,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HALTERES_HOME": str(tmp_path / "home"),
        # tokenizers that others of this machine keep are not found either
        "HF_HOME": str(tmp_path / "hub"),
    }


@pytest.fixture
def run(folder: Path, variables: dict[str, str]) -> Run:
    def run(*words: str, within_s: float = 60, **more: str) -> str:
        done = subprocess.run(
            words,
            cwd=folder,
            env={**variables, **more},
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@contextmanager
def serving(words: list[str], says: str, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """A server that runs while the block does; its address is the first that it prints."""
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(words, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        found = wait_until(lambda: re.search(says, log.read_text()), STARTS_WITHIN_S, str(words))
        yield found[1]
    finally:
        server.terminate()
        server.wait(60)


def test_what_runs_is_what_was_installed(run: Run) -> None:
    where = run("python", "-c", "import halteres; print(halteres.__file__)").strip()
    assert Path(where).is_relative_to(os.environ["WHEEL_ENVIRONMENT"])
    assert not Path(where).is_relative_to(ROOT)


def test_the_quick_start_learns(run: Run, variables: dict[str, str]) -> None:
    printed = run("halteres", "quickstart", "--steps", "12", within_s=TRAINS_WITHIN_S)
    row = re.search(r"correct, T = 1 +([\d.]+)% +([\d.]+)%", printed)
    assert row, printed
    before, after = map(float, row.groups())
    assert after > before + 20
    (plot,) = Path(variables["HALTERES_HOME"]).glob("runs/*/plot.png")
    assert plot.stat().st_size > 10_000
    assert (plot.parent / "adapter" / "adapter_model.safetensors").exists()


def test_the_page_opens(folder: Path, variables: dict[str, str]) -> None:
    words = ["halteres", "ui", "--no-open", "--port", "0"]
    with serving(words, r"(http://127\.0\.0\.1:\d+)/#token=", folder, variables) as url:
        style = httpx.get(f"{url}/ui/style.css", timeout=30)
    assert style.status_code == 200
    assert "light-dark(" in style.text


def test_an_unmodified_sdk_trains_at_the_service(
    run: Run, folder: Path, variables: dict[str, str]
) -> None:
    words = ["halteres", "serve", "--port", "0"]
    with serving(words, r"answers on (http://127\.0\.0\.1:\d+)", folder, variables):
        printed = run("halteres", "variables")
        exported = dict(re.findall(r"^export (\w+)=(\S+)", printed, re.MULTILINE))
        assert "TINKER_BASE_URL" in exported
        loss = run("python", "-c", SDK_PROGRAM, within_s=STARTS_WITHIN_S, **exported)
    assert float(loss) > 0


def test_the_agents_tools_and_an_environment_are_there(run: Run) -> None:
    assert "arithmetic" in run("halteres", "env", "list")
    assert "arithmetic" in run("halteres", "rl", "list-environments")
