"""Variables of the environment: read in one place, each misreading told with the variable's name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from halteres.config import environ
from halteres.errors import InvalidConfig


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("HALTERES_THREADS", "x", environ.threads),
        ("HALTERES_THREADS", "0", environ.threads),
        ("HALTERES_THREADS", "-1", environ.threads),
        ("HALTERES_LOG", "x", environ.log_level),
        ("HALTERES_LIFELINE_FD", "x", environ.lifeline_fd),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: object
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=name):
        read()  # type: ignore[operator]


def test_variables_that_are_empty_or_in_small_letters_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_LOG", "debug")
    monkeypatch.setenv("HALTERES_THREADS", "")
    environ.check()
    assert environ.log_level() == "DEBUG"
    assert environ.threads() is None


@pytest.mark.parametrize(
    ("given", "exempt"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "a.example, localhost"}, "a.example,localhost,127.0.0.1"),
        ({"NO_PROXY": "b.example", "no_proxy": "a.example"}, "a.example,b.example,127.0.0.1,localhost"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_children_ask_no_proxy_for_loopback_and_keep_what_was_exempt(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], exempt: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    child = environ.for_child()
    assert child["no_proxy"] == child["NO_PROXY"] == exempt


def test_a_process_with_a_bad_log_level_ends_with_one_sentence() -> None:
    code = "from halteres.process import begin; begin('api')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environ.for_child(HALTERES_LOG="loud"),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: The variable HALTERES_LOG is 'LOUD'.")
    assert len(ended.stderr.splitlines()) == 1
