"""The site: every page is on it, at its place in the tables of docs/README.md, and as Markdown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIME_S = 300


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    ended = subprocess.run(
        [ROOT / "scripts" / "docs", folder], capture_output=True, text=True, timeout=TIME_S
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.runs
@pytest.mark.timeout(TIME_S)
def test_every_page_is_there_for_readers_and_for_programs(site: Path) -> None:
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    listed = (site / "llms.txt").read_text("utf-8")
    whole = (site / "llms-full.txt").read_text("utf-8")
    for page in [*pages, Path("README.md"), Path("ARCHITECTURE.md"), Path("benchmarks/README.md")]:
        assert (site / page.with_suffix(".html")).is_file(), page
        assert (site / page).read_text("utf-8") == (ROOT / page).read_text("utf-8")
        if page != Path("docs/README.md"):
            assert f"]({page})" in listed
            assert f"<!-- {page} -->" in whole
    for target in re.findall(r"\]\(([^)]+\.md)\)", listed):
        assert (site / target).is_file(), target


@pytest.mark.runs
@pytest.mark.timeout(TIME_S)
def test_a_newcomer_is_led_from_page_to_page(site: Path) -> None:
    """The menu has the order of the tables, and each page leads to the one after it."""
    menu = (site / "docs" / "README.html").read_text("utf-8")
    links = re.findall(r'class="toctree-l1.*?href="([^"#]+)"', menu)
    assert links[:3] == ["../README.html", "tutorial.html", "concepts.html"]
    tutorial = (site / "docs" / "tutorial.html").read_text("utf-8")
    assert re.search(r'class="next-page" href="concepts.html"', tutorial)
    assert 'url=docs/README.html"' in (site / "index.html").read_text("utf-8")
