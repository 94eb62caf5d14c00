"""The pages: their links lead somewhere, their settings exist, their code runs, their quotations
are printed.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from clients.sdk.serving import serving

from halteres.agent.table import TOOLS
from halteres.config.edits import ALIASES
from halteres.config.file_training import FileTraining
from halteres.config.operator_policy import load_policy
from halteres.config.settings import SECTIONS, TrainerSettings
from halteres.environments.config import BaseEnvConfig

from .settings_page import shipped

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]
SOURCE = ROOT / "src" / "halteres"

FIELDS = {
    **{section: set(model.model_fields) for section, model in SECTIONS.items()},
    "data": set(FileTraining.model_fields),
    "env": {
        *BaseEnvConfig.model_fields,
        *(name for kind in shipped() for name in type(kind.config_init()[0]).model_fields),
    },
}
BARE = {*ALIASES, *(name for names in FIELDS.values() for name in names)}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Code blocks in these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def prose(page: Path) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link may name behind `#`: headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_page_and_a_heading_that_there_is(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f"]({page})" not in index] == ["README.md"]
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_pages_count_the_tools_that_there_are() -> None:
    counted = {
        (name_of(page), int(number))
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for number in re.findall(r"\b(\d+) tools\b", page.read_text())
    }
    assert len(counted) >= 2
    assert {number for _, number in counted} == {len(TOOLS)}


def settings_in(page: Path) -> Iterator[str]:
    """Settings that a page names: in `--set`, as `section.field` in backticks."""
    text = page.read_text()
    yield from re.findall(r"--set ['\"]?([\w.]+)=", text)
    yield from re.findall(r"`((?:run|env|inference|trainer|data)\.[a-z_]+)(?:=[^`]*)?`", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_setting_that_a_page_names_is_one(page: Path) -> None:
    for setting in settings_in(page):
        section, _, name = setting.rpartition(".")
        # a file's name, or a word that stands for one
        if name not in ("json", "jsonl", "yaml", "py", "FIELD", "field"):
            assert name in (FIELDS[section] if section else BARE), setting


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_of_python_shell_and_yaml_can_be_read(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
    for text in blocks(page, "sh"):
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    for text in blocks(page, "yaml"):
        assert any(isinstance(document, dict) for document in yaml.safe_load_all(text)), text


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "algorithms").glob("*.md")), ids=name_of)
def test_the_trainers_settings_in_an_algorithms_commands_go_together(page: Path) -> None:
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        given = dict(word.split("=", 1) for word in words if word.startswith("trainer."))
        TrainerSettings(
            **{
                name.removeprefix("trainer."): yaml.safe_load(value)
                for name, value in given.items()
            }
        )


def test_the_policies_on_the_pages_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    policies = [
        text
        for page in ("agent-tools.md", "coming-from.md")
        for text in blocks(ROOT / "docs" / page, "yaml")
        if re.search(r"^(lock|extends):", text, re.MULTILINE)
    ]
    assert len(policies) >= 2
    for text in policies:
        (tmp_path / "policy.yaml").write_text(text)
        assert load_policy().lock


def test_the_environment_on_its_page_describes_itself(tmp_path: Path) -> None:
    text, *_ = blocks(ROOT / "docs" / "environments.md", "python")
    file = tmp_path / "times.py"
    file.write_text(text)
    described = subprocess.run(
        [sys.executable, file, "describe"], capture_output=True, text=True, check=True
    )
    assert '"name":"times"' in described.stdout.replace(": ", ":")


@pytest.mark.runs
def test_the_programs_for_the_training_service_run_as_they_stand(tmp_path: Path) -> None:
    service, *_ = blocks(ROOT / "docs" / "training-service.md", "python")
    readme, *_ = blocks(ROOT / "README.md", "python")
    with serving(tmp_path, engine="scripted") as running:
        variables = {
            "TINKER_BASE_URL": running.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        program = f"{readme}\n{service}"
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, check=True, timeout=60
        )


@cache
def sentences() -> tuple[str, ...]:
    """Every text in the source, with `…` for what is filled in."""
    texts: list[str] = []
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values
                )
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return tuple(texts)


def quotations() -> list[str]:
    """Sentences that troubleshooting.md quotes, `…` for names and numbers."""
    rows = re.findall(r"^\| (.*?) \|", prose(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    return [
        quoted
        for row in rows
        for quoted in re.findall(r"`([^`]+)`", row)
        if " " in quoted and quoted[:8] != "halteres"
    ]


@pytest.mark.parametrize("quoted", quotations())
def test_a_quoted_error_is_what_is_printed(quoted: str) -> None:
    """The source has it, or a text with more to fill in that can become it."""
    general = (text for text in sentences() if len(re.findall(r"\w+", text)) >= 3 and "…" in text)
    patterns = (".+?".join(map(re.escape, text.split("…"))) for text in general)
    assert any(quoted in text for text in sentences()) or any(
        re.fullmatch(one, quoted) for one in patterns
    )
