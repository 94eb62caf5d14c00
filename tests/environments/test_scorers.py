"""Scorers in processes of their own: they give what they give in the environment's, see what its
scorers see, and fail by name.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import pickle
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from deadlines import until
from pydantic import Field

from halteres.environments import scorers
from halteres.environments.arithmetic import ArithmeticEnv
from halteres.environments.base import BaseEnv, set_up
from halteres.environments.cage import cage_missing
from halteres.environments.commands import describe, parse, settings_of
from halteres.environments.config import APIServerConfig, BaseEnvConfig, Overrides
from halteres.environments.item_rollout import DrawnItem, Items, SettledItem, settle_item
from halteres.environments.multi_turn import MultiTurnConfig
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.observe.metrics import read_rows
from halteres.rollouts.rng import Draw

from . import scored_env
from .fakes import Inference, config, processes_naming, run, server, write_config
from .hostile_env import ACTS, KINDS, HostileConfig, answer_of_kind, ways_out
from .scored_env import Alone, Bare, Count, Evaluating, Plain, Slow, Summed, Task, Words

HOSTILE = Path(__file__).with_name("hostile_env.py")
NO_CAGES = "This kernel has no user namespaces."

needs_cages = pytest.mark.skipif(cage_missing() is not None, reason=cage_missing() or "")


@pytest.fixture
def no_cages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a kernel without namespaces."""
    monkeypatch.setattr(scorers, "cage_missing", lambda: NO_CAGES)


@asynccontextmanager
async def ready(env: BaseEnv) -> AsyncIterator[BaseEnv]:
    """It is set up inside, and nothing of it is left afterwards."""
    try:
        await set_up(env)
        yield env
    finally:
        await env.server.close()
        env.scorer_workers.close()


def words(**changes: Any) -> Words:
    return Words(config(**changes), [APIServerConfig()])


async def settled(env: BaseEnv, item: Any) -> SettledItem:
    return await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=item))


@pytest.mark.parametrize("policy", ["auto", "off"])
async def test_without_a_word_scorers_run_where_they_always_did(policy: str) -> None:
    async with ready(Plain(config(cage=policy), [APIServerConfig()])) as env:
        assert await env.call_scorer("score", None, "x") == os.getpid()
    async with ready(words(cage="off")) as env:
        assert await env.call_scorer("score", Task(1), "process") == os.getpid()


async def test_a_group_has_the_same_bits_in_a_worker(inference: Inference) -> None:
    groups = {}
    for policy in ("off", "on"):
        made, _ = ArithmeticEnv.config_init()
        changed = made.model_copy(update={"cage": policy, "group_size": 4})
        async with ready(ArithmeticEnv(changed, [server(inference)])) as env:
            drawn = await Items(env).next()
            assert drawn is not None
            outcome = await settle_item(env, drawn)
            (groups[policy],) = outcome.groups
    assert groups["on"] == groups["off"]
    assert "worked_share" in groups["on"]["metrics"][0]


async def test_a_task_of_the_files_own_class_and_the_bits_of_a_score_arrive() -> None:
    async with ready(words()) as env:
        assert await env.call_scorer("score", Task(5), "number") == 5 / 7
        pid = await env.call_scorer("score", Task(5), "process")
        assert pid != os.getpid()
        assert await env.call_measure(Task(5), "x") == {"own_process": pid}


async def test_a_scorer_sees_what_its_state_names_as_it_is_now() -> None:
    class Named(Words):
        named = ("level", "words")

    Named.__module__, Named.__qualname__ = Words.__module__, "Words"
    async with ready(Named(config(), [APIServerConfig()])) as env:
        assert [await env.call_scorer("score", Task(1), said) for said in ("level", "words")] == [
            1.5,
            2,
        ]
        assert isinstance(env, Named)
        env.level = 2.5
        env.words.append("later")
        assert [await env.call_scorer("score", Task(1), said) for said in ("level", "words")] == [
            2.5,
            3,
        ]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("level", "level"),
        ("words", "words"),
        ("cases", "cases"),
        ("default", "cases"),
        ("caught", "cases"),
        ("server", "server"),
    ],
)
async def test_a_scorer_that_reads_what_it_does_not_have_says_so(said: str, name: str) -> None:
    """Also of an attribute that the worker's environment has, but as it was made, or its class has;
    also where it would go on without.
    """
    async with ready(words()) as env:
        with pytest.raises(EnvironmentFailed) as failure:
            await env.call_scorer("score", Task(1), said)
    assert failure.value.code == "scorer_error"
    assert f"self.{name}" in failure.value.sentence
    assert ("scorer_state" in failure.value.sentence) == (name != "server")
    assert "scored_env.py:" in failure.value.sentence


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("nan", "scorer_output"),
        ("text", "scorer_output"),
        ("object", "scorer_output"),
        ("raise", "scorer_error"),
        ("exit", "scorer_exited"),
    ],
)
async def test_what_is_no_score_is_a_failure_by_name(said: str, code: str) -> None:
    async with ready(words()) as env:
        with pytest.raises(EnvironmentFailed) as failure:
            await env.call_scorer("score", Task(1), said)
        assert failure.value.code == code
        assert await env.call_scorer("score", Task(7), "number") == 1.0, "another worker"


async def test_what_cannot_be_sent_is_said(inference: Inference) -> None:
    async with ready(words()) as env:
        with pytest.raises(EnvironmentFailed, match="cannot be sent"):
            await env.call_scorer("score", lambda: None, "number")


async def test_an_episode_is_scored_with_its_own_attributes(inference: Inference) -> None:
    changes = {"max_new_tokens": 32, "ensure_scores_are_not_same": False}
    env = Count(MultiTurnConfig(group_size=3, **changes), [server(inference)])
    async with ready(env):
        (group,) = (await settled(env, 9)).groups
        (other,) = (await settled(env, 4)).groups
    assert (group["scores"], other["scores"]) == ([9.5] * 3, [4.5] * 3)
    found = [(row["elsewhere"], row["number"]) for row in group["metrics"]]
    assert found == [(1.0, 9)] * 3


@pytest.mark.parametrize("policy", ["on", "off"])
async def test_measure_may_be_awaited(policy: str) -> None:
    async with ready(Slow(config(cage=policy), [APIServerConfig()])) as env:
        assert await env.call_measure(Task(1), "four") == {"length": 4.0}


@pytest.mark.parametrize("said", ["leave", "give up"])
async def test_a_scorer_in_this_process_cannot_end_it(inference: Inference, said: str) -> None:
    inference.answer = lambda prompt, digest: said
    async with ready(Words(config(cage="off", rollout_retries=0), [server(inference)])) as env:
        outcome = await settled(env, Task(1))
    assert {failure.code for failure in outcome.failures} == {"env_error"}


async def test_cancellation_passes_through_a_scorer() -> None:
    begun = asyncio.Event()

    class Waits(Plain):
        async def score(self, item: Any, text: str) -> float:  # type: ignore[override]
            begun.set()
            await asyncio.Event().wait()
            return 1.0

    async with ready(Waits(config(cage="off"), [APIServerConfig()])) as env:
        call = asyncio.create_task(env.call_scorer("score", None, "x"))
        async with asyncio.timeout(10):
            await begun.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled()


async def test_settings_are_not_in_a_workers_arguments_however_long_they_are() -> None:
    async with ready(words(system_prompt="x" * 3_000_000)) as env:
        assert await env.call_scorer("score", Task(1), "prompt") == 3_000_000
        assert await env.call_scorer("score", Task(1), "arguments") < 100_000


def test_a_worker_is_made_without_logins_keys_and_what_is_written(tmp_path: Path) -> None:
    class Keyed(BaseEnvConfig):
        hub_token: str = ""
        judge: dict[str, Any] = Field(default_factory=dict)

    Keyed.__module__, Keyed.__qualname__ = "environments.scored_env", "Keyed"
    scored_env.Keyed = Keyed  # type: ignore[attr-defined]
    given = Keyed(
        hub_token="hf_0123456789",
        judge={"urls": ["http://any:PASSWORD@localhost:2"], "api_key": "hf_0123456789", "most": 2},
        rollout_server_url="http://any:PASSWORD@localhost:1",
        run_dir=str(tmp_path),
        rewards=({"name": "own", "environment": True},),
    )
    text = base64.b64decode(scorers.made_with(given, tmp_path))
    made, its_server = pickle.loads(text)  # noqa: S301 - what was just made
    assert made.judge["most"] == 2
    assert b"PASSWORD" not in text and b"hf_0123456789" not in text
    assert (made.run_dir, made.rewards, made.cage) == (None, (), "off")
    assert made.tokenizer_name == str(tmp_path)
    assert its_server == APIServerConfig()


REWARDS = """
import os
unsafe_scorer = True
def process(completions, **columns):
    return [float(os.getpid())] * len(completions)
def fatal(completions, **columns):
    for chat in completions:
        digit = chat[0]["content"][-3]
        if digit in FATAL:
            os._exit(1)
    return [1.0] * len(completions)
"""


def rewarded(
    inference: Inference, folder: Path, name: str, fatal: str = "", **changes: Any
) -> Plain:
    file = folder / "rewards.py"
    file.write_text(REWARDS.replace("FATAL", repr(fatal)))
    component = {"name": name, "function": f"{file}:{name}"}
    return Plain(config(rewards=[component], **changes), [server(inference)])


async def test_a_reward_function_of_an_unsafe_file_runs_in_a_worker(
    inference: Inference, tmp_path: Path
) -> None:
    env = rewarded(inference, tmp_path, "process")
    env.prompt = lambda item: "Question?"  # type: ignore[method-assign]
    async with ready(env):
        (group,) = (await settled(env, 1)).groups
    rewards = group.get("rewards")
    assert rewards is not None
    assert rewards.own == [os.getpid()] * 4, "its environment names nothing unsafe"
    assert group["scores"][0] != os.getpid()


async def test_a_reward_function_that_ends_its_process_fails_by_name_and_others_are_drawn(
    inference: Inference, tmp_path: Path
) -> None:
    env = rewarded(inference, tmp_path, "fatal", fatal="7", rollout_retries=20)
    env.prompt = lambda item: "Question?"  # type: ignore[method-assign]
    seen = list[int]()

    def answer(prompt: str, digest: int) -> str:
        seen.append(digest)
        digit = 7 if len(seen) <= 2 else 1
        return f"So the answer is \\boxed{{{digit}}}."

    inference.answer = answer
    async with ready(env):
        (group,) = (await settled(env, 1)).groups
    assert group["scores"] == [1.0] * 4
    assert {failure.code for failure in group["failures"]} == {"scorer_exited"}


class OwnNames(Words):
    """As one that was written before scorers had processes: all names are its author's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scored, self.measured, self.scorers = 0, [0.0], {"exact": 1}

    async def score(self, item: Any, text: str) -> Any:
        self.scored += 1
        return self.scorers["exact"] / 2


async def test_an_author_may_call_attributes_what_they_like(inference: Inference) -> None:
    env = OwnNames(config(cage="off"), [server(inference)])
    async with ready(env):
        (group,) = (await settled(env, Task(1))).groups
    assert (group["scores"], env.scored) == ([0.5] * 4, 4)


REWARD_FILES = {
    "rewards.py": "import os\nunsafe_scorer = 1\n"
    "def process(completions, **columns):\n    return [float(os.getpid())] * len(completions)\n",
    "exports.py": "from rewards_of_another_file import process\n",
}


@pytest.mark.parametrize("name", ["rewards.py", "exports.py"])
async def test_a_function_of_an_unsafe_file_runs_apart_whoever_exports_it(
    inference: Inference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD_FILES["rewards.py"])
    (tmp_path / "exports.py").write_text(REWARD_FILES["exports.py"])
    (tmp_path / "rewards_of_another_file.py").write_text(REWARD_FILES["rewards.py"])
    monkeypatch.syspath_prepend(tmp_path)
    component = {"name": "process", "function": f"{tmp_path / name}:process"}
    env = Plain(config(rewards=[component]), [server(inference)])
    env.prompt = lambda item: "Question?"  # type: ignore[method-assign]
    async with ready(env):
        (group,) = (await settled(env, 1)).groups
    assert group["scores"][0] != os.getpid()


def refused(kind: type[BaseEnv], policy: str) -> list[str]:
    overrides = Overrides(env={"cage": policy})
    return [problem.field for problem in settings_of(kind, overrides).problems]


def test_a_cage_is_refused_where_scoring_cannot_be_separated() -> None:
    assert refused(Bare, "on") == ["cage"]
    assert refused(Alone, "auto") == ["cage"], "its class names unsafe_scorer"
    assert [refused(kind, "auto") for kind in (Evaluating, Summed)] == [["cage"], ["cage"]]
    assert [refused(kind, "off") for kind in (Bare, Alone, Evaluating, Summed)] == [[]] * 4
    assert refused(Bare, "auto") == []
    assert [refused(kind, "on") for kind in (Plain, Words, Count)] == [[], [], []]
    described = describe(Bare, parse(["describe", "--env.cage", "on"]))
    (problem,) = described["problems"]
    assert problem["rule"].startswith("Bare scores in its own `collect_trajectory`")
    assert "write `score`" in problem["rule"]
    with pytest.raises(InvalidConfig, match="Summed scores in its `step`"):
        Summed(MultiTurnConfig(), [APIServerConfig()])
    with pytest.raises(InvalidConfig, match="Write `eval_items`"):
        Evaluating(BaseEnvConfig(), [APIServerConfig()])
    with pytest.raises(InvalidConfig, match="collect_trajectory"):
        Bare(BaseEnvConfig(cage="on"), [APIServerConfig()])


class Outer:
    """Holds a class."""

    class Inner(Words):
        """A worker would look for it in the file's own names."""


def test_a_class_within_a_class_is_refused_before_a_run() -> None:
    (problem,) = settings_of(Outer.Inner, Overrides()).problems
    assert problem.field == "cage"
    assert problem.rule.startswith("Outer.Inner is defined within a class")
    assert not settings_of(Outer.Inner, Overrides(env={"cage": "off"})).problems
    with pytest.raises(InvalidConfig, match="top level of its file"):
        Outer.Inner(BaseEnvConfig(), [APIServerConfig()])


@pytest.mark.usefixtures("no_cages")
def test_a_cage_that_the_machine_lacks_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no user namespaces"):
        Plain(config(cage="on", run_dir=str(tmp_path)), [APIServerConfig()])
    left = json.loads((tmp_path / "control" / "failure.json").read_text())
    assert left["code"] == "env_gave_up", "it is not started again"


@pytest.mark.usefixtures("no_cages")
async def test_without_cages_an_unsafe_scorer_runs_in_a_worker_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    async with ready(words(run_dir=str(tmp_path))) as env:
        assert await env.call_scorer("score", Task(1), "process") != os.getpid()
        assert await env.call_scorer("score", Task(1), "number") == 1 / 7
    (notice,) = read_rows(tmp_path / "events.jsonl")
    assert (notice["type"], notice["rule"]) == ("notice", "scorer_uncaged")
    assert NO_CAGES in str(notice["evidence"])


def test_yaml_words_for_the_policy_are_taken_as_such() -> None:
    assert [BaseEnvConfig.model_validate({"cage": given}).cage for given in (True, False)] == [
        "on",
        "off",
    ]


def open_port() -> socket.socket:
    """A server on this machine."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    return listening


def ways(folder: Path, port: int) -> dict[str, Any]:
    """Settings of the hostile environment: where its ways out would lead."""
    (folder / "private").write_text("a key")
    (folder / "metrics.jsonl").write_text("")
    return {
        "private": str(folder / "private"),
        "metrics": str(folder / "metrics.jsonl"),
        "marker": str(folder / "marker"),
        "port": port,
    }


def test_outside_a_cage_the_hostile_scorers_ways_out_are_open(tmp_path: Path) -> None:
    with open_port() as server_there:
        given = ways(tmp_path, server_there.getsockname()[1])
        assert ways_out(HostileConfig(**given)) == 4


@needs_cages
async def test_hostile_scorers_are_counted_by_name_and_find_no_way_out(
    inference: Inference, tmp_path: Path
) -> None:
    """`process`, as a user calls it: it ends in order with every group."""
    kinds = itertools.chain(range(len(ACTS)), itertools.repeat(len(ACTS)))
    inference.answer = lambda prompt, digest: answer_of_kind(next(kinds))
    with open_port() as server_there:
        folder = tmp_path / "run"
        given = {
            **ways(tmp_path, server_there.getsockname()[1]),
            "run_dir": str(folder),
            "data_path_to_save_groups": str(tmp_path / "groups.jsonl"),
            "scorer_timeout_s": 1,
            "total_steps": 3,
            "group_size": 4,
            "rollout_retries": 20,
            "max_token_length": 256,
            "cage": "on",
        }
        file = write_config(tmp_path, inference, **given)
        environment = Path(shutil.copy(HOSTILE, tmp_path))
        ended = await run(environment, "process", "--config", str(file), within_s=100)
    assert ended.code == 0, ended.stderr
    groups = read_rows(tmp_path / "groups.jsonl")
    assert [len(group["scores"]) for group in groups] == [4] * 3
    assert {score for group in groups for score in group["scores"]} == {len(ACTS) / KINDS}
    rows = read_rows(folder / "rollouts" / "step_1.jsonl")
    codes = Counter(failure["code"] for row in rows for failure in row["failures"])
    assert codes.keys() == {
        "scorer_exited",
        "scorer_timeout",
        "scorer_output",
        "scorer_memory",
        "scorer_error",
    }
    assert [codes[name] for name in ("scorer_exited", "scorer_timeout")] >= [2, 2]
    assert not (tmp_path / "marker").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    await until(lambda: not processes_naming(environment), within_s=5)
