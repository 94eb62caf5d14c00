"""An agent that needs no model: a script for each task, through the real MCP server on standard
input and output.

Owns: what each script does where an answer's `next` does not say it.
Never: looks anywhere but at what tools answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters

from benchmarks.agent.attempt import Arguments, CallTool, GaveUp, Sitting, Told, Transcript
from benchmarks.agent.files import Workspace
from benchmarks.agent.reading import Asked, calls_in
from benchmarks.agent.task import Place, Task
from benchmarks.agent.tasks import choose, train
from halteres.agent.table import BY_NAME

Body = dict[str, Any]
ENDED = ("stopped", "completed", "failed")
MOST_LOOKS = 12
WAIT_S = 280
"""How long a call may wait, in a client that gives it five minutes."""


class Agent:
    """Calls tools, and follows what their answers propose."""

    def __init__(self, sitting: Sitting) -> None:
        self.sitting = sitting

    async def call(self, name: str, /, **arguments: Any) -> Body:
        """Call a tool; an error is an answer like any other."""
        return json.loads(await self.sitting.call(name, arguments))

    async def follow(self, text: str, wanted: str = "", **changed: Any) -> Body:
        """Make the first call in a text, or the first of this tool, with some arguments changed."""
        asked = next((one for one in calls_in(text) if one.name.startswith(wanted)), None)
        if asked is None:
            raise GaveUp(f"no call {wanted} in: {text}")
        return await self.call(asked.name, **{**_named(asked), **changed})

    async def until_ended(self, told: Body) -> Body:
        """Follow `next` from the start of a run to its end."""
        for _ in range(MOST_LOOKS):
            told = await self.follow(told["next"], "rl_check_status")
            if told["status"] in ENDED:
                return told
        raise GaveUp(f"the run does not end: {told}")


def _named(asked: Asked) -> dict[str, Any]:
    """Arguments without a name get the tool's, in order."""
    return {
        **dict(zip(BY_NAME[asked.name].arguments.model_fields, asked.first, strict=False)),
        **asked.named,
    }


async def solve_train(agent: Agent) -> Body:
    """From the machine to the gain, by `next`; longer where the target is missed."""
    told = await agent.call("rl_health_check")
    told = await agent.follow(told["next"])  # environments
    told = await agent.follow(told["next"])  # select the one there is
    told = await agent.follow(told["next"])  # test it
    if not told["summary"]["trainable"]:
        raise GaveUp(told["summary"]["why"])
    # dry run; the draft keeps the change
    told = await agent.follow(told["next"], changes={"total_steps": 25})
    told = await agent.follow(told["next"])
    while True:
        told = await agent.until_ended(told)
        share = told["gain"]["after"]
        if share >= train.TARGET:
            return {"run_id": told["run_id"], "share_correct": share}
        more = {"total_steps": told["step"] + 15}
        told = await agent.call("rl_start_training", resume_from=told["run_id"], changes=more)


async def solve_repair(agent: Agent) -> Body:
    """Test, read answers and file, mend, test again, train."""
    told = await agent.call("rl_select_environment", name="sums")
    file = told["file_path"]
    told = await agent.follow(told["next"])
    if told["summary"]["trainable"]:
        raise GaveUp("nothing is wrong")
    text = (await agent.call("read_file", path=file))["content"]
    broken = "        said = _BOX.findall(text)[-1]\n        return float(said == item.answer)\n"
    mended = (
        "        said = _BOX.findall(text)\n        return float(bool(said) and "
        "int(said[-1]) == item.answer)\n"
    )
    await agent.call("write_file", path=file, content=text.replace(broken, mended))
    told = await agent.call("rl_test_inference")
    if not told["summary"]["trainable"]:
        raise GaveUp(told["summary"]["why"])
    told = await agent.until_ended(
        await agent.call("rl_start_training", changes={"total_steps": 10})
    )
    return {
        "cause": "The scorer compares a text with a number, and fails without a box.",
        "run_id": told["run_id"],
    }


async def solve_choose(agent: Agent) -> Body:
    """Start both, wait for both, compare."""
    runs: dict[str, float] = {}
    for rate in choose.RATES:
        changes = {"total_steps": 10, "learning_rate": rate}
        told = await agent.call("rl_start_training", environment="arithmetic", changes=changes)
        runs[told["run_id"]] = rate
    told = await agent.call("rl_check_status", run_ids=[*runs], wait_s=WAIT_S)
    for _ in range(MOST_LOOKS):
        if all(run["status"] in ENDED for run in told["runs"]):
            break
        told = await agent.follow(told["next"], "rl_check_status")
    told = await agent.follow(told["next"], "rl_compare_runs")
    rows = [
        {
            "learning_rate": runs[row["run_id"]],
            "run_id": row["run_id"],
            "share_correct": _share(row),
        }
        for row in told["runs"]
    ]
    return {"better": runs[told["best"]["run_id"]], "evidence": rows}


def _share(row: Body) -> float:
    return row["eval/percent_correct"]["last"]


async def solve_hacking(agent: Agent) -> Body:
    """Watch until something is said against it, read what it was paid for, end it, mend the
    scorer.
    """
    told = await agent.call("rl_check_status")
    for _ in range(MOST_LOOKS):
        if alert := next((one for one in told["alerts"] if one["rule"] == "reward_hacking"), None):
            break
        told = await agent.call(
            "rl_check_status", run_id=told["run_id"], wait_s=WAIT_S, until="alert"
        )
    else:
        raise GaveUp("nothing is said against the run")
    run_id, environment = told["run_id"], told["environment"]
    told = await agent.follow(alert["remedy"], "rl_get_rollouts")
    example = _first(
        one for one in told["rollouts"] if f"{{{one['item']['answer']}}}" not in one["completion"]
    )
    await agent.follow(alert["remedy"], "rl_stop_training")
    file = f"{environment}.py"
    text = (await agent.call("read_file", path=file))["content"]
    text = text.replace("self.reward(text)", "self.reward(item, text)")
    text = text.replace("def reward(self, text: str)", "def reward(self, item: Any, text: str)")
    text = text.replace("boxed is not None and boxed.isdecimal()", "is_correct(text, item)")
    text = text.replace("        boxed = extract_boxed(text)\n", "").replace("extract_boxed, ", "")
    await agent.call("write_file", path=file, content=text)
    return {
        "run_id": run_id,
        "gets_better": False,
        "cause": (
            "The reward is paid for any short answer with a number in the box, right or wrong."
        ),
        "example": {"question": example["item"]["question"], "completion": example["completion"]},
    }


async def solve_recover(agent: Agent) -> Body:
    """Find the run, go on from its checkpoint."""
    told = await agent.call("rl_list_runs")
    failed = _first(run["run_id"] for run in told["runs"] if run["status"] == "failed")
    told = await agent.call("rl_check_status", run_id=failed)
    what = told["exit"]["process"]
    told = await agent.until_ended(await agent.follow(told["next"], "rl_start_training"))
    return {"failed_run": failed, "what_ended": what, "completed_run": told["run_id"]}


def _first(found: Iterator[Any]) -> Any:
    for one in found:
        return one
    raise GaveUp("what was looked for is not in the answer")


SCRIPTS: Mapping[str, Callable[[Agent], Awaitable[Body]]] = {
    "train": solve_train,
    "repair": solve_repair,
    "choose": solve_choose,
    "hacking": solve_hacking,
    "recover": solve_recover,
}


class Scripted:
    """The agent."""

    name = "scripted, over MCP (stdio)"

    @asynccontextmanager
    async def seated(self, place: Place, transcript: Transcript) -> AsyncIterator[Sitting]:
        """At its tools in this place."""
        async with mcp_tools(place) as tools:
            yield Sitting(tools, Workspace(place.workspace), transcript)

    async def play(self, task: Task, sitting: Sitting) -> Body:
        """Solve a task; its answer."""
        try:
            return await SCRIPTS[task.NAME](Agent(sitting))
        except KeyError as error:
            raise GaveUp(f"an answer has no {error}") from error


@asynccontextmanager
async def mcp_tools(place: Place) -> AsyncIterator[CallTool]:
    """`halteres mcp` as a host starts it."""
    program = Path(sys.executable).with_name("halteres")
    variables = {
        "HALTERES_LOG": "WARNING",
        "HALTERES_LONGEST_WAIT_S": str(WAIT_S),
        **place.variables(),
    }
    async with Client(
        StdioServerParameters(command=str(program), args=["mcp"], env=variables)
    ) as client:

        async def call(name: str, arguments: Arguments) -> Told:
            assert not isinstance(arguments, str)
            result = await client.call_tool(name, dict(arguments))
            texts = [block.text for block in result.content if block.type == "text"]
            return Told("".join(texts), sum(block.type == "image" for block in result.content))

        yield call
