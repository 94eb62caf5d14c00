"""A task of Inspect with a tool, whose model is ours; prints one JSON object. Runs in an environment of
its own.

python inspect_program.py LOG_FOLDER MODEL BASE_URL [MODEL BASE_URL ...]
"""

from __future__ import annotations

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def add() -> Tool:
    """Adds."""

    async def execute(a: int, b: int) -> str:
        """The sum of two numbers.

        Args:
            a: the one.
            b: the other.
        """
        return str(a + b)

    return execute


def main(folder: str, *models: str) -> None:
    told: dict[str, object] = {}
    for name, base in zip(models[::2], models[1::2], strict=True):
        model = get_model(
            name, base_url=base, api_key="tml-test", config=GenerateConfig(max_tokens=120)
        )
        task = Task(
            dataset=[Sample(input="What is 17 + 25?", target="42")],
            solver=[use_tools(add()), generate()],
            scorer=includes(),
        )
        [log] = eval(task, model=model, log_dir=folder, display="none")
        if log.error is not None:
            told[name] = {"status": log.error.message}
            continue
        [sample] = log.samples
        told[name] = {
            "status": log.status,
            "roles": [message.role for message in sample.messages],
            "said": sample.output.completion,
            "correct": sample.scores["includes"].value,
            "parts": [
                part.type
                for message in sample.messages
                if message.role == "assistant" and not isinstance(message.content, str)
                for part in message.content
            ],
        }
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
