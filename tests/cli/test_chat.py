"""`halteres chat`: a question in the words of the run's own prompts, whatever wrote them."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest
from rewards.scorers import Scripted
from rich.console import Console

from halteres.cli.chat import chat
from halteres.cli.follow import summarise
from halteres.clients.json_client import Refused
from halteres.errors import InvalidConfig, NotFound
from halteres.models import TINY, builtin_path
from halteres.observe.metrics import append_row
from halteres.process import alive
from halteres.runs import servers
from halteres.runs.conversation import wording_of
from halteres.runs.directory import RunDirectory
from halteres.runs.servers import Server, end_kept, kept_in, served
from halteres.scores import Scorable, Score
from halteres.tokenizer import load_tokenizer

pytestmark = pytest.mark.runs

Events = AsyncIterator[dict[str, Any]]
Program = Callable[..., subprocess.CompletedProcess[str]]

MESSAGE = (
    "Question: What is the value of {}? Give the result as a whole number.\n"
    "Please reason step by step, and put your final answer within \\boxed{{}}."
)
TASKS = ("3 * 2", "9 * 7", "9 * 1", "6 * 7", "1 * 8")
SEARCH = "halteres.runs.kept_service.ServiceSearch.look"
STREAM = "halteres.runs.servers.stream"
TOKENIZER = load_tokenizer(str(builtin_path(TINY)))


def tokens(task: str) -> list[int]:
    """What the policy was trained on: the environment's message in the model's chat."""
    return TOKENIZER.apply_chat_template([{"role": "user", "content": MESSAGE.format(task)}])


def roll_out(run: RunDirectory, *tasks: str) -> None:
    """Rollouts as an environment writes them."""
    for number, task in enumerate(tasks):
        prompt = TOKENIZER.decode(tokens(task), skip_special_tokens=False)
        completions = [{"text": "x", "score": 0.0, "tokens": 1, "finish": "stop"}] * 2
        row = {
            "group": number,
            "item": None,
            "prompt": prompt,
            "completions": completions,
            "failures": [],
        }
        append_row(run.path / "rollouts" / f"step_{number % 2 + 1}.jsonl", row)


@pytest.fixture
def trained(finished: RunDirectory) -> RunDirectory:
    """A run of an environment that has no prompt_template."""
    (finished.path / "config.yaml").write_text("env: {system_prompt: Be brief.}")
    (finished.path / "rollouts").mkdir()
    return finished


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What the service is asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def stream(service: Server, path: str, body: dict[str, Any]) -> Events:
        route = path.rpartition("/v1/")[2]
        asked.append((route, body))
        for part in ("4", "2"):
            choice: dict[str, Any] = {"index": 0, "text": part}
            if route == "chat/completions":
                choice = {"index": 0, "delta": {"content": part}}
            yield {"choices": [choice]}

    monkeypatch.setattr(SEARCH, lambda *_: Server(url="http://service"))
    monkeypatch.setattr(STREAM, stream)
    return asked


@pytest.mark.parametrize(
    "typed",
    [
        "3 * 4",
        "What is the value of 3 * 4?",
        "What is the value of 3 * 4? Give the result as a whole number.",
        "Question: What is the value of 3 * 4",
        MESSAGE.format("3 * 4"),
        f"  {MESSAGE.format('3 * 4')}\n",
    ],
)
def test_a_task_alone_or_with_words_around_it_becomes_the_prompt_that_the_policy_was_trained_on(
    trained: RunDirectory,
    posted: list[tuple[str, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    typed: str,
) -> None:
    roll_out(trained, *TASKS)
    chat(trained.run_id, typed, 0.0, 8, False)
    ((path, body),) = posted
    assert (path, body["model"]) == ("completions", "tinker://x/sampler_weights/final")
    assert TOKENIZER.encode(
        body["prompt"], add_special_tokens=body["add_special_tokens"]
    ) == tokens("3 * 4")
    said = capsys.readouterr()
    assert said.out == "42\n"
    assert "What is the value of [...]? Give the result" in said.err


def test_a_run_with_too_few_prompts_is_asked_as_it_is_with_its_system_prompt_and_says_so(
    trained: RunDirectory,
    posted: list[tuple[str, dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    roll_out(trained, *TASKS[:3], *TASKS[:3])
    chat(trained.run_id, "3 * 4", 0.0, 8, True)
    ((path, body),) = posted
    assert (path, body["model"]) == ("chat/completions", TINY)
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3 * 4"},
    ]
    assert "sent as it is" in capsys.readouterr().err


def test_a_checkpoint_is_asked_by_its_step(
    trained: RunDirectory, posted: list[tuple[str, dict[str, Any]]]
) -> None:
    path = "tinker://x/sampler_weights/step-000001"
    row = {"name": "step-000001", "step": 1, "state_path": None, "sampler_path": path}
    checkpoints = trained.path / "checkpoints.jsonl"
    final = checkpoints.read_text()
    checkpoints.unlink()
    append_row(checkpoints, row)
    with checkpoints.open("a") as file:
        file.write(final)
    chat(f"{trained.run_id}@1", "3 * 4")
    ((_, body),) = posted
    assert (body["model"], body["temperature"], body["max_tokens"]) == (path, 0.0, 128)
    with pytest.raises(NotFound, match="steps 2, 1"):
        chat(f"{trained.run_id}@7", "3 * 4")


def test_of_several_answers_the_one_that_the_reward_model_likes_best_is_shown(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It reads the chat's messages, not its marks; and greedy sampling, which is the default, would
    give one answer.
    """
    (trained.path / "config.yaml").write_text("env: {}")
    roll_out(trained, *TASKS)
    asked: list[dict[str, Any]] = []
    read: list[Scorable] = []

    class Longest(Scripted):
        async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
            read.extend(texts)
            return await super().score(texts)

    async def stream(service: Server, path: str, body: dict[str, Any]) -> Events:
        asked.append(body)
        for index, text in enumerate(("unclear", "It is 12.", "12")):
            yield {"choices": [{"index": index, "text": text}]}

    monkeypatch.setattr(SEARCH, lambda *_: Server(url="http://service"))
    monkeypatch.setattr(STREAM, stream)
    opened: list[str] = []

    def open_scorer(where: str) -> Longest:
        opened.append(where)
        return Longest(lambda text: None if text == "unclear" else float(len(text)))

    monkeypatch.setattr("halteres.rewards.scorer.open_scorer", open_scorer)
    monkeypatch.setattr("sys.stdin", io.StringIO("3 * 4\n5 * 6\n"))
    chat(trained.run_id, None, best_of=3, reward="reward-model")
    assert capsys.readouterr().out == "It is 12.\n" * 2
    assert opened == ["reward-model"], "once for the whole chat"
    assert (asked[0]["n"], asked[0]["temperature"]) == (3, 1.0)
    assert read[0].prompt == [{"role": "user", "content": MESSAGE.format("3 * 4")}]
    with pytest.raises(InvalidConfig, match="come together"):
        chat(trained.run_id, "3 * 4", best_of=3)
    with pytest.raises(InvalidConfig, match="all 3 answers are the same"):
        chat(trained.run_id, "3 * 4", best_of=3, reward="reward-model", temperature=0.0)


def test_an_example_is_a_task_of_the_run(trained: RunDirectory) -> None:
    roll_out(trained, *TASKS)
    words = wording_of(trained)
    assert words is not None and words.example in TASKS


def test_the_end_of_a_run_names_a_question_of_its_own(trained: RunDirectory) -> None:
    roll_out(trained, *TASKS)
    console = Console(file=io.StringIO(), width=200)
    summarise(trained, trained.state(), console)
    said = cast("io.StringIO", console.file).getvalue()
    (question,) = shlex.split(said.partition("next:")[2])[3:]
    assert question in TASKS


def test_with_history_the_policy_reads_the_turns_before_until_a_new_conversation(
    trained: RunDirectory,
    posted: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first prompt is the one of training, to the token; later ones are its messages."""
    (trained.path / "config.yaml").write_text("env: {}")
    roll_out(trained, *TASKS)
    monkeypatch.setattr("sys.stdin", io.StringIO("3 * 4\n5 * 6\n/new\n7 * 8\n"))
    chat(trained.run_id, None, 0.0, 8, False, history=True)
    first, second, third = posted
    assert (first[0], second[0], third[0]) == ("completions", "chat/completions", "completions")
    assert second[1]["messages"] == [
        {"role": "user", "content": MESSAGE.format("3 * 4")},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": MESSAGE.format("5 * 6")},
    ]


def test_a_system_prompt_stands_once_and_a_refused_conversation_loses_its_oldest_turn(
    trained: RunDirectory,
    posted: list[tuple[str, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Too few prompts are recorded: the chat has history unless it is told otherwise."""
    answered = servers.stream

    async def stream(service: Server, path: str, body: dict[str, Any]) -> Events:
        async for event in answered(service, path, body):
            if len(body["messages"]) > 4:
                raise Refused("The service refused the request (400).", answered=400)
            yield event

    monkeypatch.setattr(STREAM, stream)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\nc\n"))
    chat(trained.run_id, None, 0.0, 8, False)
    roles = [[one["role"] for one in body["messages"]] for _, body in posted]
    two_turns = ["system", "user", "assistant", "user"]
    assert roles == [two_turns[:2], two_turns, [*two_turns, "assistant", "user"], two_turns]
    said = capsys.readouterr()
    assert (said.out, "oldest turn" in said.err) == ("42\n" * 3, True)


def test_the_service_of_a_question_answers_the_next_one_and_gives_way_to_others(
    trained: RunDirectory, halteres: Program
) -> None:
    """Also of another command; whoever wants the run's weights has them without waiting."""
    roll_out(trained, *TASKS)
    try:
        first = halteres("chat", trained.run_id, "3 * 4", "--before", "--json")
        assert first.returncode == 0, first.stderr
        kept = kept_in(trained)
        assert kept is not None
        second = halteres("chat", trained.run_id, "3 * 4", "--before", "--json")
        assert json.loads(second.stdout) == json.loads(first.stdout)
        assert kept_in(trained) == kept
        with served(TINY, trained) as other:
            assert other.url != kept.url
            assert not alive(kept.process)
    finally:
        end_kept(trained)
    assert kept_in(trained) is None


def test_the_built_in_model_answers_a_task_alone_as_it_answers_the_runs_prompts(
    trained: RunDirectory, halteres: Program
) -> None:
    """With a box; sent as it is, "3 * 4" makes it ask questions of its own."""
    roll_out(trained, *TASKS)
    ended = halteres("chat", trained.run_id, "3 * 4", "--before")
    end_kept(trained)
    assert ended.returncode == 0, ended.stderr
    assert "\\boxed{" in ended.stdout
