"""Our two clients against the real server: values, retries across restarts, lost replies."""

from __future__ import annotations

import asyncio
import threading

import pytest

from halteres.clients.trajectories import EnvironmentClient, Patience, TrainerClient, TrainerRegistration, new_key
from halteres.config.limits import LARGEST_BATCH
from halteres.errors import InvalidData, NotReady

from .scenes import ServerProcess, group

RUN = TrainerRegistration(batch_size=4, max_token_len=64, num_steps=10, run_id="r1", max_staleness=0)


@pytest.fixture
def trainer(server: ServerProcess) -> TrainerClient:
    client = TrainerClient(server.url)
    assert client.register(RUN) > 0
    with pytest.raises(NotReady, match="0 of 4 sequences are queued"):
        client.batch(0, deadline_s=0.05)
    return client


async def test_groups_go_round_from_environment_to_trainer(server: ServerProcess, trainer: TrainerClient) -> None:
    async with EnvironmentClient(server.url) as environment:
        registered = await environment.register_env(name="sums", group_size=2, max_token_length=64)
        assert (registered.name, registered.starting_step, registered.num_steps) == ("sums_0", 0, 10)
        assert await environment.info() == (4, 64)
        assert await environment.wandb_info() == ("", "")
        status = await environment.status(registered.env_id)
        assert (status.allowance, status.current_step) == (2, 0)
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, 0, deadline_s=10))
        for versions in (0, [[0, 0], [0, 0]]):
            sent = group(
                policy_version=versions, env_id=registered.env_id, overrides=[{"set_advantage_to_zero": True}, {}]
            )
            assert (await environment.post(sent, key=new_key())).status == "received"
        batch = await waiting
        assert batch is not None and batch.num_sequences == 4
        first, second = batch.groups
        assert (first.versions, second.versions) == (((0, 0), (0, 0)), ((0, 0), (0, 0)))
        assert first.tokens == ((7, 5, 6), (7, 5, 6))
        assert first.masks == ((-100, 5, 6), (-100, 5, 6))
        assert first.logprobs == ((1.0, -0.5, -0.25),) * 2
        assert first.scores == (0.0, 1.0)
        assert first.overrides == ({"set_advantage_to_zero": True}, {})
        assert (await environment.status(registered.env_id)).allowance == 0
        await environment.disconnect(registered.env_id)
    trainer.close()


async def test_a_nan_score_comes_back_as_a_sentence(server: ServerProcess, trainer: TrainerClient) -> None:
    async with EnvironmentClient(server.url) as environment:
        posted = await environment.post(group(scores=[float("nan"), 0.0]), key=new_key())
        assert posted.set_aside == "scores[0] is not a finite number."
        with pytest.raises(InvalidData, match="422"):
            await environment.post({"tokens": [[1]]}, key=new_key())
    trainer.close()


async def test_a_batch_that_is_too_large_is_refused_in_a_sentence(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    with pytest.raises(InvalidData) as caught:
        trainer.register(TrainerRegistration(batch_size=LARGEST_BATCH + 1, max_token_len=64, num_steps=1))
    assert caught.value.why == "batch_size: A batch has at most 1048576 sequences, not 1048577."
    trainer.close()


async def test_both_clients_bridge_a_kill_and_a_restart(server: ServerProcess, trainer: TrainerClient) -> None:
    async with EnvironmentClient(server.url) as environment:
        registered = await environment.register_env(name="sums", group_size=2, max_token_length=64)
        keys = [new_key(), new_key()]
        await environment.post(group(env_id=registered.env_id), key=keys[0])
        server.kill()
        restart = threading.Thread(target=server.start)
        restart.start()
        waiting = asyncio.create_task(asyncio.to_thread(trainer.batch, 0, deadline_s=20))
        await asyncio.gather(*(environment.post(group(env_id=registered.env_id), key=key) for key in keys))
        batch = await waiting
        restart.join(20)
        assert batch is not None and batch.num_sequences == 4
        assert trainer.diagnostics()["groups_accepted"] == 2
    trainer.close()


def test_a_trainer_whose_reply_was_lost_gets_its_batch_from_the_next_question(
    server: ServerProcess, trainer: TrainerClient
) -> None:
    for mark in range(1, 5):
        server.ask("/scored_data", group(2, mark=mark))
    first = trainer.batch(0, deadline_s=5)
    server.ask("/batch?policy_version=0&after=1")  # the second batch: its reply never reaches our trainer
    second = trainer.batch(0, deadline_s=5)
    assert first is not None and second is not None
    assert [made.groups[0].tokens[0][0] for made in (first, second)] == [1, 3]
    assert trainer.diagnostics()["step"] == 2
    trainer.close()


def test_waiting_for_a_batch_can_be_stopped(trainer: TrainerClient) -> None:
    assert trainer.batch(0, deadline_s=60, stopped=lambda: True) is None
    trainer.reset()
    with pytest.raises(NotReady, match="Register first"):
        trainer.batch(0, deadline_s=1)
    trainer.close()


def test_waiting_for_a_server_that_is_away_can_be_stopped_and_ends_at_its_deadline() -> None:
    """Not only when the patience is used up, which may be far longer."""
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) > 3

    patient = TrainerClient("http://127.0.0.1:9", Patience(total_s=3600, first_s=0.01))
    assert patient.batch(0, deadline_s=3600, stopped=stopped) is None
    with pytest.raises(NotReady, match="does not answer"):
        patient.batch(0, deadline_s=0.05)


async def test_a_server_that_stays_away_is_told_after_the_patience() -> None:
    nobody, brief = "http://127.0.0.1:9", Patience(total_s=0.2, first_s=0.01)
    with pytest.raises(NotReady, match="does not answer"):
        TrainerClient(nobody, brief).register(RUN)
    async with EnvironmentClient(nobody, brief) as environment:
        with pytest.raises(NotReady, match="does not answer"):
            await environment.info()


async def test_an_environment_without_a_trainer_gives_up_at_its_deadline(server: ServerProcess) -> None:
    async with EnvironmentClient(server.url) as environment:
        with pytest.raises(NotReady, match="No trainer asked"):
            await environment.register_env(name="sums", group_size=2, max_token_length=64, deadline_s=0.05)
