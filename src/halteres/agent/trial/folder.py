"""The folder of one test: the interface between its tester and everybody who asks.

Owns: where tests live, their ids, which file is whose, telling a lost tester from a living one.
Never: runs a test, writes more than a new folder.

    request.json            what was asked
    <stem>.jsonl, .log      a model's groups, one line each, and what its environment said
    <stem>/                 config.yaml, rollouts/, ended.json (how it came to its end)
    odd_answers.json        what the scorer gives for answers that no model gave
    lock                    held by the tester as long as it lives
    result.json             the whole answer; written last
    collected               empty; there once somebody was given the whole answer
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.trial.request import ADDRESS, KEY, Candidate, Request
from halteres.config import environ
from halteres.errors import NotFound, ServerError, nearest
from halteres.files import replace_file
from halteres.process import detach
from halteres.rewards.components import secret_variables
from halteres.runs import lock

Phase = Literal["running", "done", "failed", "lost"]

Kind = Literal["t", "e", "r"]
"""A test of an environment; an evaluation, of a policy or of a reward model, whose folder is kept and read alike."""


@dataclass(frozen=True, slots=True)
class TestFolder:
    """One test's files. Reading is safe at any time, from any process."""

    __test__ = False  # for pytest: this is no class of tests

    path: Path

    @property
    def test_id(self) -> str:
        """Its kind and eight hex digits; the folder's name."""
        return self.path.name

    @property
    def lock(self) -> Path:
        """Held by the tester."""
        return self.path / "lock"

    def groups(self, candidate: Candidate) -> Path:
        """Where a model's groups are written."""
        return self.path / f"{candidate.stem}.jsonl"

    def log(self, candidate: Candidate) -> Path:
        """What a model's environment said."""
        return self.path / f"{candidate.stem}.log"

    def work(self, candidate: Candidate) -> Path:
        """The environment's run directory in this test."""
        return self.path / candidate.stem

    def request(self) -> Request:
        """What was asked."""
        return msgspec.json.decode((self.path / "request.json").read_bytes(), type=Request)

    def result(self) -> dict[str, Any] | None:
        """The whole answer, once the test has ended."""
        try:
            return json.loads((self.path / "result.json").read_bytes())
        except OSError:
            return None

    @property
    def collected(self) -> Path:
        """There once somebody was given the whole answer."""
        return self.path / "collected"

    def phase(self) -> Phase:
        """What the test is doing. One without a result whose tester is gone is lost."""
        held = lock.held(self.lock)  # before the look at the result: a tester lets go after writing it
        result = self.result()
        if result is not None:
            return result["status"]
        return "running" if held else "lost"

    def write(self, name: str, value: Any) -> None:
        """Write one of the test's JSON files whole; its folder must exist."""
        replace_file(self.path / name, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def tests_home() -> Path:
    """The folder of all tests: HALTERES_HOME/tests."""
    return environ.home() / "tests"


def new_folder(kind: Kind = "t") -> TestFolder:
    """A fresh folder, with a lock that nobody holds yet."""
    while True:
        path = tests_home() / f"{kind}-{secrets.token_hex(4)}"
        try:
            path.mkdir(0o700, parents=True)  # its relay's address lies in it, which the endpoint bills us for
            return TestFolder(path)
        except FileExistsError:
            continue


def find_test(test_id: str) -> TestFolder:
    """The test of this id. NotFound offers the nearest."""
    path = tests_home() / test_id
    if re.fullmatch(r"t-[0-9a-f]{8}", test_id) and (path / "request.json").is_file():
        return TestFolder(path)
    guess = nearest(test_id, [folder.test_id for folder in all_tests()])
    hint = f"Did you mean {guess}?" if guess else "Tests are named by rl_test_inference's answer."
    again = f'rl_test_inference(test_id="{guess}")' if guess else "rl_test_inference()"
    raise NotFound(f"There is no test '{test_id}'.", hint, again, did_you_mean=guess)


def all_tests() -> Iterator[TestFolder]:
    """Every test of this machine, in no order."""
    return (TestFolder(file.parent) for file in tests_home().glob("t-*/request.json"))


def link_test(folder: TestFolder, request: Request) -> None:
    """Make the links. What they lead to may not be there yet."""
    hermes = environ.hermes_home()
    for logs in (environ.home() / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        for one in request.candidates:
            for file in (folder.groups(one), folder.log(one)):
                _link(logs / "inference_tests" / file.name, file)


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # the folder is not ours to write
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target)


def start(request: Request) -> TestFolder:
    """Start a test in a fresh folder. Its tester is detached, and has the key only if it needs it.

    Raises:
        ServerError: it cannot be started; there is no folder.
    """

    def prepare(folder: TestFolder) -> None:
        folder.write("request.json", msgspec.structs.replace(request, test_id=folder.test_id))
        link_test(folder, request)

    return begin("t", "halteres.agent.trial", prepare, *keys_for(request))


def begin(kind: Kind, module: str, prepare: Callable[[TestFolder], None], *keys: str) -> TestFolder:
    """Start a detached process in a fresh folder that was prepared for it.

    Args:
        kind: of the folder.
        module: what the process runs: `python -m MODULE FOLDER --lock-fd N`.
        prepare: writes what the process reads.
        keys: variables named like secrets that it gets.

    Raises:
        ServerError: it cannot be started; there is no folder.
    """
    folder = held = None
    try:
        folder = new_folder(kind)
        prepare(folder)
        held = lock.take(folder.lock)
        command = (sys.executable, "-m", module, str(folder.path), "--lock-fd", str(held))
        detach(command, folder.path, folder.path / "tester.log", environ.with_keys(*keys), held)
        return folder
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise ServerError(f"No test can be started in {tests_home()}.", f"{error.strerror or error}.") from error
    finally:
        if held is not None:
            os.close(held)


def keys_for(request: Request) -> list[str]:
    """Names of the variables with the keys of those that its models and its judges are asked of."""
    remote = [KEY, ADDRESS] if not all(one.is_local for one in request.candidates) else []
    service = [environ.API_KEY] if any(one.service_url for one in request.candidates) else []
    return [*remote, *service, *secret_variables(request.env)]
