"""`halteres chat`: talk to what a run has trained."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.errors import NotFound

if TYPE_CHECKING:
    from halteres.runs.directory import RunDirectory


def chat(
    run: Annotated[str, typer.Argument(help="Run id (a unique beginning will do) or name.")],
    question: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    before: Annotated[bool, typer.Option("--before", help="Ask the base model instead, for comparison.")] = False,
) -> None:
    """Talk to the policy of a run; a question is put into the words of the run's environment."""
    from halteres.runs.directory import find_run
    from halteres.runs.served import post, served

    directory = find_run(run)
    base = directory.settings().inference.model
    model = base if before else newest_policy(directory)
    ask = Asker(directory)
    with served(base, directory) as url:
        for text in [question] if question else _questions(ask.example):
            answer = post(
                f"{url}/runs/{directory.run_id}/v1/chat/completions",
                {"model": model, "messages": ask(text), "temperature": temperature, "max_tokens": max_tokens},
            )
            typer.echo(answer["choices"][0]["message"]["content"])


def newest_policy(run: RunDirectory) -> str:
    """The tinker:// path of the newest sampler weights of a run."""
    paths = [row["sampler_path"] for row in run.checkpoints() if row.get("sampler_path")]
    if not paths:
        raise NotFound(
            f"Run {run.run_id} has no weights to talk to.",
            f"It is {run.state().status} and has written no checkpoint.",
            f"Look at it with: halteres runs status {run.run_id}",
        )
    return paths[-1]


class Asker:
    """Puts a question into the words of the run's environment: its system prompt and prompt template."""

    def __init__(self, run: RunDirectory) -> None:
        env = run.environment_config()
        self._system = env.get("system_prompt")
        self._template = str(env.get("prompt_template") or "{question}")
        self.example = str(env.get("example_question") or "")

    def __call__(self, question: str) -> list[dict[str, Any]]:
        """The messages to send."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._template.replace("{question}", question)}]


def _questions(example: str) -> Any:
    people = sys.stdin.isatty()
    if people:
        typer.echo(f"Ask{f' (for example: {example})' if example else ''}; an empty line ends.", err=True)
    while True:
        if people:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
