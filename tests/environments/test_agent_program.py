"""The environment `agent`: a program plays, a session of the gateway captures, a reward function
looks at what the program left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from deadlines import until
from pydantic import ValidationError
from service.live_service import LiveService, serving

from halteres.environments.agent_program import ProgramConfig, ProgramEnv
from halteres.environments.base import NoEvaluation, set_up
from halteres.environments.config import APIServerConfig
from halteres.environments.episodes import Episode
from halteres.environments.scored import action_tokens
from halteres.errors import InvalidConfig, SamplerFailed
from halteres.models import TINY
from halteres.rollouts.groups import GroupFailed, settle
from halteres.types import FailedRollout

PROGRAM = """
import json, os, sys, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(int(sys.argv[2])):
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 6}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
open("said.json", "w").write(json.dumps(messages))
sys.exit(int(sys.argv[3]))
"""

REWARD = """
import json
from pathlib import Path

def turns(folder, exit_code, name, **columns):
    assert name == ["greeting"] * len(folder)
    return [
        json.loads((Path(one) / "said.json").read_text(encoding="utf-8")).__len__() / 2 + code
        for one, code in zip(folder, exit_code)
    ]
"""


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[LiveService]:
    async with serving(tmp_path / "state") as live:
        yield live


async def made(
    scene: LiveService, folder: Path, *, turns: int = 2, code: int = 0, **changes: Any
) -> ProgramEnv:
    """An environment over the service, with one task."""
    (folder / "tasks.jsonl").write_text(
        '{"name": "greeting", "say": "Hello."}\n{"name": "greeting", "say": "Bye."}\n',
        encoding="utf-8",
    )
    values = {
        "tasks": str(folder / "tasks.jsonl"),
        "command": (sys.executable, "-c", PROGRAM, "{say}", str(turns), str(code)),
        "group_size": 2,
        "max_new_tokens": 6,
        "rollout_retries": 0,
        **changes,
    }
    env = ProgramEnv(ProgramConfig(**values), [APIServerConfig(base_url=f"{scene.url}/v1")])
    await set_up(env)
    return env


async def test_what_is_trained_on_is_what_the_engine_sampled(
    scene: LiveService, tmp_path: Path
) -> None:
    sampled = list[list[int]]()
    engine = scene.engine
    sample = engine.sample

    async def noted(*given: Any) -> Any:
        result = await sample(*given)
        sampled.extend(memoryview(one.tokens).cast("i").tolist() for one in result.sequences)
        return result

    engine.sample = noted  # type: ignore[method-assign] - beside the service
    env = await made(scene, tmp_path)
    group, _ = await env.collect_trajectories(await env.get_next_item())
    await env.disconnect()
    assert isinstance(group, dict)
    found = [action_tokens(group, number) for number in range(len(group["tokens"]))]
    assert sorted(chain(*found)) == sorted(chain(*sampled))
    assert len(sampled) == 4
    assert group["scores"] == [1.0] * len(group["scores"])


async def test_the_reward_function_sees_the_task_the_folder_and_the_exit_code(
    scene: LiveService, tmp_path: Path
) -> None:
    (tmp_path / "worth.py").write_text(REWARD, encoding="utf-8")
    env = await made(scene, tmp_path, turns=3, code=5, reward=f"{tmp_path / 'worth.py'}:turns")
    episode = await env.play(await env.get_next_item())
    await env.disconnect()
    assert episode.trajectory.score == 3.5 + 5
    assert len(episode.trajectory.turns) == 3


async def test_a_caged_reward_function_reads_the_episodes_folder(
    scene: LiveService, tmp_path: Path, cages: None
) -> None:
    (tmp_path / "worth.py").write_text("unsafe_scorer = True\n" + REWARD, encoding="utf-8")
    env = await made(scene, tmp_path, turns=1, reward=f"{tmp_path / 'worth.py'}:turns")
    episode = await env.play(await env.get_next_item())
    await env.disconnect()
    assert episode.trajectory.score == 1.5


async def test_a_caged_reward_function_reads_the_folder_of_every_episode(
    scene: LiveService, tmp_path: Path, cages: None
) -> None:
    """Also of those that began after the cage did."""
    (tmp_path / "worth.py").write_text("unsafe_scorer = True\n" + REWARD, encoding="utf-8")
    env = await made(scene, tmp_path, turns=1, reward=f"{tmp_path / 'worth.py'}:turns")
    task = await env.get_next_item()
    scores = [(await env.play(task)).trajectory.score for _ in range(3)]
    await env.disconnect()
    assert env.reward is not None
    env.reward.close()
    assert scores == [1.5] * 3


async def test_without_a_reward_function_the_exit_code_counts(
    scene: LiveService, tmp_path: Path
) -> None:
    env = await made(scene, tmp_path, code=3)
    episode = await env.play(await env.get_next_item())
    await env.disconnect()
    assert (episode.trajectory.score, episode.trajectory.outcome) == (0.0, "failure")


async def test_a_program_that_asks_nothing_is_a_failed_rollout_with_its_last_words(
    scene: LiveService, tmp_path: Path
) -> None:
    code = "import sys; sys.exit('I found no model.')"
    env = await made(scene, tmp_path, command=(sys.executable, "-c", code))
    with pytest.raises(GroupFailed, match=r"I found no model\."):
        await env.collect_trajectories(await env.get_next_item())
    await env.disconnect()


async def test_every_session_is_over_when_its_episode_is(
    scene: LiveService, tmp_path: Path
) -> None:
    env = await made(scene, tmp_path)
    assert env.gateway is not None
    ids = list[str]()
    opens = env.gateway.open

    async def noted(*given: Any, **named: Any) -> Any:
        session = await opens(*given, **named)
        ids.append(session.id)
        return session

    env.gateway.open = noted  # type: ignore[method-assign] - what it gives is noted
    await env.play(await env.get_next_item())
    broken = ("import sys; sys.exit(1)",)
    env.programs._command = (sys.executable, "-c", *broken)  # type: ignore[union-attr]
    with pytest.raises(Exception, match="nothing that can be trained on"):
        await env.play(await env.get_next_item())
    states = [(await env.gateway.session(one))["state"] for one in ids]
    await env.disconnect()
    assert states == ["scored", "failed"]


UNDAUNTED = """
import json, os, sys, time, urllib.request
from pathlib import Path
base, key, begun, back = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], *sys.argv[1:3]
messages = [{"role": "user", "content": "Hello."}]
body = json.dumps({"model": "any", "messages": messages, "max_tokens": 6}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)):
    Path(begun).touch()
while not Path(back).exists():
    time.sleep(0.05)
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize("code", [0, 1])
async def test_a_service_that_was_started_again_is_no_failure_of_the_program(
    tmp_path: Path, code: int
) -> None:
    """An episode that came to a good end all the same is kept."""
    begun, back = tmp_path / "begun", tmp_path / "back"
    command = (sys.executable, "-c", UNDAUNTED, str(begun), str(back), str(code))
    async with serving(tmp_path / "state") as scene:
        env = await made(scene, tmp_path, command=command)
        playing = asyncio.create_task(settle(env.play(await env.get_next_item())))
        await until(begun.exists)
    port = int(scene.url.rpartition(":")[2])
    async with serving(tmp_path / "state", port=port):
        back.touch()
        ended = await playing
        await env.disconnect()
    if code == 0:
        assert isinstance(ended, Episode)
        assert ended.trajectory.score == 1.0
    else:
        assert isinstance(ended, FailedRollout)
        assert ended.code == SamplerFailed.code
        assert "started again" in ended.why


async def test_episodes_that_are_given_up_leave_no_connection_open(
    scene: LiveService, tmp_path: Path
) -> None:
    """The run stops: their sessions end before the client's connections are closed."""
    begun = tmp_path / "begun"
    command = (sys.executable, "-c", UNDAUNTED, str(begun), str(tmp_path / "never"), "0")
    env = await made(scene, tmp_path, command=command)
    group = asyncio.create_task(env.collect_trajectories(await env.get_next_item()))
    await until(begun.exists)
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    await env.disconnect()
    assert env.gateway is not None
    assert env.gateway._session is None  # pyright: ignore[reportPrivateUsage] - nothing else shows it
    states = {session.state for session in scene.gateway.sessions.all()}
    assert states == {"failed"}


async def test_held_out_tasks_are_played_by_the_pinned_weights_greedily_and_at_temperature_1(
    scene: LiveService, tmp_path: Path
) -> None:
    asked = list[float]()
    engine = scene.engine
    sample = engine.sample

    async def noted(*given: Any) -> Any:
        asked.append(given[3].temperature)
        return await sample(*given)

    engine.sample = noted  # type: ignore[method-assign] - beside the service
    env = await made(scene, tmp_path, turns=1, eval_tasks=1, eval_samples=2)
    metrics = await env.evaluate()
    await env.disconnect()
    assert sorted(asked) == [0.0, 1.0, 1.0]
    assert metrics["eval/percent_correct"] == 1.0


async def test_an_evaluation_of_weights_by_name_needs_no_run(
    scene: LiveService, tmp_path: Path
) -> None:
    """It plays below the address of a run that no trainer has (`runs.supervision.evaluation`)."""
    env = await made(scene, tmp_path, turns=1, eval_tasks=1, eval_samples=1)
    await env.disconnect()
    server = APIServerConfig(base_url=f"{scene.url}/runs/eval/v1", model_name=TINY)
    env = ProgramEnv(env.config, [server])
    await set_up(env)
    metrics = await env.evaluate()
    await env.disconnect()
    assert metrics["eval/percent_correct"] == 1.0


async def test_without_tasks_it_is_refused_at_its_start(scene: LiveService, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="There are no tasks"):
        await made(scene, tmp_path, tasks="")


async def test_where_no_task_is_held_out_there_is_no_evaluation_and_advice(
    scene: LiveService, tmp_path: Path
) -> None:
    (tmp_path / "one.jsonl").write_text('{"say": "Hello."}\n', encoding="utf-8")
    env = await made(scene, tmp_path, tasks=str(tmp_path / "one.jsonl"))
    with pytest.raises(NoEvaluation, match=r"None of the tasks.*Add a task"):
        await env.evaluate()
    await env.disconnect()


def test_a_program_ends_before_its_group() -> None:
    with pytest.raises(ValidationError, match=r"less than worker_timeout \(600 s\)"):
        ProgramConfig(program_s=700)
