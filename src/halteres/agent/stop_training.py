"""The tool that stops a run: rl_stop_training."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from pydantic import Field

from halteres.agent.tool import Caller, Hints, Result, RunId, chosen_run, tool
from halteres.agent.waiting import Until, wait_for
from halteres.runs.directory import stop_run
from halteres.runs.reading.failures import Checkpoint
from halteres.runs.reading.report import report_of, until_it_ends

WITHIN_S = 24.0
"""How long the end is waited for: clients of the seeds' HTTP routes give up after 30 s, MCP clients
after 60 s.
"""


class Stopped(Result):
    """A run that was asked to stop: `stopped`, or `stopping` with the call that sees it end."""

    message: str
    run_id: str = ""
    status: str = ""
    step: int = 0
    last_checkpoint: Checkpoint | None = None


@tool(title="Stop a run", hints=Hints(destructive=True, idempotent=True))
async def rl_stop_training(
    caller: Caller,
    run_id: RunId = None,
    mode: Annotated[
        Literal["now", "after_step"],
        Field(description="now: interrupt the step; both write a checkpoint"),
    ] = "now",
) -> Stopped:
    """Stop a run with a checkpoint, so that it can be resumed. Safe to repeat: an ended run answers
    with its state.
    """
    run = await asyncio.to_thread(chosen_run, run_id)
    before = await asyncio.to_thread(run.state)
    if not before.terminal:
        await asyncio.to_thread(stop_run, run, mode, 0)
        await wait_for(run, Until("terminal"), WITHIN_S)
    report = await asyncio.to_thread(report_of, run, longest_wait_s=caller.longest_wait_s)
    found, state = run.run_id, report.state
    if not state.terminal:  # the messages are the seeds'
        message = f"Stopping training run '{found}': it has been asked, and has not ended yet"
    elif state.status == "stopped" and not before.terminal:
        message = f"Stopped training run '{found}'"
    else:
        message = f"Run '{found}' is not running (status: {state.status})"
    return Stopped(
        message=message,
        run_id=found,
        status=state.status if state.terminal else "stopping",
        step=report.step,
        last_checkpoint=report.last_checkpoint,
        next=report.next if state.terminal else until_it_ends(found, report.longest_wait_s),
    )
