"""The environment's side of the trajectory server when that server stays away, forgets it, or comes
back.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from deadlines import until

from halteres.clients.trajectories import (
    EnvStatus,
    KeyReused,
    Posted,
    Registered,
    TrainerRegistration,
    UnknownEnvironment,
)
from halteres.environments.config import BaseEnvConfig
from halteres.environments.trajectory_link import STORED, Outbox, OutgoingGroup, TrajectoryLink
from halteres.errors import InvalidData, NotReady
from halteres.observe.metrics import read_rows

from .fakes import (
    ARITHMETIC,
    TOKENIZER,
    Digits,
    Inference,
    Trainer,
    at_work,
    config,
    environment,
    server,
    trajectory_server,
    write_config,
)

pytestmark = pytest.mark.runs

BODY = {
    "tokens": [[1, 2]],
    "masks": [[-100, 2]],
    "scores": [0.1],
    "inference_logprobs": [[1.0, -0.25]],
}


@dataclass
class Server:
    """A trajectory server that may be away, and may forget whom it knows."""

    known: set[int] = field(default_factory=set)
    there: asyncio.Event = field(default_factory=asyncio.Event)  # set: it answers
    arrived: dict[str, dict[str, Any]] = field(default_factory=dict)  # by key
    registrations: int = 0
    refusal: Exception | None = None

    async def register_env(self, **values: Any) -> Registered:
        await self.there.wait()
        env_id = self.registrations
        self.registrations += 1
        self.known.add(env_id)
        return Registered(
            env_id=env_id,
            name=f"{values['name']}_{env_id}",
            checkpoint_dir="",
            starting_step=0,
            checkpoint_interval=0,
            num_steps=9,
        )

    async def info(self) -> tuple[int, int]:
        return 4, 64

    async def status(self, env_id: int, asked_for: int | None = None) -> EnvStatus:
        await self._asked_by(env_id)
        return EnvStatus(
            current_step=0,
            queue_size=0,
            self_queue_size=0,
            max_group_size=1,
            unallocated_fraction=1.0,
            env_weight=1.0,
            allowance=len(self.arrived),
        )

    async def post(self, group: Mapping[str, Any], *, key: str) -> Posted:
        await self._asked_by(group["env_id"])
        if self.refusal is not None:
            raise self.refusal
        if key in self.arrived and self.arrived[key] != group:
            raise KeyReused("That key is another group's.")
        self.arrived[key] = dict(group)
        return Posted(status="received")

    async def disconnect(self, env_id: int) -> None:
        self.known.discard(env_id)

    async def _asked_by(self, env_id: int) -> None:
        await self.there.wait()
        if env_id not in self.known:
            raise UnknownEnvironment("Nobody of that id.")


async def registered(server: Server, folder: Path | None, send_s: float = 0.02) -> TrajectoryLink:
    settings = BaseEnvConfig(group_size=1, spool_dir=str(folder) if folder else None)
    link = TrajectoryLink(cast(Any, server), settings, "sums", send_s)
    server.there.set()
    await link.register()
    return link


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.group"))


def test_groups_come_back_in_the_order_in_which_they_were_stored(tmp_path: Path) -> None:
    spool = Outbox(tmp_path / "spool")
    groups = [
        OutgoingGroup(key=f"k{number}", body={**BODY, "scores": [number / 3]})
        for number in range(3)
    ]
    assert all(map(spool.store, groups))
    found = dict(Outbox(tmp_path / "spool").groups())
    assert list(found.values()) == groups


def test_a_folder_holds_so_much_and_no_more(tmp_path: Path) -> None:
    spool = Outbox(tmp_path, largest_bytes=len(json.dumps({"key": "k", "body": BODY})))
    assert spool.store(OutgoingGroup(key="k", body=BODY))
    assert not spool.store(OutgoingGroup(key="l", body=BODY))
    assert [group.key for _, group in spool.groups()] == ["k"]


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not Outbox(tmp_path / "file").store(OutgoingGroup(key="k", body=BODY))
    assert not Outbox(None).store(OutgoingGroup(key="k", body=BODY))
    assert list(Outbox(None).groups()) == []


@pytest.mark.parametrize(
    "content", [b'{"key": "k", "bo', b"[]", b"{}", b"\xff", b'{"key": "k", "body": 3}']
)
def test_a_damaged_file_is_put_aside_and_stops_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "0.group").write_bytes(content)
    spool = Outbox(tmp_path)
    spool.store(OutgoingGroup(key="k", body=BODY))
    assert [group.key for _, group in spool.groups()] == ["k"]
    assert [file.name for file in tmp_path.glob("*.damaged")] == ["0.damaged"]


async def test_a_group_that_cannot_be_sent_is_kept_and_sent_once_the_server_is_back(
    tmp_path: Path,
) -> None:
    server = Server()
    link = await registered(server, tmp_path)
    server.there.clear()
    assert await link.send(BODY, "0/0/0") == Posted(status=STORED)
    assert len(kept(tmp_path)) == 1
    server.there.set()
    status = await link.status()
    assert status.allowance == 1, (
        "what was kept is sent before the question, so that the answer counts it"
    )
    assert list(server.arrived.values()) == [{**BODY, "env_id": 0}]
    assert not kept(tmp_path)


async def test_a_group_under_way_when_the_environment_ends_is_sent_by_its_successor(
    tmp_path: Path,
) -> None:
    server = Server()
    link = await registered(server, tmp_path, send_s=60)
    server.there.clear()
    sending = asyncio.create_task(link.send(BODY, "0/0/0"))
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert len(kept(tmp_path)) == 1
    successor = await registered(server, tmp_path)
    await successor.status()
    assert list(server.arrived.values()) == [{**BODY, "env_id": 1}]
    assert not kept(tmp_path)


async def test_a_group_that_had_arrived_all_the_same_counts_once(tmp_path: Path) -> None:
    """Only its acknowledgement was lost, and the successor has another id: the key is known, the
    body is another.
    """
    server = Server()
    link = await registered(server, tmp_path)
    await link.send(BODY, "0/0/0")
    (key,) = server.arrived
    Outbox(tmp_path).store(OutgoingGroup(key=key, body=BODY))
    successor = await registered(server, tmp_path)
    await successor.status()
    assert server.arrived == {key: {**BODY, "env_id": 0}}
    assert not kept(tmp_path)


async def test_a_kept_group_that_is_refused_stops_nobody(tmp_path: Path) -> None:
    server = Server()
    Outbox(tmp_path).store(OutgoingGroup(key="k", body=BODY))
    link = await registered(server, tmp_path)
    server.refusal = InvalidData("No.")
    await link.status()
    assert not kept(tmp_path)


async def test_without_a_folder_it_is_an_error_that_the_server_stays_away() -> None:
    server = Server()
    link = await registered(server, None)
    server.refusal = NotReady("Nobody answers.")
    with pytest.raises(NotReady, match="Nobody answers"):
        await link.send(BODY, "0/0/0")


async def test_with_a_folder_that_is_full_too(tmp_path: Path) -> None:
    server = Server()
    (tmp_path / "file").touch()
    link = await registered(server, tmp_path / "file")
    server.there.clear()
    with pytest.raises(NotReady, match=r"acknowledged no group within 0\.02 s"):
        await link.send(BODY, "0/0/0")


async def test_what_a_finished_run_needs_no_more_is_forgotten(tmp_path: Path) -> None:
    server = Server()
    Outbox(tmp_path).store(OutgoingGroup(key="k", body=BODY))
    link = await registered(server, tmp_path, send_s=60)
    link.drop_undelivered()
    assert not kept(tmp_path)
    server.there.clear()
    sending = asyncio.create_task(link.send(BODY, "0/0/0"))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert not kept(tmp_path)


async def test_no_group_overtakes_one_that_is_kept(tmp_path: Path) -> None:
    server = Server()
    link = await registered(server, tmp_path)
    server.there.clear()
    assert (await link.send(BODY, "0/0/0")).status == STORED
    server.there.set()
    assert (await link.send(BODY, "0/1/0")).status == STORED
    assert not server.arrived
    await link.status()
    assert [key.partition("/")[2] for key in server.arrived] == ["0/0/0", "0/1/0"]
    assert (await link.send(BODY, "0/2/0")).status == "received"


async def test_a_group_whose_place_an_earlier_life_has_filled_counts_as_sent(
    tmp_path: Path,
) -> None:
    """By newer weights it may be another group: the first one holds."""
    server = Server()
    await (await registered(server, tmp_path)).send(BODY, "0/0/0")
    again = await registered(server, tmp_path)
    assert (await again.send({**BODY, "scores": [0.9]}, "0/0/0")).status == "received"
    assert [group["scores"] for group in server.arrived.values()] == [[0.1]]


async def test_a_server_that_has_forgotten_it_is_registered_with_again_once(tmp_path: Path) -> None:
    server = Server()
    link = await registered(server, tmp_path, send_s=5)
    server.known.clear()
    posted = await asyncio.gather(
        *(link.send(BODY, f"0/{number}/0") for number in range(4)), link.status()
    )
    assert [each.status for each in posted[:4] if isinstance(each, Posted)] == ["received"] * 4
    assert server.registrations == 2
    assert {group["env_id"] for group in server.arrived.values()} == {1}
    assert link.registered.name == "sums_1"


async def test_serving_goes_on_over_a_server_that_stays_away(
    inference: Inference, tmp_path: Path
) -> None:
    """The environment's figures tell what was kept; no group is lost, none is doubled."""
    trainer = Trainer(batch_size=8, group_size=4)
    trainer.refuse = [NotReady("Nobody answers.")]
    async with (
        asyncio.timeout(5),
        at_work(Digits(config(run_dir=str(tmp_path)), [server(inference)]), trainer),
    ):
        await trainer.until(lambda: len(trainer.batches) == 1)
        trainer.ask()
        await trainer.until(lambda: len(trainer.batches) == 2)
    assert len(set(trainer.keys)) == len(trainer.groups) == 4
    assert len(inference.requests) == 4
    first = read_rows(tmp_path / "metrics.jsonl")[0]
    # The second is kept too where it comes before the next look at the server: no group overtakes
    # one that is kept.
    assert first["groups/kept"] >= 1 and first["groups/kept"] + first.get("groups/sent", 0) == 2
    assert not kept(tmp_path / "spool")


async def test_groups_under_way_when_both_ends_die_are_in_the_batch_of_the_next_life(
    inference: Inference, tmp_path: Path
) -> None:
    file = write_config(
        tmp_path, inference, group_size=4, batch_size=16, max_num_workers=2, run_dir=str(tmp_path)
    )
    async with (
        asyncio.timeout(40),
        trajectory_server(tmp_path, batch_size=16, num_steps=9) as trajectories,
    ):
        address = f"--env.rollout_server_url={trajectories.url}"
        rollouts = tmp_path / "rollouts" / "step_2.jsonl"
        async with environment(ARITHMETIC, "serve", "--config", str(file), address) as env:
            await trajectories.take(0)
            inference.version = 1
            inference.asked.clear()
            asking = asyncio.create_task(trajectories.take(1))
            await inference.asked.wait()
            await trajectories.kill()
            await until(lambda: rollouts.exists() and read_rows(rollouts), what=lambda: "a group")
            env.terminate()
            await env.wait()
        waiting = kept(tmp_path / "spool")
        assert waiting
        under_way = {row["prompt"] for row in read_rows(rollouts)}
        await trajectories.start()
        async with environment(ARITHMETIC, "serve", "--config", str(file), address):
            batch = await asking
        assert len(batch.groups) == len({group.tokens for group in batch.groups}) == 4
        assert not kept(tmp_path / "spool")
        sent = {
            TOKENIZER.decode(group.tokens[0], skip_special_tokens=False) for group in batch.groups
        }
        assert all(any(text.startswith(prompt) for text in sent) for prompt in under_way)


async def test_an_environment_goes_on_where_the_server_has_lost_its_database(
    inference: Inference, tmp_path: Path
) -> None:
    file = write_config(
        tmp_path, inference, group_size=4, batch_size=16, run_dir=str(tmp_path / "run")
    )
    folder = tmp_path / "queue"
    folder.mkdir()
    async with (
        asyncio.timeout(40),
        trajectory_server(folder, batch_size=16, num_steps=9) as trajectories,
    ):
        address = f"--env.rollout_server_url={trajectories.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(file), address) as env:
            await trajectories.take(0)
            await trajectories.kill()
            shutil.rmtree(folder)
            folder.mkdir()
            await trajectories.start()
            run = TrainerRegistration(
                batch_size=16, max_token_len=256, num_steps=9, max_staleness=0, run_id="other"
            )
            await asyncio.to_thread(trajectories.trainer.register, run)
            batch = await trajectories.take(0)
            assert env.returncode is None
    assert len(batch.groups) == len({group.tokens for group in batch.groups}) == 4


@pytest.mark.parametrize("name", ["Prüfung-数学", "two\twords", "two\nlines", "n" * 300])
async def test_groups_of_an_environment_of_any_name_arrive(
    inference: Inference, tmp_path: Path, name: str
) -> None:
    file = write_config(tmp_path, inference, group_size=4, batch_size=4, wandb_name=name)
    async with (
        asyncio.timeout(40),
        trajectory_server(tmp_path, batch_size=4, num_steps=9) as trajectories,
    ):
        address = f"--env.rollout_server_url={trajectories.url}"
        async with environment(ARITHMETIC, "serve", "--config", str(file), address):
            batch = await trajectories.take(0)
    assert batch.num_sequences == 4


GIVES_UP = """
import random
from halteres.environments.single_turn import SingleTurnEnv


class GivesUp(SingleTurnEnv):
    name = "gives_up"

    async def get_next_item(self):
        return 1

    def prompt(self, item):
        return "Question: 1?"

    def score(self, item, text):
        raise RuntimeError("no more")


if __name__ == "__main__":
    GivesUp.cli()
"""


async def test_an_environment_that_ends_with_an_exception_says_goodbye(
    inference: Inference, tmp_path: Path
) -> None:
    """Its minimum share of every batch would keep the others waiting."""
    (tmp_path / "gives_up.py").write_text(GIVES_UP)
    file = write_config(
        tmp_path, inference, group_size=4, batch_size=16, max_failed_groups=1, rollout_retries=0
    )
    async with (
        asyncio.timeout(25),
        trajectory_server(tmp_path, batch_size=16, num_steps=9) as trajectories,
    ):
        address = f"--env.rollout_server_url={trajectories.url}"
        async with environment(
            tmp_path / "gives_up.py", "serve", "--config", str(file), address
        ) as env:
            with pytest.raises(NotReady):  # environments may register once the trainer has asked
                await asyncio.to_thread(trajectories.trainer.batch, 0, deadline_s=0.1)
            assert await env.wait() == 1
        told = await asyncio.to_thread(trajectories.trainer.diagnostics)
    assert [known["connected"] for known in told["environments"]] == [False]
