"""The folder of one test: the interface between its tester and everybody who asks.

Owns: where tests live, their ids, which file is whose, telling a lost tester from a living one; finding the newest test
of an environment with a model (`TestOutcome`), and the open one of a request.
Never: runs a test, writes more than a new folder; believes a test that is older than the environment's file, or that
says little of training: of greedy, cut or few answers.

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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from halteres.agent.trial.request import ADDRESS, KEY, LOCAL, Candidate, Request
from halteres.config import environ
from halteres.config.discovery import (
    EnvironmentBroken,
    EnvironmentFile,
    EnvironmentNotFound,
    find_environment,
    split_name,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """What one test found with one model. A figure of None was not measured."""

    __test__ = False  # for pytest: this is no class of tests

    test_id: str
    groups_with_variance: float | None  # share of groups
    mean_score: float | None
    tokens_per_s: float | None
    seconds: float  # of the environment's process
    rollouts: int  # completions that were scored
    trainable: bool | None
    finished_at: float  # unix seconds
    output_file: Path  # its groups, a line each


def latest_test(environment: str, model: str, draft: str = "") -> TestOutcome | None:
    """The newest finished test of this environment with this model that scored anything as training would.

    Args:
        environment: its name, or its file: as a run's settings have it.
        model: as a draft names it, or an endpoint's id.
        draft: handle; a test of this draft comes before those of others, which may have other settings.
    """
    try:
        found = find_environment(environment)
    except (EnvironmentNotFound, EnvironmentBroken):
        return None
    best_first = sorted(_alike(found), key=lambda test: (test[0].draft == draft, _finished_at(test[1])), reverse=True)
    return next((told for _, folder in best_first for told in _outcomes(folder, model)), None)


OPEN_S = 600.0
"""So long after its end a test whose answer nobody was given waits for the same call."""


def open_test(request: Request) -> TestFolder | None:
    """The newest test of the same arguments that goes on, or has ended and nobody was given its answer.

    Clients that cannot pass a test_id ask again with the same arguments until the test has ended (seed 001).
    """
    found = [
        (other.created_at, folder)
        for folder, other in _requests()
        if other.asks_the_same(request) and _is_open(folder, other)
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _is_open(folder: TestFolder, request: Request) -> bool:
    phase = folder.phase()
    if phase == "lost" or folder.collected.exists() or _changed_since(request.environment_file, request.created_at):
        return False
    return phase == "running" or time.time() - _finished_at(folder) <= OPEN_S


def _requests() -> Iterator[tuple[TestFolder, Request]]:
    for folder in all_tests():
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # just removed, or of another version
            yield folder, folder.request()


def _alike(found: EnvironmentFile) -> Iterator[tuple[Request, TestFolder]]:
    """Tests of this environment that were like training; of a family's file, those of the same variant."""
    environment = found.file_path, split_name(found.name)[1]
    for folder, request in _requests():
        same = (request.environment_file, split_name(request.environment)[1]) == environment
        if same and request.is_like_training:
            yield request, folder


def _outcomes(folder: TestFolder, model: str) -> Iterator[TestOutcome]:
    result = folder.result()
    if result is None or _changed_since(result["environment_file"], _finished_at(folder)):
        return
    for one in result["models_tested"]:
        if one["model"] in (model, LOCAL + model) and one["steps_tested"]:
            yield TestOutcome(
                test_id=result["test_id"],
                groups_with_variance=one["groups_with_variance"],
                mean_score=one["mean_score"],
                tokens_per_s=one.get("tokens_per_s"),
                seconds=one.get("seconds", 0.0),
                rollouts=one["total_completions"],
                trainable=one["trainable"],
                finished_at=_finished_at(folder),
                output_file=Path(one["output_file"]),
            )


def _changed_since(file: str, at: float) -> bool:
    """Whether an environment's file has changed since (unix s), or is gone."""
    try:
        return Path(file).stat().st_mtime > at
    except OSError:
        return True


def _finished_at(folder: TestFolder) -> float:
    try:
        return (folder.path / "result.json").stat().st_mtime
    except OSError:
        return 0.0
