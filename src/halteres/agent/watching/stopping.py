"""The tool that stops a run: rl_stop_training."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import RunId, chosen_run
from halteres.agent.caller import Caller
from halteres.agent.tool import Hints, Result, tool
from halteres.agent.watching.look import Look, look_at
from halteres.agent.watching.next_call import next_after, until_it_ends
from halteres.agent.watching.waiting import Until, wait_for
from halteres.runs.stop import stop_run

WITHIN_S = 24.0
"""How long the end is waited for: clients of the seeds' HTTP routes give up after 30 s, MCP hosts after 60 s."""


class Stopped(Result):
    """A run that was asked to stop: `stopped`, or `stopping` with the call that sees it end."""

    message: str
    run_id: str = ""
    status: str = ""
    step: int = 0
    last_checkpoint: dict[str, Any] | None = None  # step, path


@tool(title="Stop a run", hints=Hints(destructive=True, idempotent=True))
async def rl_stop_training(
    caller: Caller,
    run_id: RunId = None,
    mode: Annotated[
        Literal["now", "after_step"], Field(description="now: interrupt the step; both write a checkpoint")
    ] = "now",
) -> Stopped:
    """Stop a run with a checkpoint, so that it can be resumed. Safe to repeat: an ended run answers with its state."""
    run = await asyncio.to_thread(chosen_run, run_id)
    before = await asyncio.to_thread(run.state)
    if not before.terminal:
        await asyncio.to_thread(stop_run, run, mode, 0)
        await wait_for(run, Until("terminal"), WITHIN_S)
    look = await asyncio.to_thread(look_at, run)
    return _told(look, was_going_on=not before.terminal)


def _told(look: Look, *, was_going_on: bool) -> Stopped:
    return Stopped(
        message=_message(look, was_going_on),
        run_id=look.run.run_id,
        status=look.state.status if look.state.terminal else "stopping",
        step=look.step,
        last_checkpoint=look.last_checkpoint,
        next=next_after(look) if look.state.terminal else until_it_ends(look.run.run_id),
    )


def _message(look: Look, was_going_on: bool) -> str:
    """In the seeds' words."""
    run_id, status = look.run.run_id, look.state.status
    if not look.state.terminal:
        return f"Stopping training run '{run_id}': it has been asked, and has not ended yet"
    if was_going_on and status == "stopped":
        return f"Stopped training run '{run_id}'"
    return f"Run '{run_id}' is not running (status: {status})"
