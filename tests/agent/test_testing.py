"""rl_test_inference as an agent calls it: models of an endpoint, models of this machine, whatever
goes wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from deadlines import until

from halteres.agent.drafts import choose, current
from halteres.agent.tool import Caller
from halteres.agent.trial import folder, request, tester, testing
from halteres.agent.trial.folder import latest_test
from halteres.agent.trial.outcome import Ended
from halteres.agent.trial.request import DEFAULTS, new_request
from halteres.agent.trial.testing import character_tokenizer
from halteres.environments.cage import cage_missing
from halteres.errors import NotFound
from halteres.runs import servers
from halteres.runs.servers import Server
from halteres.tokenizer import load_tokenizer

from .model_test_fixtures import (
    YES,
    answered,
    cmdline,
    draft,
    environment_of,
    files_with,
    processes,
    replied,
    write_environment,
)
from .openrouter import KEY, OpenRouter, openrouter

SEED_KEYS = {
    "": {"environment", "environment_file", "test_config", "models_tested", "summary"},
    "test_config": {"num_steps", "group_size", "rollouts_per_model", "total_rollouts"},
    "summary": {
        *("steps_requested", "models_tested", "models_succeeded", "best_model", "avg_accuracy"),
        *("environment_working", "output_directory"),
    },
    "models_tested": {
        *(
            "model",
            "name",
            "scale",
            "wandb_run",
            "output_file",
            "steps",
            "steps_tested",
            "total_completions",
        ),
        *("correct_completions", "accuracy", "steps_with_correct", "step_success_rate"),
    },
}
"""Of seed 002."""

pytestmark = pytest.mark.runs


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short, as people's paths are: answers with absolute paths are measured."""
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        yield Path(folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    for name in (
        "OPENROUTER_API_KEY",
        "OPENROUTER_BASE_URL",
        "TINKER_BASE_URL",
        "HALTERES_SESSION",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
async def endpoint(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OpenRouter]:
    """The look-alike, and a key for it."""
    async with openrouter() as server:
        monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
        monkeypatch.setenv("OPENROUTER_BASE_URL", server.url)
        yield server


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """A model has but a few seconds."""
    monkeypatch.setattr(request, "MODEL_WITHIN_S", 10.0)
    return 10.0


def by_model(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["model"]: one for one in answer["models_tested"]}


def check_seed_keys(answer: dict[str, Any]) -> None:
    assert SEED_KEYS[""] <= answer.keys()
    assert SEED_KEYS["test_config"] <= answer["test_config"].keys()
    assert SEED_KEYS["summary"] <= answer["summary"].keys()
    for one in answer["models_tested"]:
        assert SEED_KEYS["models_tested"] <= one.keys()


async def test_each_model_has_its_own_result_and_the_key_is_nowhere(
    endpoint: OpenRouter, home: Path, tmp_path: Path, short: float
) -> None:
    """One answers (and quotes the key), one fails (and quotes it), one is too slow, one is of this
    machine.
    """
    draft(write_environment(tmp_path))
    models = ["leaky/one", "bad/one", "slow/one", "local:halteres/tiny"]
    asking = asyncio.create_task(answered(models=models, num_steps=2, group_size=4))
    await asyncio.wait_for(endpoint.asked_slow.wait(), 15)
    await until(
        lambda: any(
            "halteres.service" in cmdline(process) for process in processes(naming=str(home))
        )
    )
    holders = [
        cmdline(process)
        for process in processes(naming=str(home))
        if KEY in environment_of(process)
    ]
    assert ["halteres.agent.trial" in holder for holder in holders] == [True], holders
    assert any("mine.py process" in cmdline(process) for process in processes(naming=str(home)))
    assert not any(KEY in cmdline(process) for process in Path("/proc").glob("[0-9]*"))
    assert files_with(KEY, home) == []
    answer = await asking
    assert answer["status"] == "done"
    check_seed_keys(answer)
    leaky, bad, slow, local = answer["models_tested"]
    assert (leaky["steps_tested"], leaky["total_completions"], leaky["groups_with_variance"]) == (
        2,
        8,
        1.0,
    )
    assert (leaky["accuracy"], leaky["mean_score"], leaky["score_range"]) == (0.5, 0.5, [0, 1])
    assert bad["error"] == "Process exited with code 1"
    assert "answered 500" in bad["why"]
    assert slow["error"] == f"Process timed out after {short:g} s"
    assert "too slow" in slow["why"]
    assert local["steps_tested"] == 2
    summary = answer["summary"]
    assert (
        summary["models_tested"],
        summary["models_succeeded"],
        summary["environment_working"],
    ) == (4, 2, True)
    assert summary["why"].startswith("local:halteres/tiny: "), (
        "the model that would be trained decides"
    )
    assert KEY not in json.dumps(answer)
    assert files_with(KEY, home) == []
    await until(lambda: not list(processes(naming=answer["test_id"])))


async def test_without_names_an_endpoint_is_asked_for_the_three_models_of_the_seeds(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    """The look-alike knows none of them as failing: it takes every id."""
    draft(write_environment(tmp_path))
    answer = await answered(backend="openrouter", num_steps=1, group_size=2)
    assert list(by_model(answer)) == list(DEFAULTS)
    assert [one["scale"] for one in answer["models_tested"]] == ["small", "medium", "large"]
    assert answer["test_config"] == {
        "num_steps": 1,
        "group_size": 2,
        "rollouts_per_model": 2,
        "total_rollouts": 6,
    }
    assert {body["model"] for body in endpoint.requests} == set(DEFAULTS)


async def test_an_answer_longer_than_the_base_models_tokens_allow_drops_no_group(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    """Another model's tokens are not the tokenizer's that counts: 64 of ours are soon full."""
    draft(
        write_environment(tmp_path, "return float('number' in text) + len(text) % 2"),
        max_token_length=60,
    )
    answer = await answered(
        models=["leaky/with-a-rather-long-name-for-a-model"], num_steps=2, group_size=4
    )
    assert answer["models_tested"][0]["steps_tested"] == 2
    assert "groups_dropped" not in answer["models_tested"][0]


async def test_the_call_answers_in_time_and_the_test_id_goes_on_waiting(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    draft(write_environment(tmp_path, f"time.sleep(0.05); {YES}"))
    first = await answered(models=["good/one"], num_steps=2, group_size=4, wait_s=0)
    assert (first["status"], first["summary"]["trainable"]) == ("running", None)
    assert first["next"] == f'rl_test_inference(test_id="{first["test_id"]}")'
    last = await answered(test_id=first["test_id"])
    assert (last["status"], last["test_id"]) == ("done", first["test_id"])
    assert last["models_tested"][0]["steps_tested"] == 2
    assert await answered(test_id=first["test_id"], wait_s=0) == last


async def test_a_client_that_passes_no_test_id_is_given_the_test_of_the_same_arguments(
    endpoint: OpenRouter, home: Path, tmp_path: Path
) -> None:
    """While it goes on, and once after its end; then, and with other arguments or another file, it
    is a new test.
    """
    file, gate = (
        write_environment(
            tmp_path, f"while not os.path.exists('{tmp_path}/gate'): time.sleep(0.02)\n{YES}"
        ),
        tmp_path / "gate",
    )
    draft(file)
    asked: dict[str, Any] = {"models": ["good/one"], "prompts": ["Is 3 a number?"], "max_tokens": 8}
    first = await answered(**asked, wait_s=0)
    again = await answered(**asked, wait_s=0)
    assert (first["status"], again["status"], again["test_id"]) == (
        "running",
        "running",
        first["test_id"],
    )
    gate.touch()
    await until(lambda: folder.find_test(first["test_id"]).phase() == "done", within_s=20)
    collected = await answered(**asked, wait_s=0)
    assert (collected["status"], collected["test_id"]) == ("done", first["test_id"])
    assert collected["responses"][0]["completion"]
    gate.unlink()
    another = await answered(**asked, wait_s=0)
    other = await answered(**{**asked, "max_tokens": 9}, wait_s=0)
    write_environment(tmp_path, YES)
    edited = await answered(**asked)
    assert len({one["test_id"] for one in (first, another, other, edited)}) == 4
    assert edited["status"] == "done"
    gate.touch()
    for one in (another, other):
        await until(lambda one=one: folder.find_test(one["test_id"]).phase() == "done")


async def test_an_endpoints_model_is_tested_before_the_base_model_is_here(
    endpoint: OpenRouter, home: Path, tmp_path: Path
) -> None:
    """Prompts are counted in characters then, and the answer says so; a test of the base model
    itself is refused.
    """
    draft(write_environment(tmp_path), model="Qwen/Qwen3-8B")
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    assert (answer["status"], answer["models_tested"][0]["steps_tested"]) == ("done", 2)
    assert "groups_dropped" not in answer["models_tested"][0]
    assert "'Qwen/Qwen3-8B' is not here" in answer["note"]
    assert "characters" in answer["note"]
    assert (await replied()).body["error"].startswith("Model 'Qwen/Qwen3-8B' is not there.")
    asked = await answered(models=["good/one"], prompts=["Is 1 a number?"])
    assert "characters" in asked["note"]


def test_counted_in_characters_a_text_has_a_token_for_each(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(character_tokenizer(tmp_path / "characters")))
    text = "So 12 + 30 is\n 42."
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode("Größe: 3 m²")) == "Größe: 3 m²"
    assert len(tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}])) > 6


async def test_two_tests_at_once_never_meet(
    endpoint: OpenRouter, home: Path, tmp_path: Path
) -> None:
    draft(write_environment(tmp_path))
    one, other = await asyncio.gather(
        answered(models=["good/one"], num_steps=1, group_size=2),
        answered(models=["good/one"], num_steps=2, group_size=3),
    )
    assert one["test_id"] != other["test_id"]
    assert [found["models_tested"][0]["total_completions"] for found in (one, other)] == [2, 6]
    files = [Path(found["models_tested"][0]["output_file"]) for found in (one, other)]
    assert files[0] != files[1]
    (link,) = (home / "logs" / "inference_tests").glob("test_mine_good_one.jsonl")
    assert link.resolve() in files


@pytest.mark.parametrize(
    ("score", "trainable", "says"),
    [
        ("return None", False, "gave None as a score"),
        ("raise KeyError('gold')", False, "KeyError"),
        ("sys.exit(0)", False, "mine.score raised SystemExit: 0"),
        ("os._exit(3)", False, "exited with code 3"),
        ("while True: pass", False, "It hung in score (mine.py:"),
        (
            "print('x' * 50_000_000); return 0",
            False,
            "All 8 scores are equal (0): too hard, or the scorer",
        ),
        ("return 1", False, "Too easy: all 8 answers are right"),
        ("return 0.5 if 'yes' in text else 0.25", True, "answers of different scores"),
    ],
)
async def test_whatever_a_scorer_does_the_answer_says_it(
    endpoint: OpenRouter, tmp_path: Path, short: float, score: str, trainable: bool, says: str
) -> None:
    file = write_environment(tmp_path, score)
    draft(file)
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    assert answer["summary"]["trainable"] is trainable
    assert says in answer["summary"]["why"]
    assert len(endpoint.requests) < 64, "what a failing scorer costs is bounded"
    if not answer["models_tested"][0]["steps_tested"]:
        assert answer["next"] == f"mend {file}, then rl_test_inference()"
    log = Path(
        answer["models_tested"][0].get("log_file", answer["models_tested"][0]["output_file"])
    )
    assert log.stat().st_size < 1_000_000


@pytest.mark.parametrize("policy", ["on", "off"])
async def test_a_scorer_in_a_cage_scores_a_test_there_and_writes_nothing(
    endpoint: OpenRouter, tmp_path: Path, policy: str
) -> None:
    if cage_missing():
        pytest.skip(str(cage_missing()))
    marker = tmp_path / "marker"
    score = f"try: open({str(marker)!r}, 'w')\nexcept OSError: pass\n{YES}"
    draft(write_environment(tmp_path, score), **{"env.cage": policy})
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    assert answer["models_tested"][0]["total_completions"] == 8
    assert marker.exists() == (policy == "off")


@pytest.mark.parametrize("hangs", ["while True: pass", "10**10**10"])
async def test_a_test_whose_scorer_hangs_with_signals_blocked_ends_after_the_environments_limit(
    endpoint: OpenRouter, tmp_path: Path, hangs: str
) -> None:
    """Long before the model's own deadline."""
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))"
    file = write_environment(tmp_path, f"{blocked}\n{hangs}")
    draft(file, **{"env.stuck_s": 2})
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    assert answer["status"] == "done"
    assert "It hung in score (mine.py:" in answer["summary"]["why"]
    assert answer["models_tested"][0]["seconds"] < 30


@pytest.mark.parametrize(
    "score", ["raise ValueError('y' * 5000)", "return float('nan')"], ids=["long words", "nan"]
)
async def test_what_a_scorer_says_at_length_leaves_room_for_where_the_rest_is(
    endpoint: OpenRouter, tmp_path: Path, score: str
) -> None:
    draft(write_environment(tmp_path, score))
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    one = answer["models_tested"][0]
    assert Path(one["output_file"]).is_absolute() and Path(one["log_file"]).is_file()
    assert len(answer["summary"]["why"]) < 500
    assert "mine.py:29" in answer["summary"]["why"] or score.startswith("return")


async def test_a_test_ends_with_its_process_whatever_that_leaves_behind(
    endpoint: OpenRouter, tmp_path: Path, short: float
) -> None:
    """A child of it would hold its output open, until the test's own deadline."""
    draft(
        write_environment(
            tmp_path, "__import__('subprocess').Popen(['sleep', '98765.25']); return len(text)"
        )
    )
    answer = await answered(models=["good/one"], num_steps=2, group_size=4)
    assert "error" not in answer["models_tested"][0]
    assert answer["models_tested"][0]["steps_tested"] == 2
    await until(
        lambda: not list(processes(naming="98765.25")), what=lambda: "what it left ends too"
    )


async def test_a_key_is_needed_for_other_peoples_models_alone(home: Path, tmp_path: Path) -> None:
    none = await replied(backend="openrouter")
    assert none.body["error"] == "No environment selected. Use rl_select_environment(name) first."
    draft(write_environment(tmp_path))
    for asked in ({"backend": "openrouter"}, {"models": ["qwen/qwen3-8b"]}):
        refused = await replied(**asked)
        assert refused.body["code"] == "missing_key"
        assert refused.body["error"].startswith(
            "OPENROUTER_API_KEY not set. Required for inference testing."
        )
        assert "backend" in refused.body["next"]
    home.mkdir(exist_ok=True)
    (home / "policy.yaml").write_text("hermes-compat")
    assert (await replied()).body["code"] == "missing_key"
    assert not folder.tests_folder().exists()


async def test_a_broken_environment_and_a_test_that_is_not_there_are_refused(
    home: Path, tmp_path: Path
) -> None:
    file = write_environment(tmp_path)
    draft(file)
    file.write_text("import nothing_of_that_name")
    assert (await replied()).body["code"] == "environment_broken"
    for test_id in ("t-00000000", "../../etc", "t-0"):
        assert (await replied(test_id=test_id)).body["code"] == "not_found"


async def test_a_model_that_is_not_there_fails_alone(
    endpoint: OpenRouter, home: Path, tmp_path: Path
) -> None:
    draft(write_environment(tmp_path))
    answer = await answered(models=["local:no/such", "good/one"], num_steps=1, group_size=4)
    missing, good = answer["models_tested"]
    assert missing["error"] == "Model 'no/such' is not there."
    assert (missing["scale"], good["steps_tested"]) == ("local", 1)


async def test_the_model_of_this_machine_is_tested_without_a_key(home: Path) -> None:
    """The real engine, the built-in model, the built-in environment: what an agent does first."""
    choose(Caller(), None, "arithmetic", {})
    answer = await answered()
    check_seed_keys(answer)
    (one,) = answer["models_tested"]
    assert (one["model"], one["scale"], one["total_completions"]) == (
        "local:halteres/tiny",
        "local",
        48,
    )
    assert answer["summary"]["trainable"] is True
    assert answer["next"] == "rl_start_training(dry_run=true)"
    assert one["tokens_per_s"] > 0
    assert 0 < one["groups_with_variance"] <= 1
    assert {"step", "prompt", "best", "worst", "reference"} == answer["samples"][0].keys()
    assert "\\boxed{" in answer["samples"][0]["best"]
    told = latest_test("arithmetic", "halteres/tiny")
    assert told is not None
    assert told.trainable
    assert told.test_id == answer["test_id"]
    assert latest_test("arithmetic", "another/model") is None


async def test_an_environment_is_tested_in_the_folder_of_its_project(
    home: Path, tmp_path: Path
) -> None:
    """As it is trained there: what it reads beside its package is found."""
    project = tmp_path / "project"
    (project / "envs").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    (project / "sizes.txt").write_text("4")
    file = write_environment(project / "envs")
    file.write_text(
        file.read_text().replace("group_size=4", "group_size=int(open('sizes.txt').read())")
    )
    draft(file)
    body = await answered(num_steps=1, group_size=4, backend="local")
    (tested,) = body["models_tested"]
    assert tested["total_completions"] == 4, tested
    assert str(project) in Path(tested["output_file"]).with_suffix(".log").read_text(), (
        "its log says where it ran"
    )


async def test_prompts_are_answered_and_scored_where_the_environment_knows_the_task(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    draft(write_environment(tmp_path))
    known = "Question: Is 1 a number? Say yes or no."
    prompts = ["Is 3 a number?", known, "Where is Paris?"]
    answer = await answered(prompts=prompts, models=["good/one"], max_tokens=20, temperature=0.5)
    bare, whole, free = answer["responses"]
    assert [row["prompt"] for row in answer["responses"]] == prompts
    assert {bare["score"], whole["score"]} <= {0, 1}
    assert free["score"] is None
    assert "none of the environment's tasks" in free["note"]
    asked = {body["messages"][-1]["content"] for body in endpoint.requests}
    assert asked == {"Question: Is 3 a number? Say yes or no.", known, "Where is Paris?"}
    assert {(body["max_tokens"], body["temperature"]) for body in endpoint.requests} == {(20, 0.5)}
    assert "2 of 3 answers could be scored" in answer["summary"]["why"]
    assert answer["summary"]["trainable"] is None


async def test_free_prompts_of_an_environment_of_several_turns_are_answered_and_not_scored(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    file = write_environment(tmp_path)
    file.write_text(file.read_text().replace("(SingleTurnEnv)", "(BaseEnv)").replace(*BASE))
    draft(file)
    (row,) = (await answered(prompts=["Is it so?"], models=["good/one"]))["responses"]
    assert (row["score"], row["note"]) == (
        None,
        "this environment cannot score a free prompt: it scores whole episodes",
    )
    assert "says good" in row["completion"]


BASE = (
    "import SingleTurnEnv",
    "import SingleTurnEnv\nfrom halteres.environments.base import BaseEnv",
)


SEVERAL = """
from halteres.environments.multi_turn import MultiTurnEnv, Step


class Twice(MultiTurnEnv):
    name = "twice"

    async def get_next_item(self):
        return self.rng.randint(0, 3)

    def reset(self, task):
        return f"Is {task} a number?"

    def step(self, reply):
        right = reply.text.startswith("yes")
        return Step("Really?", reward=0.25 * right, done=reply.turn == 1, fresh=True)


if __name__ == "__main__":
    Twice.cli()
"""


async def test_an_environment_of_several_turns_is_tested_by_whole_episodes(
    endpoint: OpenRouter, tmp_path: Path
) -> None:
    """Two sequences of an episode are one rollout, and what is shown of it is the conversation."""
    file = tmp_path / "twice.py"
    file.write_text(SEVERAL)
    draft(file)
    answer = await answered(num_steps=2, group_size=4, models=["good/one"])
    (tested,) = answer["models_tested"]
    assert tested["total_completions"] == 8, tested
    assert len(endpoint.requests) == 16
    sample = answer["samples"][0]
    assert "a number?" in sample["prompt"]
    assert sample["best"].count("says good") == 2
    assert "Really?" in sample["best"]


async def test_an_environment_that_is_slow_to_describe_itself_does_not_hold_up_the_answer(
    endpoint: OpenRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "STARTED_WITHIN_S", 0.2)
    file = write_environment(tmp_path)
    draft(file)
    file.write_text(f"import time\ntime.sleep(0.4)\n{file.read_text()}")
    reply = await replied(models=["good/one"], wait_s=0)
    assert (reply.body["code"], reply.body["next"]) == ("not_ready", "rl_test_inference() again")
    assert not list(folder.all_folders())
    answer = await answered(models=["good/one"], num_steps=1, group_size=4)
    assert answer["status"] == "done"


def pids_of_testers(test_id: str) -> list[int]:
    return [
        int(process.name)
        for process in processes(naming=test_id)
        if "halteres.agent.trial" in cmdline(process)
    ]


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGKILL, "is gone"), (signal.SIGTERM, "ended by a signal")]
)
async def test_a_killed_tester_is_told_and_leaves_nothing_behind(
    home: Path, tmp_path: Path, number: signal.Signals, says: str
) -> None:
    """Its service, engine and environment end with it."""
    draft(write_environment(tmp_path, "time.sleep(60); return 0"))
    first = await answered(wait_s=0)
    test_id = first["test_id"]
    await until(
        lambda: any("process --config" in cmdline(one) for one in processes(naming=test_id))
    )
    family = " ".join(cmdline(one) for one in processes(naming=test_id))
    assert all(
        name in family for name in ("halteres.service", "halteres.engine", "mine.py process")
    )
    (tester,) = pids_of_testers(test_id)
    os.kill(tester, number)
    answer = await answered(test_id=test_id)
    assert (answer["status"], answer["code"], answer["next"]) == (
        "failed",
        "process_exited",
        "rl_test_inference()",
    )
    assert says in answer["error"]
    await until(lambda: not list(processes(naming=test_id)))


async def test_a_tester_that_is_ended_while_its_service_loads_leaves_no_service(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waits for the service cannot be cancelled: it is told, and waited for."""
    draft(write_environment(tmp_path))
    chosen = await asyncio.to_thread(current, Caller(), None, to_run=True)
    new, loading = folder.new_folder(), tmp_path / "loading"
    os.mkfifo(loading)
    reading = os.open(loading, os.O_RDONLY | os.O_NONBLOCK)
    wanted = await asyncio.to_thread(
        new_request, Caller(), "default", chosen, num_steps=1, group_size=2
    )
    (tmp_path / "python").write_text(f"#!/bin/sh\necho $$ > {loading}\nexec sleep 600\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(servers, "ANSWERS_WITHIN_S", 0.1)  # it listens, and answers never
    sitting = asyncio.create_task(tester.Tester(new, wanted).run())
    assert (await asyncio.to_thread(select.select, [reading], [], [], 20))[0], (
        "no service was started"
    )
    pid = int(os.read(reading, 32))
    sitting.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(sitting, return_exceptions=True)
    assert sitting.cancelled()
    assert not Path(f"/proc/{pid}").exists()
    os.close(reading)


async def test_a_test_is_done_once_all_is_measured_though_its_service_is_still_closing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft(write_environment(tmp_path))
    chosen = await asyncio.to_thread(current, Caller(), None, to_run=True)
    new, wanted = (
        folder.new_folder(),
        await asyncio.to_thread(
            new_request, Caller(), "default", chosen, num_steps=1, group_size=2
        ),
    )
    closing, closed, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow_to_close(self: tester.Tester, one: request.TestedModel) -> AsyncIterator[Server]:
        yield Server(url="http://127.0.0.1:9")
        closing.set()
        await closed.wait()

    async def measured(self: tester.Tester, one: request.TestedModel, *rest: Any) -> None:
        self._end(one, Ended(seconds=1.0))

    monkeypatch.setattr(tester.Tester, "_service", slow_to_close)
    monkeypatch.setattr(tester.Tester, "_test_model", measured)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(tester.Tester(new, wanted, done=done.set).run())
        await closing.wait()
        await done.wait()
        closed.set()


async def test_a_test_outlives_the_host_that_started_it(
    endpoint: OpenRouter, home: Path, tmp_path: Path
) -> None:
    draft(write_environment(tmp_path, f"time.sleep(0.1); {YES}"))
    host = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HOST),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert host.stdout is not None
    test_id = (await asyncio.wait_for(host.stdout.readline(), 20)).decode().strip()
    os.killpg(host.pid, signal.SIGKILL)
    await host.wait()
    answer = await answered(test_id=test_id)
    assert (answer["status"], answer["models_tested"][0]["steps_tested"]) == ("done", 2)


HOST = """
import asyncio
from halteres.agent.call import call
from halteres.agent.tool import (Caller)
async def main():
    arguments = {"models": ["good/one"], "num_steps": 2, "group_size": 4, "wait_s": 0}
    reply = await call("rl_test_inference", arguments, Caller())
    print(reply.body["test_id"], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_files_are_read_where_they_keep_no_loop_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def noted(*_: object, **__: object) -> None:
        threads.append(threading.current_thread())
        raise NotFound("It is not there.")

    monkeypatch.setattr(testing, "find_test", noted)
    monkeypatch.setattr(testing.drafts, "current", noted)
    for given in ({"test_id": "t-00000000"}, {}):
        assert (await replied(**given)).failed
    assert len(threads) == 2 and threading.main_thread() not in threads
