"""`halteres chat`: ask what a run has trained, in the words of its environment's prompts.

A question is one prompt, as in training; where that had several turns, or where the user wants it,
the policy also reads the questions before and its answers (`runs.conversation`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.cli.output import AsJson, print_json
from halteres.redaction import printable

if TYPE_CHECKING:
    from halteres.rewards.scorer import Scorer
    from halteres.runs.conversation import Asked, Conversation, Policy, Sampling, Wording
    from halteres.runs.directory import RunDirectory

NEW = "/new"

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
    run: Annotated[
        str,
        typer.Argument(
            help="Run id (a unique beginning will do) or name; RUN@STEP: its checkpoint of a step."
        ),
    ],
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
    from halteres.runs.conversation import TEMPERATURE, Conversation, Sampling

    _check_choice(best_of, reward, temperature)
    directory, policy = _chosen(run, before=before)
    conversation = Conversation.with_run(directory)
    if temperature is None:
        temperature = 1.0 if best_of > 1 else TEMPERATURE
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, n=best_of)
    typer.echo(printable(_explanation(conversation.words)), err=True)
    if history is None:
        history = conversation.goes_on_by_itself
    if question is None and not history:
        typer.echo("Each question is asked anew, as in training (--history: it is not).", err=True)
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
            best, *others = runner.run(_answers(conversation, asked, policy, sampling))
            if scorer is not None:
                best = runner.run(_best(scorer, asked.as_read, [best, *others]))
            if history:
                conversation.turns.append((asked, best))
            if as_json:
                print_json({"question": text, "answer": best, "model": policy.path})
            else:
                typer.echo(printable(best))


def _chosen(run: str, *, before: bool) -> tuple[RunDirectory, Policy]:
    """The run that RUN or RUN@STEP names, and which of its weights are asked; `before`: its base
    model.
    """
    from halteres.runs.conversation import BASE, NEWEST, policy_named
    from halteres.runs.planning.resume_point import find_origin

    directory, step = find_origin(run)
    name = NEWEST
    if before:
        name = BASE
    elif step is not None:
        name = f"{directory.run_id}@{step}"
    return directory, policy_named(directory, name)


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
    from halteres.runs.conversation import GAP

    if words is None:
        return "The run has recorded too few prompts to learn from: a question is sent as it is."
    return f"A question takes the place of {GAP} in:\n{words.head}{GAP}{words.tail}"


async def _answers(
    conversation: Conversation, asked: Asked, policy: Policy, sampling: Sampling
) -> list[str]:
    """What the service samples for a question, whole; what it waits for is said."""
    from contextlib import aclosing

    from halteres.runs.conversation import Piece, Starting

    texts = [""] * sampling.n
    async with aclosing(conversation.answer(asked, policy, sampling)) as said:
        async for one in said:
            if isinstance(one, Piece):
                texts[one.index] += one.text
            elif isinstance(one, Starting):
                if one.seconds == 0:
                    typer.echo("(A service for this run starts ...)", err=True)
            else:
                typer.echo(
                    "(The oldest turn is not read any more: too long a conversation.)", err=True
                )
    return texts


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
        hint = ""
        if conversation.example:
            hint = f" (for example: {conversation.example})"
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
