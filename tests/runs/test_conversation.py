"""What of a run can be asked, and in which words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN

from halteres.errors import Conflict, NotFound, ProcessFailed
from halteres.runs import conversation
from halteres.runs.conversation import (
    BASE,
    NEWEST,
    Conversation,
    Piece,
    Policy,
    Sampling,
    Wording,
    policies_of,
    policy_named,
)
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import Server


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    run = run_fixtures.make_run()
    (run.path / "config.yaml").write_text("env: {}")
    return run


def test_what_can_be_asked_is_the_base_model_and_every_step_once(run: RunDirectory) -> None:
    """A run that is resumed may write the checkpoint of a step a second time."""
    for step, name in ((0, "step-000000"), (2, "step-000002"), (2, "again"), (4, "final")):
        run_results.add_checkpoint(run, step, name)
    asked = [(one.name, one.path.rpartition("/")[2], one.step) for one in policies_of(run)]
    assert asked == [(BASE, "tiny", None), (NEWEST, "final", 4), (f"{RUN}@2", "again", 2)]
    assert policy_named(run, f"{RUN}@4").path == policy_named(run, NEWEST).path
    with pytest.raises(NotFound, match="steps 4, 2"):
        policy_named(run, f"{RUN}@0")


def test_the_newest_weights_of_a_run_at_its_first_checkpoint_are_those_of_step_0(
    run: RunDirectory,
) -> None:
    with pytest.raises(NotFound, match="has written no checkpoint"):
        policy_named(run, NEWEST)
    run_results.add_checkpoint(run, 0, "step-000000")
    assert policy_named(run, NEWEST).step == 0


def test_a_reward_models_run_has_no_policy(run: RunDirectory) -> None:
    run_fixtures.change(run, kind="reward")
    with pytest.raises(Conflict, match="trains a reward model"):
        policies_of(run)


def test_the_tokenizer_of_a_service_elsewhere_is_not_needed(run: RunDirectory) -> None:
    """A prompt then goes as a text, and so do the turns before it."""
    words = Wording(head="<user>Q: ", tail="<end>")
    chat = Conversation(run=run, base="Qwen/Qwen3-0.6B", words=words)
    first = chat.asked("1 + 1")
    assert first.messages is None
    chat.turns.append((first, "2"))
    path, body = chat.request(chat.asked("2 + 2"))
    assert (path, body["prompt"]) == (
        "completions",
        "<user>Q: 1 + 1<end>2\n<user>Q: 2 + 2<end>",
    )


async def test_an_answer_that_stands_still_is_given_up_though_its_connection_lives(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def stream(*_: object) -> AsyncGenerator[dict[str, Any], None]:
        yield {"choices": [{"index": 0, "text": "4"}]}
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(conversation, "WHOLE_ANSWER_S", 0.05)
    monkeypatch.setattr(conversation.servers, "stream", stream)
    monkeypatch.setattr(conversation.ServiceSearch, "look", lambda _: Server(url="http://x"))
    chat = Conversation.with_run(run)
    answer = chat.answer(chat.asked("2 + 2"), Policy(name=BASE, path="m"), Sampling())
    assert [await anext(answer)] == [Piece(index=0, text="4")]
    async with asyncio.timeout(5):
        with pytest.raises(ProcessFailed, match="not whole after 0 s"):
            await anext(answer)
        await ended.wait()


async def test_a_reader_who_leaves_ends_the_sampling_however_often_he_is_cancelled(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that ends cancels what is cancelled already."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def stream(*_: object) -> AsyncGenerator[dict[str, Any], None]:
        begun.set()
        try:
            await asyncio.Event().wait()
            yield {}
        finally:
            ended.set()
            await asyncio.sleep(0.01)  # it tells the service

    monkeypatch.setattr(conversation.servers, "stream", stream)
    monkeypatch.setattr(conversation.ServiceSearch, "look", lambda _: Server(url="http://x"))
    chat = Conversation.with_run(run)

    async def read() -> None:
        answer = chat.answer(chat.asked("2 + 2"), Policy(name=BASE, path="m"), Sampling())
        async with aclosing(answer) as pieces:
            async for _ in pieces:
                pass

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    await asyncio.sleep(0)
    reading.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await reading
        await ended.wait()


def test_a_line_that_ends_before_the_tasks_begin_stays_whole() -> None:
    """The role of a chat's message is such a line."""
    words = Wording.of([f"<|im_start|>user\n{task}<|im_end|>" for task in ("1 + 2", "34 + 5")])
    assert words.head == "<|im_start|>user\n"


def test_words_are_never_cut() -> None:
    words = Wording.of(["Why is it?", "What is that?", "Who says that?", "When was that?"])
    assert (words.head, words.tail) == ("", "?")
    words = Wording.of(["one\ntwo", "three"])
    assert (words.head, words.tail, words.example) == ("", "", "three")
