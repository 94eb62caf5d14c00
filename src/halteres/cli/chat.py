"""`halteres chat`: ask what a run has trained, in the words of its environment's prompts.

The words are learnt from the prompts that the run has recorded, whatever wrote them: a template,
code, an environment of atroposlib's. Every question is one prompt, as in training.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.redaction import printable

if TYPE_CHECKING:
    from halteres.rewards.scorer import Scorer
    from halteres.runs.directory import RunDirectory
    from halteres.runs.servers import Server

GAP = "[...]"  # stands for the user's text where a prompt is shown

FEWEST_PROMPTS, MOST_PROMPTS = 4, 256
"""Different prompts: of fewer, what is alike may be alike by chance; more are not looked at."""

LONGEST_EXAMPLE = 80  # characters


def chat(
    run: Annotated[str, typer.Argument(help="Run id (a unique beginning will do) or name.")],
    question: Annotated[
        str | None,
        typer.Argument(help="One question. Without it: line after line, until an empty one."),
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
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            "--reward-model",
            help="A reward model's folder, a scoring URL, or several joined by commas.",
        ),
    ] = None,
) -> None:
    """Ask the policy of a run.

    A question takes the place of the task in the run's own prompts: what all of them have in common
    is put around it (and shown on standard error). It may be a task alone (3 * 4), or with any of
    the words around it. Where a run has recorded too few prompts, a question is sent as it is, with
    the environment's system prompt. Each is asked anew: the policy does not see those before.
    """
    import asyncio

    from halteres.rewards.scorer import open_scorer
    from halteres.runs.directory import find_run
    from halteres.runs.reading.named_weights import newest_policy
    from halteres.runs.servers import served

    _check_choice(best_of, reward, temperature)
    directory = find_run(run)
    base = directory.settings().inference.model
    model = base
    if not before:
        model = newest_policy(directory)
    words = wording_of(directory)
    typer.echo(printable(_explanation(words)), err=True)
    heat = temperature
    if temperature is None:
        heat = float(best_of > 1)
    body: dict[str, Any] = {
        "model": model,
        "temperature": heat,
        "max_tokens": max_tokens,
        "n": best_of,
    }
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        scorer = None
        if reward is not None:
            scorer = open_scorer(reward)
            stack.callback(lambda: runner.run(scorer.close()))
        service = stack.enter_context(served(base, directory))
        for text in _questions(question, words):
            answers = _answers(service, directory, words, text, body)
            best = answers[0]
            if scorer is not None:
                chat_or_text = _messages(directory, text)
                if words is not None:
                    chat_or_text = _messages_of(words.around(text), directory, base)
                best = runner.run(_best(scorer, chat_or_text, answers))
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


def _answers(
    service: Server, run: RunDirectory, words: Wording | None, text: str, body: Mapping[str, Any]
) -> list[str]:
    """What the service samples for a question; `body`: the request besides its prompt."""
    from halteres.documents import half_characters
    from halteres.errors import InvalidData
    from halteres.runs.servers import post

    if half_characters(text) is not None:
        raise InvalidData("The question is not UTF-8 text.", next="Set the terminal to UTF-8.")
    route = f"/runs/{run.run_id}/v1"
    if words is None:
        request = {**body, "messages": _messages(run, text)}
        choices = post(service, f"{route}/chat/completions", request)["choices"]
        return [choice["message"]["content"] for choice in choices]
    request = {**body, "prompt": words.around(text), "add_special_tokens": False}
    choices = post(service, f"{route}/completions", request)["choices"]
    return [choice["text"] for choice in choices]


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


def _questions(question: str | None, words: Wording | None) -> Iterator[str]:
    """The question that was given, else line after line from standard input."""
    if question:
        yield question
        return
    is_person = sys.stdin.isatty()
    if is_person:
        hint = ""
        if words is not None and words.example:
            hint = f" (for example: {words.example})"
        typer.echo(f"Ask{hint}; an empty line ends.", err=True)
    while True:
        if is_person:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
