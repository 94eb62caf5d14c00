"""The tools as Python functions: `await rl_list_environments()` answers JSON in a text, as in seed 002.

Owns: their signatures, so that editors and type checkers know them; a client that answers dicts.
Never: adds logic; raises, unless Python refuses the call itself: what goes wrong is an answer with `error`.

Below are signatures, each a tool's without its caller; a test holds them equal to the table. `_tool` makes the async
function, whose docstring is the tool's description.
"""

from __future__ import annotations

import base64
import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, ParamSpec

from halteres.agent.call import call
from halteres.agent.caller import Caller
from halteres.agent.table import BY_NAME
from halteres.agent.tool import UNSET
from halteres.config import environ
from halteres.models import TINY

P = ParamSpec("P")
Changes = dict[str, Any]
Told = Coroutine[Any, Any, str]


def own_caller(face: str) -> Caller:
    """A caller from within this process, on the draft of HALTERES_SESSION or the default one."""
    session = environ.agent_session()
    return Caller(draft=session, face=face) if session else Caller(face=face)


class Tools:
    """The tools, answering dicts, on one draft.

    >>> tools = Tools(draft="mine")
    >>> answer = await tools.call("rl_select_environment", name="gsm8k")  # doctest: +SKIP
    """

    def __init__(self, draft: str | None = None) -> None:
        self._caller = Caller(draft=draft, face="python") if draft else own_caller("python")

    async def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Call a tool. A failure is an answer with `error`, `code` and `next`."""
        return (await call(name, arguments, self._caller)).for_agents


def _tool(signature: Callable[P, None]) -> Callable[P, Told]:
    """The function of this signature, which calls the tool of its name with the arguments it was given."""
    parameters = inspect.signature(signature)
    signature.__annotations__["return"] = "str"  # what `help` is to say

    @functools.wraps(signature)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> str:
        given = parameters.bind(*args, **kwargs).arguments
        reply = await call(signature.__name__, given, own_caller("python"))
        return json.dumps(reply.for_agents, ensure_ascii=False, indent=2)

    answered.__doc__ = BY_NAME[signature.__name__].description
    return answered


@_tool
def rl_list_environments(query: str | None = None, refresh: bool = False) -> None:
    """List environments."""


@_tool
def rl_select_environment(name: str, changes: Changes | None = None, draft: str | None = None) -> None:
    """Select an environment."""


@_tool
def rl_get_current_config(
    detail: Literal["brief", "full"] = "brief", field: str | None = None, draft: str | None = None
) -> None:
    """Show the settings."""


@_tool
def rl_edit_config(
    field: str | None = None, value: Any = UNSET, changes: Changes | None = None, draft: str | None = None
) -> None:
    """Edit settings."""


@_tool
def rl_score(
    completions: list[str], environment: str | None = None, prompt: str | None = None, draft: str | None = None
) -> None:
    """Score texts."""


@_tool
def rl_test_inference(
    num_steps: int = 3,
    group_size: int = 16,
    models: list[str] | None = None,
    prompts: list[str] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    backend: Literal["local", "openrouter"] | None = None,
    test_id: str | None = None,
    wait_s: float = 45,
    draft: str | None = None,
) -> None:
    """Test an environment."""


@_tool
def rl_start_training(
    environment: str | None = None,
    changes: Changes | None = None,
    dry_run: bool = False,
    name: str | None = None,
    resume_from: str | None = None,
    idempotency_key: str | None = None,
    draft: str | None = None,
) -> None:
    """Start training."""


@_tool
def rl_check_status(
    run_id: str | None = None, run_ids: list[str] | None = None, wait_s: float = 0, until: str | None = None
) -> None:
    """Look at a run."""


@_tool
def rl_stop_training(run_id: str | None = None, mode: Literal["now", "after_step"] = "now") -> None:
    """Stop a run."""


@_tool
def rl_get_results(
    run_id: str | None = None, metrics: list[str] | None = None, points: int = 10, plot: bool = False
) -> None:
    """Get a run's results."""


@_tool
def rl_evaluate(
    run_id: str | None = None,
    weights: str | None = None,
    base: bool = False,
    num_tasks: int | None = None,
    evaluation_id: str | None = None,
    wait_s: float = 45,
    draft: str | None = None,
) -> None:
    """Evaluate weights."""


@_tool
def rl_list_runs(status: str | None = None, limit: int = 20) -> None:
    """List runs."""


@_tool
def rl_health_check() -> None:
    """Check the machine."""


@_tool
def rl_get_logs(run_id: str | None = None, role: str | None = None, lines: int = 20, grep: str | None = None) -> None:
    """Read a log."""


@_tool
def rl_get_rollouts(
    run_id: str | None = None,
    step: int | None = None,
    which: Literal["best", "worst", "random"] = "random",
    n: int = 3,
) -> None:
    """Read rollouts."""


@_tool
def rl_compare_runs(run_ids: list[str], metrics: list[str] | None = None, plot: bool = True) -> None:
    """Compare runs."""


@_tool
def rl_list_reward_models() -> None:
    """List reward models."""


@_tool
def rl_train_reward_model(
    data: str | None = None,
    model: str = TINY,
    eval_data: str | None = None,
    hold_out: float | None = None,
    settings: Changes | None = None,
    dry_run: bool = False,
    name: str | None = None,
    resume_from: str | None = None,
    idempotency_key: str | None = None,
) -> None:
    """Train a reward model."""


@_tool
def rl_evaluate_reward_model(
    model: str | None = None, data: str | None = None, evaluation_id: str | None = None, wait_s: float = 45
) -> None:
    """Evaluate a reward model."""


@_tool
def rl_rank_completions(
    model: str | None = None,
    completions: list[str] | None = None,
    prompt: str | None = None,
    evaluation_id: str | None = None,
    wait_s: float = 45,
) -> None:
    """Rank completions."""


def base64_of(file: Path) -> str | None:
    """A PNG; None where it is gone: the answer names its path and says all without it."""
    try:
        return base64.b64encode(file.read_bytes()).decode()
    except OSError:
        return None
