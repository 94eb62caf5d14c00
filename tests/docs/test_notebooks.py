"""docs/notebooks: each runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
TIME_S = 900

SHORT = {
    "questions_to_adapter": {
        "STEPS = 40": "STEPS = 1",
        '"group_size": 16}': '"group_size": 8, "batch_size": 32, "eval_tasks": 4, "eval_samples": 1}',
    },
    "tinker_script": {"PORT = 8001": "PORT = {port}"},
}
"""What is shortened or moved to a free port: what the notebook says, what is run."""

RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("notebook.ipynb", as_version=4)
NotebookClient(notebook, timeout=int(sys.argv[1]), kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


def cells(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text("utf-8"))["cells"]


def executed(name: str, folder: Path) -> list[dict[str, Any]]:
    """The cells of a notebook that was run in this folder, as Jupyter runs it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (NOTEBOOKS / f"{name}.ipynb").read_text("utf-8")
    for words, others in SHORT[name].items():
        quoted = json.dumps(words)[1:-1]
        assert quoted in text, f"the notebook says no more: {words}"
        text = text.replace(quoted, json.dumps(others.replace("{port}", str(port)))[1:-1])
    (folder / "notebook.ipynb").write_text(text, "utf-8")
    homes = {"HALTERES_HOME": str(folder / "home"), "HF_HOME": str(folder / "hf")}
    kernels = {"JUPYTER_PATH": str(folder / "jupyter"), "IPYTHONDIR": str(folder / "ipython")}
    # A kernel's files are read from this Python's own folder, whatever the user has installed.
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(TIME_S)],
        cwd=folder,
        env={**os.environ, **homes, **kernels},
        capture_output=True,
        text=True,
        timeout=TIME_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return cells(folder / "executed.ipynb")


def value_of(cell: dict[str, Any]) -> str:
    """What the last line of a cell shows."""
    return "".join(cell["outputs"][-1]["data"]["text/plain"])


@pytest.mark.runs
@pytest.mark.timeout(TIME_S)
def test_a_file_of_questions_becomes_an_adapter_that_answers(tmp_path: Path) -> None:
    ran = executed("questions_to_adapter", tmp_path)
    assert "image/png" in ran[-6]["outputs"][0]["data"]
    assert (tmp_path / "adapter" / "README.md").is_file()
    assert "".join(ran[-1]["outputs"][-1]["text"]).strip()


@pytest.mark.runs
@pytest.mark.timeout(TIME_S)
def test_the_script_teaches_its_sentence_to_a_service_of_its_own(tmp_path: Path) -> None:
    ran = executed("tinker_script", tmp_path)
    shown = [value_of(cell) for cell in ran if cell["cell_type"] == "code" and cell["outputs"]]
    before, losses, after, path = shown[:4]
    assert before != after == "'Small organs that steady a fly.'"
    first, last = map(float, losses.strip("()").split(", "))
    assert last < first / 2
    assert "/weights/steadied" in path


@pytest.mark.parametrize("file", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_is_stored_without_outputs_and_is_in_the_index(file: Path) -> None:
    for cell in cells(file):
        assert not cell.get("outputs") and not cell.get("execution_count"), cell["id"]
    assert file.stem in SHORT
    index = (NOTEBOOKS.parent / "README.md").read_text("utf-8")
    assert f"](notebooks/{file.name})" in index
