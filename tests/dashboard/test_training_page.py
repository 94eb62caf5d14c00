"""A script of the Tinker SDK trains over a real `halteres serve`; the page shows what it made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deadlines import wait_until

from halteres.models import TINY
from halteres.observe.metrics import read_rows
from halteres.service.running_services import Card, newest_live

from .conftest import HOSTILE, Visiting, expect

if TYPE_CHECKING:
    from .browser import Visit

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SCRIPT = """
import sys
import numpy as np
import tinker

service = tinker.ServiceClient(user_metadata={"experiment": sys.argv[1]})
training = service.create_lora_training_client("halteres/tiny", rank=4, seed=1).result()
tokens = list(range(40, 60))
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={
        "target_tokens": np.array(tokens[1:], dtype=np.int64),
        "weights": np.ones(len(tokens) - 1, dtype=np.float32),
    },
)
for step in range(8):
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
print(training.save_state("last").result().path)
"""


@contextmanager
def served(home: Path) -> Iterator[tuple[Card, subprocess.Popen[bytes]]]:
    """`halteres serve` with the built-in model, and its card."""
    main = "from halteres.cli.main import main; main()"
    words = ("serve", "--port", "0", "--model", TINY, "--threads", "1")
    command = [sys.executable, "-c", main, *words]
    variables = {**os.environ, "HALTERES_HOME": str(home)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as process:
        try:
            card = wait_until(newest_live, within_s=100)
            assert card is not None
            yield card, process
        finally:
            process.kill()


def script(card: Card, said: str) -> str:
    """The path of the checkpoint that the script saved last."""
    variables = {
        **os.environ,
        "TINKER_BASE_URL": card.url,
        "TINKER_API_KEY": "tml-local",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", SCRIPT, said]
    done = subprocess.run(
        command, env=variables, check=False, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.delenv("HALTERES_LIFELINE_FD", raising=False)
    return tmp_path


def test_a_script_is_listed_and_its_view_has_curves_and_checkpoints(
    home: Path, visit: Visit
) -> None:
    with served(home) as (card, process):
        page = visit.enter()
        expect(page.locator("main")).to_contain_text("No runs yet")
        path = script(card, HOSTILE)
        row = page.locator(".run")  # by news of the service
        expect(row).to_contain_text("step 8")
        expect(row).to_contain_text("Tinker script · rank 4")
        expect(page.get_by_role("checkbox")).to_have_count(0)  # nothing to compare it with
        row.focus()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(TINY)
        expect(page.locator(".paths code")).to_have_text(path)
        expect(page.locator(".facts")).to_contain_text(card.url)
        expect(page.locator(".tag")).to_contain_text("experiment: <script>")
        chart = page.locator(".chart").filter(has_text="Loss of each batch")
        expect(chart.locator(".line").first).to_be_visible()
        chart.locator(".plot").focus()
        page.keyboard.press("End")
        (file,) = (home / "service" / "metrics").iterdir()
        rows = read_rows(file)
        assert [one["step"] for one in rows] == [*range(1, 9)]
        assert rows[-1]["train/loss_per_token"] < rows[0]["train/loss_per_token"] / 2
        expect(page.locator(".tip:visible")).to_contain_text("step 8")
        expect(page.locator(".chart").filter(has_text="Gradient norm")).to_be_visible()
        expect(page.locator(".badge")).to_have_text("running")
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        expect(page.locator(".badge")).to_have_text("service ended")
        expect(page.locator(".facts")).to_contain_text("Serviceended")
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script").count() == 0


def test_both_views_fit_a_narrow_window(visiting: Visiting, home: Path) -> None:
    with served(home) as (card, _):
        script(card, "x" * 300)
    for scheme in ("light", "dark"):
        narrow = {"width": 390, "height": 800}
        with visiting(viewport=narrow, color_scheme=scheme) as visit:
            page = visit.enter()
            expect(page.locator(".run")).to_contain_text("service ended")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            page.locator(".run").click()
            expect(page.locator(".paths code")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_one_that_is_not_there_is_said(visit: Visit) -> None:
    page = visit.enter("#/training/none")
    expect(page.locator("main")).to_contain_text("There is no training run 'none'")
    visit.complaints[:] = [said for said in visit.complaints if "404" not in said]
