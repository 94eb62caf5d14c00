"""The wheel and the source distribution hold all that the package needs, and describe it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import halteres

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "src"
BUILT_WITHIN_S = 60
# an installation downloads it, and a clone of a laptop keeps it: a model or a picture too many shows
LARGEST_BYTES = 6_000_000


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build with the backend that pyproject.toml names, as pip does, but in this environment."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=BUILT_WITHIN_S,
    )
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(described(wheel, "METADATA")).decode())


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def described(wheel: zipfile.ZipFile, name: str) -> str:
    return f"halteres-{halteres.__version__}.dist-info/{name}"


def package_files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if not name.startswith("halteres-")}


def test_the_wheel_holds_every_file_of_the_package_and_none_besides(wheel: zipfile.ZipFile) -> None:
    """Among them the page, the skills, the built-in model, questions and word lists."""
    files = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert package_files(wheel) == files
    assert {
        "halteres/dashboard/static/index.html",
        "halteres/models/tiny/model.safetensors",
        "halteres/skills/train-with-rl/SKILL.md",
        "halteres/environments/data/word_problems/train.jsonl",
    } <= files


def test_the_wheel_stays_small(wheel: zipfile.ZipFile) -> None:
    assert sum(entry.compress_size for entry in wheel.infolist()) < LARGEST_BYTES


def test_a_wheel_made_from_the_source_distribution_is_the_same(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.glob("halteres-*")
    again = zipfile.ZipFile(build("wheel", tmp_path / "again", source=unpacked))
    contents = {entry.filename: entry.CRC for entry in wheel.infolist()}
    assert {entry.filename: entry.CRC for entry in again.infolist()} == contents


def test_the_source_distribution_has_the_pictures_and_the_tests(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pictures = {str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "pictures").iterdir()}
    assert pictures
    assert pictures | {"CHANGELOG.md", "constraints.txt", "tests/conftest.py"} <= names


def test_version_licences_and_extras_are_those_of_the_project(
    metadata: Message, project: dict[str, Any]
) -> None:
    assert metadata["Version"] == halteres.__version__ == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert metadata["Requires-Python"] == ">=3.11"
    extras = metadata.get_all("Provides-Extra", [])
    assert set(extras) == set(project["optional-dependencies"])


def test_the_long_description_is_the_readme(metadata: Message) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_every_command_and_plug_in_that_is_installed_can_be_imported(
    wheel: zipfile.ZipFile,
) -> None:
    lines = wheel.read(described(wheel, "entry_points.txt")).decode()
    targets = re.findall(r"^([\w-]+) = ([\w.]+):?(\w*)$", lines, re.MULTILINE)
    assert {name for name, _, _ in targets} == {"halteres", "run-api"}
    for _, module, attribute in targets:
        found = importlib.import_module(module)
        assert not attribute or callable(getattr(found, attribute))


def test_every_requirement_but_torch_has_a_version_that_was_tested(
    project: dict[str, Any],
) -> None:
    """torch is chosen by scripts/torch: the CPU's and CUDA's builds have different versions."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = {canonical(name) for name in pinned}
    required = {canonical(line) for line in project["dependencies"]}
    assert required - tested == {"torch"}
    assert not [name for name in pinned if name.startswith(("nvidia", "triton"))]


def canonical(requirement: str) -> str:
    """A package's name as indexes compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()
