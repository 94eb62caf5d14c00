"""`halteres chat`: ask what a run has trained, in the words of its environment's prompts.

The words are learnt from the prompts that the run has recorded, whatever wrote them: a template,
code, an environment of atroposlib's. A question is one prompt, as in training; where that had
several turns, or where the user wants it, the policy also reads the questions before and its
answers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.cli.output import AsJson, print_json
from halteres.redaction import printable

if TYPE_CHECKING:
    from halteres.rewards.scorer import Scorer
    from halteres.runs.directory import RunDirectory

GAP = "[...]"  # stands for the user's text where a prompt is shown
NEW = "/new"

FEWEST_PROMPTS, MOST_PROMPTS = 4, 256
"""Different prompts: of fewer, what is alike may be alike by chance; more are not looked at."""

LONGEST_EXAMPLE = 80  # characters


Reward = Annotated[
    str | None,
    typer.Option(
        "--reward",
        "--reward-model",
        help="A reward model's folder, a scoring URL, or several joined by commas.",
    ),
]
History = Annotated[
    bool | None,
    typer.Option(
        "--history/--no-history",
        help="Whether the policy reads the questions before and its answers. [default: as in "
        "training: where its episodes have several turns, or its prompts are not known]",
        show_default=False,
    ),
]


def chat(
    run: Annotated[str, typer.Argument(help="Run id (a unique beginning will do) or name.")],
    question: Annotated[
        str | None,
        typer.Argument(help="One question. Without it: a conversation, until an empty line."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 is greedy. [default: 0; with --best-of 1]", show_default=False),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 128,
    before: Annotated[
        bool, typer.Option("--before", help="Ask the base model instead, for comparison.")
    ] = False,
    best_of: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Sample so many answers, and show the one that --reward likes best.",
        ),
    ] = 1,
    reward: Reward = None,
    history: History = None,
    as_json: AsJson = False,
) -> None:
    """Ask the policy of a run.

    A question takes the place of the task in the run's own prompts: what all of them have in common
    is put around it (and shown on standard error). It may be a task alone (3 * 4), or with any of
    the words around it. Where a run has recorded too few prompts, a question is sent as it is, with
    the environment's system prompt. `/new` begins a new conversation; an empty line, Ctrl-D or
    Ctrl-C ends it. The service stays for five minutes, so that the next question, also of the next
    command, is answered at once.
    """
    import asyncio

    from halteres.rewards.scorer import open_scorer
    from halteres.runs.directory import find_run
    from halteres.runs.reading.named_weights import newest_policy

    _check_choice(best_of, reward, temperature)
    directory = find_run(run)
    base = directory.settings().inference.model
    model = base
    if not before:
        model = newest_policy(directory)
    heat = temperature
    if temperature is None:
        heat = float(best_of > 1)
    conversation = Conversation(run=directory, base=base, words=wording_of(directory))
    typer.echo(printable(_explanation(conversation.words)), err=True)
    if history is None:
        history = conversation.words is None or "max_turns" in directory.environment_config()
    if question is None and not history:
        typer.echo("Each question is asked anew, as in training (--history: it is not).", err=True)
    body = {"model": model, "temperature": heat, "max_tokens": max_tokens, "n": best_of}
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        scorer = None
        if reward is not None:
            scorer = open_scorer(reward)
            stack.callback(lambda: runner.run(scorer.close()))
        # Ctrl-C ends a conversation; what was answered is on the screen
        stack.enter_context(suppress(_Left))
        for text in _questions(question, conversation):
            asked = conversation.asked(text)
            best, *others = _answers(conversation, asked, body)
            if scorer is not None:
                best = runner.run(_best(scorer, asked.as_read, [best, *others]))
            if history:
                conversation.turns.append((asked, best))
            if as_json:
                print_json({"question": text, "answer": best, "model": model})
            else:
                typer.echo(printable(best))


def _check_choice(best_of: int, reward: str | None, temperature: float | None) -> None:
    """Refuse flags of which one is nothing without the other."""
    from halteres.errors import InvalidConfig

    if (best_of > 1) != (reward is not None):
        raise InvalidConfig(
            "--best-of and --reward come together.",
            "The one says how many, the other which is best.",
        )
    if best_of > 1 and temperature == 0:
        raise InvalidConfig(
            f"At temperature 0 all {best_of} answers are the same.", next="Leave --temperature out."
        )


def _explanation(words: Wording | None) -> str:
    if words is None:
        return "The run has recorded too few prompts to learn from: a question is sent as it is."
    return f"A question takes the place of {GAP} in:\n{words.head}{GAP}{words.tail}"


Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question as the policy reads it: the text of a prompt, or messages, or both."""

    prompt: str | None  # as in training; None: the run has recorded too few to learn from
    messages: Messages | None  # None: the prompt is no chat

    @property
    def as_read(self) -> Messages | str:
        """As a reward model reads it."""
        if self.messages is not None:
            return self.messages
        return self.prompt or ""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was asked and answered so far."""

    run: RunDirectory
    base: str
    words: Wording | None
    turns: list[tuple[Asked, str]] = field(default_factory=list[tuple[Asked, str]])

    def asked(self, text: str) -> Asked:
        """This question, without those before.

        Raises:
            InvalidData: it is not UTF-8.
        """
        from halteres.documents import half_characters
        from halteres.errors import InvalidData

        if half_characters(text) is not None:
            raise InvalidData("The question is not UTF-8 text.", next="Set the terminal to UTF-8.")
        if self.words is None:
            return Asked(prompt=None, messages=_messages(self.run, text))
        prompt = self.words.around(text)
        messages = _messages_of(prompt, self.run, self.base)
        if isinstance(messages, str):
            return Asked(prompt=prompt, messages=None)
        return Asked(prompt=prompt, messages=messages)

    def request(self, asked: Asked) -> tuple[str, dict[str, Any]]:
        """The route and the body that ask it after the turns before.

        The first question is the prompt that training had, to the token. Later ones are messages;
        of a prompt that is no chat, the texts one after another.
        """
        if asked.messages is not None and (self.turns or asked.prompt is None):
            messages: Messages = []
            for before, answer in self.turns:
                messages += _without_system(before.messages or [], messages)
                messages.append({"role": "assistant", "content": answer})
            messages += _without_system(asked.messages, messages)
            return "chat/completions", {"messages": messages}
        texts = [f"{before.prompt}{answer}\n" for before, answer in self.turns]
        prompt = "".join([*texts, asked.prompt or ""])
        return "completions", {"prompt": prompt, "add_special_tokens": False}


def _without_system(messages: Messages, before: Messages) -> Messages:
    """A turn's messages; the system prompt stands at the beginning alone."""
    if not before:
        return messages
    return [message for message in messages if message["role"] != "system"]


def _answers(conversation: Conversation, asked: Asked, body: Mapping[str, Any]) -> list[str]:
    """What the service samples for a question; `body`: the request besides its prompt. The oldest
    turns are left out of a conversation that the service refuses, as it does what is longer than
    the model's context.
    """
    from halteres.errors import NotReady, ProcessFailed
    from halteres.runs.kept_service import service_for_questions
    from halteres.runs.servers import end_kept, post

    run = conversation.run
    while True:
        service = service_for_questions(run, conversation.base)
        path, prompt = conversation.request(asked)
        try:
            reply = post(service, f"/runs/{run.run_id}/v1/{path}", {**body, **prompt})
        except ProcessFailed:
            if not conversation.turns:
                raise
            del conversation.turns[0]
            typer.echo("(The oldest turn is not read any more: too long a conversation.)", err=True)
        except NotReady:
            end_kept(run)
            raise
        else:
            if path == "completions":
                return [choice["text"] for choice in reply["choices"]]
            return [choice["message"]["content"] for choice in reply["choices"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What all prompts of a run have in common: the chat's marks, a system prompt, the words around
    a task.
    """

    head: str
    tail: str
    example: str = ""  # a task as it stood between them, where that is a short line

    @classmethod
    def of(cls, prompts: Collection[str]) -> Wording:
        """Learnt from prompts. Neither side ends within a word: tasks that begin with the same
        letters are tasks.

        >>> Wording.of(["Add 1 and 2, please.", "Add 17 and 4, please."])
        Wording(head='Add ', tail=', please.', example='17 and 4')
        """
        head = re.sub(r"\w+$", "", os.path.commonprefix(list(prompts)))
        rests = [prompt[len(head) :] for prompt in prompts]
        tail = re.sub(r"^\w+", "", os.path.commonprefix([rest[::-1] for rest in rests])[::-1])
        example = rests[-1].removesuffix(tail)
        if len(example) > LONGEST_EXAMPLE or "\n" in example:
            example = ""
        return cls(head=head, tail=tail, example=example)

    def around(self, text: str) -> str:
        """The prompt with this text as its task; words of the head and the tail that it has already
        are not doubled.
        """
        text = text.strip()
        begins = len(text)
        while not self.head.endswith(text[:begins]):
            begins -= 1
        task = text[begins:]
        ends = len(task)
        while not self.tail.startswith(task[len(task) - ends :]):
            ends -= 1
        return self.head + task[: len(task) - ends] + self.tail


def wording_of(run: RunDirectory) -> Wording | None:
    """The words of a run's prompts, its newest first; None where it has recorded too few different
    ones.
    """
    from halteres.runs.reading.rollouts import rollouts_of, steps_of

    prompts: dict[str, None] = {}
    for step in reversed(steps_of(run)):
        found = rollouts_of(run, step)
        firsts = {mark.offset: mark for mark in found.marks}
        prompts |= dict.fromkeys(
            rollout.prompt for rollout in found.rollouts(list(firsts.values())) if rollout.prompt
        )
        if len(prompts) >= MOST_PROMPTS:
            break
    if len(prompts) >= FEWEST_PROMPTS:
        return Wording.of(prompts)
    return None


def _messages(run: RunDirectory, text: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    system = run.environment_config().get("system_prompt")
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _messages_of(prompt: str, run: RunDirectory, model: str) -> list[dict[str, Any]] | str:
    """The messages that a prompt was made of, as reward models read them; the prompt itself where
    it is no chat.
    """
    from halteres.config import environ
    from halteres.models import model_folder
    from halteres.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(model_folder(model, environ.home() / "models") or model))
    begin, _, end = tokenizer.render(_messages(run, GAP), add_generation_prompt=True).partition(GAP)
    if not (begin and prompt.startswith(begin) and prompt.endswith(end)):
        return prompt
    return _messages(run, prompt.removeprefix(begin).removesuffix(end))


async def _best(scorer: Scorer, prompt: list[dict[str, Any]] | str, answers: list[str]) -> str:
    """The answer that a scorer likes best."""
    from halteres.errors import NotReady
    from halteres.scores import Scorable, best_first

    texts: list[Scorable] = []
    for answer in answers:
        completion: str | list[dict[str, Any]] = answer
        if not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": answer}]
        texts.append(Scorable(prompt=prompt, completion=completion))
    scores = await scorer.score(texts)
    if not any(scores):
        raise NotReady(f"{scorer.name} could score none of {len(answers)} answers.")
    values = [score and score.value for score in scores]
    return answers[best_first(values)[0]]


class _Left(Exception):
    """The person has left the conversation by Ctrl-C."""


def _questions(question: str | None, conversation: Conversation) -> Iterator[str]:
    """The question that was given, else line after line from standard input. At `/new` the
    conversation forgets its turns.
    """
    if question:
        yield question
        return
    if sys.stdin.isatty():
        words = conversation.words
        hint = ""
        if words is not None and words.example:
            hint = f" (for example: {words.example})"
        typer.echo(f"Ask{hint}; {NEW} begins anew, an empty line ends.", err=True)
    while True:
        line = _line()
        if not line:
            return
        if line == NEW:
            conversation.turns.clear()
        else:
            yield line


def _line() -> str:
    """A line from standard input; empty at its end. A person can edit it, and go back to others."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    # input() uses it where it is loaded; Python can be built without it
    with suppress(ImportError):
        import_module("readline")
    try:
        if sys.stdout.isatty():
            return input("> ").strip()
        typer.echo("> ", nl=False, err=True)
        return sys.stdin.readline().strip()
    except EOFError:
        typer.echo("", err=True)
        return ""
    except KeyboardInterrupt as interrupt:
        typer.echo("", err=True)
        raise _Left from interrupt
