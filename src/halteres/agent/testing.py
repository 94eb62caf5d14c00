"""The tool that tries an environment before training: rl_test_inference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import Draft, WaitSeconds
from halteres.agent.caller import Caller
from halteres.agent.tool import Hints, Result, tool


class Tested(Result):
    """A test, done or under way."""

    environment: str
    environment_file: str
    test_config: dict[str, Any]  # num_steps, group_size, rollouts_per_model, total_rollouts
    models_tested: list[dict[str, Any]]
    summary: dict[str, Any]
    status: str  # running, done
    test_id: str
    samples: list[dict[str, Any]] = []  # prompt, best, worst, scores
    responses: list[dict[str, Any]] = []  # of `prompts`: prompt, completion, score


@tool(title="Test an environment", hints=Hints(open_world=True))
async def rl_test_inference(
    caller: Caller,
    num_steps: Annotated[int, Field(ge=1, le=50, description="tasks to try")] = 3,
    group_size: Annotated[int, Field(ge=1, le=64, description="answers for each task")] = 16,
    models: Annotated[
        list[str] | None,
        Field(description="default: the draft's base model, no key needed; else local or OpenRouter model ids"),
    ] = None,
    prompts: Annotated[list[str] | None, Field(description="try these prompts instead of the environment's")] = None,
    max_tokens: Annotated[int | None, Field(ge=1, le=32_768, description="of one answer")] = None,
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0,
    backend: Annotated[
        Literal["local", "openrouter"] | None, Field(description="default: local for models of this machine")
    ] = None,
    test_id: Annotated[str | None, Field(description="go on waiting for this test")] = None,
    wait_s: WaitSeconds = 45,
    draft: Draft = None,
) -> Tested:
    """Try your draft's environment without training: does it load, score, and give rewards that vary?

    Answers whether it is trainable and why. Do this before rl_start_training; it takes seconds on a local model.
    """
    raise NotImplementedError
