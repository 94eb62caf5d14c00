"""A task of Inspect with a tool, whose model is ours; prints one JSON object. Runs in an environment of
its own.

python inspect_program.py SERVICE_URL LOG_FOLDER
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


def main(url: str, folder: str) -> None:
    told: dict[str, object] = {}
    models = {
        "openai-api/halteres/halteres/tiny": f"{url}/v1",
        # it takes what stands before a second slash for a cloud that serves Anthropic's models
        "anthropic/halteres--tiny": url,
    }
    for name, base in models.items():
        model = get_model(
            name, base_url=base, api_key="tml-test", config=GenerateConfig(max_tokens=48)
        )
        task = Task(
            dataset=[Sample(input="What is 9 + 8?", target="17")],
            solver=[use_tools(add()), generate()],
            scorer=includes(),
        )
        [log] = eval(task, model=model, log_dir=folder, display="none")
        told[name] = log.status if log.error is None else log.error.message
    sys.stdout.write(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
