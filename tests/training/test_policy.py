"""The policy's edge to the SDK: what is sent, what is read, and how failures are told."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings, TrainerSettings
from halteres.losses import find_kind
from halteres.models import TINY
from halteres.runs.servers import Server
from halteres.runs.supervision.roles import Listener, RunContext, listen, roles_of
from halteres.training import policy
from halteres.training.failures import LossNotFinite, RequestRefused, ServiceFailed, VersionsDiffer
from halteres.training.policy import Policy, SentCall, _datum, _finite_pass

from .fakes import example


async def fails(error: Exception) -> None:
    raise error


def answer(loss: float, *rows: list[float]) -> Any:
    outputs = [
        {"logprobs": SimpleNamespace(to_numpy=lambda row=row: np.array(row))} for row in rows
    ]
    return SimpleNamespace(metrics={"loss:sum": loss}, loss_fn_outputs=outputs)


def test_an_example_becomes_a_datum_of_equally_long_arrays() -> None:
    datum = _datum(example([5, 6, 7], [1.0, -0.5, -0.25], 2.0), find_kind("ppo"))
    assert datum.model_input.to_ints() == [5, 6]
    assert {name: data.dtype for name, data in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    assert datum.loss_fn_inputs["target_tokens"].data == [6, 7]
    assert datum.loss_fn_inputs["advantages"].data == [2.0, 2.0]


def test_a_pass_is_read_as_its_summed_loss_and_one_row_per_example() -> None:
    passed = _finite_pass(answer(-3.5, [-1.0, -2.0], [-0.5]))
    assert (passed.loss, passed.clipped) == (-3.5, None)
    assert [row.tolist() for row in passed.logprobs] == [[-1.0, -2.0], [-0.5]]


@pytest.mark.parametrize(
    "spoilt", [answer(math.nan, [-1.0]), answer(math.inf, [-1.0]), answer(-1.0, [-1.0], [math.nan])]
)
def test_a_loss_that_is_not_finite_is_told_with_cause_and_remedy(spoilt: Any) -> None:
    with pytest.raises(
        LossNotFinite, match=r"The loss is .* learning rate is too high\. Resume from the last"
    ):
        _finite_pass(spoilt)


async def test_a_refusal_of_the_service_becomes_one_sentence() -> None:
    promise = SentCall(fails(ValueError("no such model")), "create_model", lambda value: value)
    with pytest.raises(
        ServiceFailed, match=r"create_model raised ValueError: no such model\. Look into logs"
    ):
        await promise


async def test_a_service_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "CALL_S", 0.05)
    with pytest.raises(ServiceFailed, match="did not answer forward_backward within"):
        await SentCall(asyncio.Event().wait(), "forward_backward", lambda value: value)


async def test_cancelling_the_trainer_is_not_a_failure_of_the_service() -> None:
    redeeming = asyncio.ensure_future(
        SentCall(asyncio.Event().wait(), "publish", lambda value: value)
    )
    await asyncio.sleep(0)
    redeeming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await redeeming


def refused(sentence: str, category: str) -> Exception:
    """What tinker 0.38 raises for a promise that failed."""
    from tinker import RequestFailedError
    from tinker.types import RequestErrorCategory

    message = (
        f"Request failed: {sentence} for self.request_id='r1' and expected type "
        "self.model_cls=<class 'X'>"
    )
    return RequestFailedError(message, request_id="r1", category=RequestErrorCategory(category))


async def redeem(error: Exception) -> None:
    await SentCall(fails(error), "forward_backward", lambda value: value)


async def test_a_pass_that_the_engine_refuses_as_not_finite_is_a_diverged_loss() -> None:
    with pytest.raises(LossNotFinite) as caught:
        await redeem(
            refused(
                "[nan_loss] The loss is not finite at datum 3, position 7. Lower the learning "
                "rate.",
                "user",
            )
        )
    assert (
        caught.value.what
        == "The loss is not finite at datum 3, position 7. Lower the learning rate."
    )
    assert "lower trainer.learning_rate" in caught.value.next


async def test_what_the_service_says_of_a_request_is_told_in_its_own_words() -> None:
    with pytest.raises(RequestRefused) as caught:
        await redeem(refused("There is no loss 'x'. Did you mean 'ppo'?", "user"))
    assert caught.value.sentence == (
        "The training service refused forward_backward: There is no loss 'x'. Did you mean 'ppo'?"
    )


async def test_a_failure_on_the_services_side_sends_the_reader_to_its_logs() -> None:
    with pytest.raises(
        ServiceFailed, match=r"failed at forward_backward: It broke\. Look into logs"
    ):
        await redeem(refused("It broke.", "server"))


def counting(version: int, *metrics: dict[str, float]) -> Policy:
    """A policy whose service answers optimiser steps with these metrics."""

    async def step(answer: dict[str, float]) -> Any:
        return SimpleNamespace(metrics=answer or None)

    answers = iter(metrics)
    client: Any = SimpleNamespace(optim_step=lambda adam: step(next(answers)))
    wiring: Any = SimpleNamespace(tempered=False)
    return Policy(Any, client, wiring, TrainerSettings(), version)


async def test_the_services_count_of_optimiser_steps_is_held_against_our_own() -> None:
    policy = counting(4, {"policy_version:max": 5.0}, {"policy_version:max": 7.0})
    assert await policy.optim_step(0.1) == 5
    with pytest.raises(
        VersionsDiffer, match="The service has taken 7 optimiser steps, the trainer counts 6"
    ):
        await policy.optim_step(0.1)


async def test_a_service_that_tells_no_count_is_no_matter() -> None:
    policy = counting(0, {}, {"grad_norm:mean": 1.0})
    assert await policy.optim_step(0.1) == 1
    assert await policy.optim_step(0.1) == 2


SESSION_OF_AN_INSTANT = """
import os, sys
from halteres.training import policy
policy.SESSION_S = 0.2
from halteres.training.__main__ import main
code = main(["--run", sys.argv[1]])
sys.stderr.flush()
os._exit(code)
"""


class Silent(BaseHTTPRequestHandler):
    """A service that says it is well, and answers nothing else: as one behind a proxy that takes
    requests in.
    """

    let_go = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        if self.path.endswith("/healthz"):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")
        else:
            self.do_POST()

    def do_POST(self) -> None:
        self.let_go.wait(60)


def test_a_trainer_whose_service_opens_no_session_ends_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "settings.json").write_text(Settings(env={"batch_size": 16}).model_dump_json())
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        wiring = {"run_id": "r1", "service_url": url, "api_url": url, "base_model": TINY}
        (tmp_path / "wiring.json").write_text(json.dumps(wiring))
        command = [sys.executable, "-c", SESSION_OF_AN_INSTANT, str(tmp_path)]
        try:
            ended = subprocess.run(
                command, env=environ.for_loopback(), capture_output=True, timeout=60
            )
        finally:
            Silent.let_go.set()
            server.shutdown()
    failure = json.loads((tmp_path / "control" / "failure.json").read_text())
    assert (ended.returncode, failure["role"], failure["code"]) == (1, "trainer", "not_ready")
    assert url in failure["what"] and "HTTP_PROXY" in failure["next"]


def test_what_a_trainer_waits_for_at_its_start_ends_before_its_supervisor_gives_it_up(
    tmp_path: Path,
) -> None:
    """Each wait has a reason of its own; the supervisor only knows that the trainer is not
    ready.
    """
    with listen().socket as bound:
        context = RunContext(
            path=tmp_path,
            run_name="sums",
            settings=Settings(),
            environment=EnvironmentProgram(
                name="s", path=tmp_path, interpreter="python", working_directory=tmp_path
            ),
            base_model=TINY,
            service=Listener(bound),
            inference=Server(url="http://127.0.0.1:1"),
            api=Listener(bound),
            secret="s",
        )
        (trainer,) = (role for role in roles_of(context) if role.name == "trainer")
    longest_s = policy.UP_S + policy.SESSION_S + policy.FIRST_S
    assert longest_s < trainer.ready_within_s
