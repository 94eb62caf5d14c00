"""Every generation of the SDK drives one service: each step that the SDK has gives the right
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.requirements import proves

from halteres.models import TINY, builtin_path

from .program.catalogue import STEPS
from .program.steps import as_version
from .runs import VERSIONS, drive, environment
from .serving import Serving, serving

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One service with the built-in model for all versions, one after another."""
    with serving(tmp_path_factory.mktemp("service")) as running:
        yield running


@proves("connect:older-sdks", "connect:retired-routes", "wire:accept", "wire:content-type")
@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_of_this_version_works(version: str, service: Serving, tmp_path: Path) -> None:
    check(version, service, tmp_path)


def test_the_newest_sdk_works_where_another_engine_samples(tmp_path: Path) -> None:
    with serving(tmp_path, samplers=1) as service:
        check(VERSIONS[-1], service, tmp_path)


def check(version: str, service: Serving, tmp_path: Path) -> None:
    """Drive the service with this SDK: every step that it has gives the right values."""
    folder = builtin_path(TINY)
    assert folder is not None
    outcome = drive(
        environment(version),
        service.url,
        model=TINY,
        folder=folder,
        report=tmp_path / "report.json",
    )
    assert outcome.sdk == version
    expected = [step.name for step in STEPS if step.exists_in(as_version(version))]
    assert [step["name"] for step in outcome.steps] == expected
    assert not outcome.failed, "\n".join(outcome.failed)
    assert "Traceback" not in service.log.read_text(), service.log.read_text()[-3000:]


def test_the_names_of_steps_are_unique() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
