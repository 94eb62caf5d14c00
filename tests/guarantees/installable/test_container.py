"""Dockerfile, compose.yaml and docs/install.md name what there is in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from halteres import __version__
from halteres.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
OURS = ("service", "trajectories", "page")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_what_is_copied_into_the_image_is_there_and_not_left_out() -> None:
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {name for line in copies for name in line.split()}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_the_torch_of_image_and_documentation_is_the_one_that_is_tested() -> None:
    tested = re.search(r"^version=(\S+)$", (ROOT / "scripts" / "torch").read_text(), re.MULTILINE)
    assert tested
    assert f"ARG TORCH=torch=={tested[1]}\n" in DOCKERFILE
    assert set(re.findall(r"torch==([\d.]+)", INSTALL)) - {"..."} == {tested[1]}


def test_the_documented_wheel_has_the_version_of_the_package() -> None:
    assert set(re.findall(r"halteres-([\d.]+)-py3", INSTALL)) == {__version__}


def test_the_commands_of_our_containers_are_commands(services: dict[str, dict[str, Any]]) -> None:
    known = get_command(app)
    for name in OURS:
        command, *options = services[name]["command"].split()
        context = known.make_context("halteres", [command, "--help"], resilient_parsing=True)
        found = known.get_command(context, command)  # pyright: ignore[reportAttributeAccessIssue]
        assert found, command
        if options[:1] == ["trajectories"]:
            assert found.get_command(context, "trajectories")
        elif options:
            declared = {word for one in found.params for word in (*one.opts, *one.secondary_opts)}
            assert set(options) <= declared


def test_only_this_machine_reaches_what_compose_starts(services: dict[str, dict[str, Any]]) -> None:
    """Ours listen on the loopback of the machine whose network they share."""
    for name in OURS:
        assert services[name]["network_mode"] == "host"
        assert "--host" not in services[name]["command"]
    (published,) = services["postgres"]["ports"]
    assert published.startswith("127.0.0.1:")


def test_compose_starts_no_database_without_a_password(
    services: dict[str, dict[str, Any]],
) -> None:
    password = services["postgres"]["environment"]["POSTGRES_PASSWORD"]
    assert password.startswith("${HALTERES_POSTGRES_PASSWORD:?")
    url = services["trajectories"]["environment"]["HALTERES_DATABASE_URL"]
    assert "${HALTERES_POSTGRES_PASSWORD}" in url
