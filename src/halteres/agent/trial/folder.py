"""The folder of one test or evaluation: the interface between the process that works in it and
everybody who asks.

    request.json            what was asked
    <stem>.jsonl, .log      a model's groups, one line each, and what its environment said
    <stem>/                 config.yaml, rollouts/, ended.json (how it came to its end)
    odd_answers.json        what the scorer gives for answers that no model gave
    lock                    held by the process as long as it lives
    result.json             the whole answer; written last
    collected               empty; there once somebody was given the whole answer

Whoever reads a test believes none that is older than the environment's file, or that says little of
training: of greedy, cut or few answers.
"""

from __future__ import annotations

import argparse
import asyncio
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
from typing import Any, Literal, TypeVar

import msgspec

from halteres.agent.answer_text import nonempty
from halteres.agent.tool import wait_cut
from halteres.agent.trial.request import ADDRESS, KEY, LOCAL, Request, TestedModel
from halteres.config import environ
from halteres.config.discovery import (
    EnvironmentBroken,
    EnvironmentNotFound,
    find_environment,
    split_name,
)
from halteres.errors import HalteresError, NotFound, ServerError, boundary, nearest
from halteres.files import replace_file
from halteres.groups.group import ScoredGroup, read_groups
from halteres.next_step import Advice, NextStep
from halteres.process import detach
from halteres.redaction import Redactor
from halteres.rewards.components import secret_variables
from halteres.runs.reading.rollouts import RecordedGroup, recorded_groups
from halteres.runs.state import is_locked, take_lock

T = TypeVar("T")

Phase = Literal["running", "done", "failed", "lost"]

Kind = Literal["t", "e", "r"]
"""A test of an environment; an evaluation, of a policy or of a reward model. A folder's name begins
with it.
"""

POLL_S = 0.05
OPEN_S = 600.0  # so long after its end a test whose answer nobody was given waits for the same call


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
        """Held by the process that works here."""
        return self.path / "lock"

    @property
    def collected(self) -> Path:
        """There once somebody was given the whole answer."""
        return self.path / "collected"

    def groups(self, model: TestedModel) -> Path:
        """Where a model's groups are written."""
        return self.path / f"{model.stem}.jsonl"

    def scored_groups(self, model: TestedModel) -> list[ScoredGroup | None]:
        """A model's groups so far; None for a line that is no group."""
        return read_groups(self.groups(model))

    def recorded_groups(self, model: TestedModel) -> list[RecordedGroup]:
        """What its environment recorded of them, and of those that failed or were dropped."""
        files = sorted(self.work(model).glob("rollouts/*.jsonl"))
        return [group for file in files for group in recorded_groups(file)]

    def log(self, model: TestedModel) -> Path:
        """What a model's environment said."""
        return self.path / f"{model.stem}.log"

    def work(self, model: TestedModel) -> Path:
        """The environment's run directory in this test."""
        return self.path / model.stem

    def request(self, kind: type[T]) -> T:
        """What was asked."""
        return msgspec.json.decode(
            (self.path / "request.json").read_bytes(), type=kind, dec_hook=lambda of, it: of(it)
        )

    def result(self) -> dict[str, Any] | None:
        """The whole answer, once there is one."""
        try:
            return json.loads((self.path / "result.json").read_bytes())
        except OSError:
            return None

    @property
    def finished_at(self) -> float:
        """Unix s; 0 where there is no result."""
        try:
            return (self.path / "result.json").stat().st_mtime
        except OSError:
            return 0.0

    def phase(self) -> Phase:
        """What goes on here. Without a result, and with its process gone, it is lost."""
        # before the look at the result: a process lets go after writing it
        held = is_locked(self.lock)
        result = self.result()
        if result is not None:
            return result["status"]
        if held:
            return "running"
        return "lost"

    def write(self, name: str, value: Any) -> None:
        """Write one JSON file whole, for its owner alone, for a request has keys; its folder must
        exist.
        """
        content = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=1) + b"\n"
        replace_file(self.path / name, content, private=True)


def tests_folder() -> Path:
    """The folder of all tests: HALTERES_HOME/tests."""
    return environ.home() / "tests"


def all_folders(kind: Kind = "t") -> Iterator[TestFolder]:
    """Every one of this kind, in no order."""
    return (TestFolder(file.parent) for file in tests_folder().glob(f"{kind}-*/request.json"))


def folder_of(kind: Kind, name: str) -> TestFolder | None:
    """The folder of this name, where there is one of this kind."""
    folder = TestFolder(tests_folder() / name)
    is_name = re.fullmatch(rf"{kind}-[0-9a-f]{{8}}", name)
    if is_name and (folder.path / "request.json").is_file():
        return folder
    return None


def find_test(test_id: str) -> TestFolder:
    """The test of this id. NotFound offers the nearest."""
    if (folder := folder_of("t", test_id)) is not None:
        return folder
    guess = nearest(test_id, [folder.test_id for folder in all_folders()])
    hint = "Tests are named by rl_test_inference's answer."
    if guess:
        hint = f"Did you mean {guess}?"
    call = NextStep.of("rl_test_inference", test_id=guess)
    raise NotFound(f"There is no test '{test_id}'.", hint, call, did_you_mean=guess)


def new_folder(kind: Kind = "t") -> TestFolder:
    """A fresh folder, with a lock that nobody holds yet."""
    while True:
        path = tests_folder() / f"{kind}-{secrets.token_hex(4)}"
        with contextlib.suppress(FileExistsError):
            # its relay's address lies in it, which the endpoint bills us for
            path.mkdir(0o700, parents=True)
            return TestFolder(path)


def start(request: Request) -> TestFolder:
    """Start a test in a fresh folder. Its tester is detached, and has the key only if it needs it.

    Raises:
        ServerError: it cannot be started; there is no folder.
    """
    keys = (*keys_for(request), *request.sampler_keys)
    folder = begin("t", "halteres.agent.trial.tester", request, *keys)
    hermes = environ.hermes_home()
    for logs in (environ.home() / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        for file in (
            file for one in request.models for file in (folder.groups(one), folder.log(one))
        ):
            link = logs / "inference_tests" / file.name
            with contextlib.suppress(OSError):  # the folder is not ours to write
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(file)  # which may not be there yet
    return folder


def keys_for(request: Request) -> list[str]:
    """Names of the variables with the keys of those that its models and its judges are asked of."""
    remote = []
    if not all(one.is_local for one in request.models):
        remote = [KEY, ADDRESS]
    service = []
    if any(one.service_url for one in request.models):
        service = [environ.API_KEY]
    return [*remote, *service, *secret_variables(request.env)]


def begin(kind: Kind, module: str, request: msgspec.Struct, *keys: str) -> TestFolder:
    """Start a detached process in a fresh folder.

    Args:
        kind: of the folder.
        module: what the process runs: `python -m MODULE FOLDER --lock-fd N`.
        request: what it is asked to do.
        keys: variables named like secrets that it gets.

    Raises:
        ServerError: it cannot be started; there is no folder.
    """
    folder = held = None
    try:
        folder = new_folder(kind)
        folder.write("request.json", request)
        held = take_lock(folder.lock)
        command = (sys.executable, "-m", module, str(folder.path), "--lock-fd", str(held))
        detach(command, folder.path, folder.path / "tester.log", environ.with_keys(*keys), held)
        return folder
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise ServerError(
            f"No test can be started in {tests_folder()}.", f"{error.strerror or error}."
        ) from error
    finally:
        if held is not None:
            os.close(held)


def own_folder() -> TestFolder:
    """In the process that `begin` started: the folder that it works in, whose lock it holds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--lock-fd", type=int, help="descriptor of the folder's lock, taken already"
    )
    options = parser.parse_args()
    if options.lock_fd is None:
        take_lock(options.folder / "lock")
    return TestFolder(options.folder)


def leave_result(folder: TestFolder, what: str, work: Callable[[], dict[str, Any]]) -> int:
    """Do the work, and write what it comes to, or how it failed, as result.json; the process's exit
    code.
    """
    try:
        with boundary(ServerError, what):
            result = {"status": "done", **work()}
    except HalteresError as error:
        result = {"status": "failed", "error": error.sentence, "code": error.code}
        sys.stderr.write(f"error: {Redactor.of_this_process().text(error.sentence)}\n")
    folder.write("result.json", Redactor.of_this_process().json(result))
    if result["status"] == "done":
        return 0
    return 1


async def awaited(
    kind: Kind,
    evaluation_id: str | None,
    wait_s: float,
    start_one: Callable[[], TestFolder],
    instead: Advice,
) -> TestFolder:
    """The folder of the evaluation of this id, or of a new one, once nothing goes on there or the
    time is over.

    Raises:
        NotFound: there is none of this id; `instead`: what to call then.
    """
    ends_at = time.monotonic() + wait_s
    if evaluation_id is None:
        folder = await asyncio.to_thread(start_one)
    elif (folder := folder_of(kind, evaluation_id)) is None:
        raise NotFound(f"There is no evaluation '{evaluation_id}'.", "Answers name them.", instead)
    await until_ended(folder, ends_at)
    return folder


async def until_ended(folder: TestFolder, ends_at: float) -> None:
    """Wait until nothing goes on in this folder, or until this time (monotonic s)."""
    while await asyncio.to_thread(folder.phase) == "running":
        if (left := ends_at - time.monotonic()) <= 0:
            return
        await asyncio.sleep(min(POLL_S, left))


def unfinished(folder: TestFolder, tool: str, worker: str, wait_s: float) -> dict[str, Any] | None:
    """What an answer says of an evaluation that goes on, or has failed; None of one that is done.

    Args:
        folder: the evaluation's.
        tool: that waits for it.
        worker: who does the work, in words, should it be gone.
        wait_s: how long the call has waited for it.
    """
    phase, result = folder.phase(), folder.result() or {}
    if phase == "done":
        return None
    if phase == "running":
        again = NextStep.of(tool, evaluation_id=folder.test_id, wait_s=45)
        return {"status": phase, **nonempty(wait_cut=wait_cut(wait_s)), "next": again}
    gone = f"The {worker} is gone (killed, or the machine was restarted)."
    error, code = result.get("error", gone), result.get("code", "process_exited")
    return {
        "status": "failed",
        "error": error,
        "code": code,
        "next": f"read {folder.path / 'tester.log'}, mend it",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """What one test found with one model. A figure of None was not measured."""

    __test__ = False  # for pytest: this is no class of tests

    test_id: str
    groups_with_variance: float | None  # share of groups
    trainable: bool | None
    finished_at: float  # unix seconds


def latest_test(environment: str, model: str, draft: str = "") -> TestOutcome | None:
    """The newest finished test of this environment with this model that scored anything as training
    would.

    Args:
        environment: its name, or its file: as a run's settings have it; of a family's file, one of
            the same variant.
        model: as a draft names it, or an endpoint's id.
        draft: handle; a test of this draft comes before those of others, which may have other
            settings.
    """
    try:
        found = find_environment(environment)
    except (EnvironmentNotFound, EnvironmentBroken):
        return None
    variant = split_name(found.name)[1]
    alike = [
        (request.draft == draft, folder.finished_at, folder)
        for folder, request in _requests()
        if (str(request.program.path), split_name(request.program.name)[1])
        == (found.file_path, variant)
        and request.is_like_training
    ]
    for *_, folder in sorted(alike, key=lambda test: test[:2], reverse=True):
        result = folder.result()
        if result is None or _changed_since(Path(result["environment_file"]), folder.finished_at):
            continue
        for one in result["models_tested"]:
            if one["model"] in (model, LOCAL + model) and one["steps_tested"]:
                return TestOutcome(
                    test_id=folder.test_id,
                    groups_with_variance=one["groups_with_variance"],
                    trainable=one["trainable"],
                    finished_at=folder.finished_at,
                )
    return None


def open_test(request: Request) -> TestFolder | None:
    """The newest test of the same arguments that goes on, or has ended and nobody was given its
    answer.

    Clients that cannot pass a test_id ask again with the same arguments until the test has ended
    (seed 001).
    """
    newest_first = sorted(_requests(), key=lambda pair: pair[1].created_at, reverse=True)
    for folder, other in newest_first:
        is_changed = _changed_since(other.program.path, other.created_at)
        if folder.collected.exists() or is_changed or other.arguments != request.arguments:
            continue
        phase = folder.phase()
        if phase == "running" or (phase != "lost" and time.time() - folder.finished_at <= OPEN_S):
            return folder
    return None


def _requests() -> Iterator[tuple[TestFolder, Request]]:
    for folder in all_folders():
        # just removed, or of another version
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            yield folder, folder.request(Request)


def _changed_since(file: Path, at: float) -> bool:
    """Whether an environment's file has changed since (unix s), or is gone."""
    try:
        return file.stat().st_mtime > at
    except OSError:
        return True
