"""The page's files: small, ours alone, and safe by construction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halteres.dashboard.routes import ASSETS
from halteres.standalone_page import STATIC

FILES = sorted(STATIC.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
NAMESPACE = "http://www.w3.org/2000/svg"
MOST_LINES, MOST_LINES_IN_ALL, MOST_BYTES = 250, 3000, 220_000
FIRST = {"main.js", "sign_in.js", "groups_file.js", "report_file.js"}
"""Scripts that a document names, and views of files (`standalone_page`): all else is imported."""

by_name = pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)


def test_the_page_is_small() -> None:
    assert sum(file.stat().st_size for file in FILES) < MOST_BYTES
    texts = [file.read_text() for file in FILES if file.suffix in (".js", ".css")]
    assert sum(len(text.splitlines()) for text in texts) <= MOST_LINES_IN_ALL
    assert not [file.name for file in FILES if len(file.read_text().splitlines()) > MOST_LINES]


@by_name
def test_a_script_says_what_it_owns(file: Path) -> None:
    header = [line for line in file.read_text().splitlines() if line.startswith("//")][:3]
    assert re.search(
        r"Owns: .+ Never: .+", " ".join(line.removeprefix("//").strip() for line in header)
    )


@by_name
def test_no_script_makes_markup_or_code_of_text(file: Path) -> None:
    """The policy that is sent forbids it too."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new "
        r"Function|srcdoc|\.cssText|DOMParser"
    )
    assert not re.search(forbidden, file.read_text())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_comes_from_elsewhere(file: Path) -> None:
    text = file.read_text().replace(NAMESPACE, "")
    assert not re.search(r"https?://|//[a-z0-9.-]+\.[a-z]{2,}/|@import|url\((?!#)", text)


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.suffix == ".html"], ids=lambda file: file.name
)
def test_a_document_holds_no_script_and_no_style_of_its_own(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text)
    named = re.findall(rf'(?:src|href)="{ASSETS}/([^"]+)"', text)
    assert named
    assert not [name for name in named if not (STATIC / name).exists()]


def test_every_script_is_reached_and_every_import_is_there() -> None:
    imports = {
        file.name: set(re.findall(r'from "\./([\w.]+)"', file.read_text())) for file in SCRIPTS
    }
    reached, left = set(), set(FIRST)
    while left:
        name = left.pop()
        reached.add(name)
        left |= imports[name] - reached
    assert reached == set(imports)


def test_the_loss_of_rollouts_is_drawn_per_token() -> None:
    """Summed over the tokens of a batch it follows the batch's size."""
    source = (STATIC / "curves.js").read_text()
    charts = source.split("const SMALL = [")[1].split("\n];")[0]
    assert '["Loss per token", ["train/loss_per_token"], []' in charts
    assert '"train/loss"' not in charts
