"""An unmodified atroposlib 0.4.0 environment outlives what happens to our trajectory server, and to
its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import until

from .atropos_fixtures import (
    BATCH_SIZE,
    GROUP_SIZE,
    TrajectoryServer,
    atropos_python,
    check_exact,
    environment,
    environment_config,
    inference,
    log_of,
)

pytestmark = pytest.mark.clients

WAITS = "Waiting to register the env due to status wait for trainer to start"
POLLED = "env_manager: Status dict"
WORKERS = 4
TOKEN = "a-token-of-some-length"


async def test_an_environment_waits_for_its_trainer_outlives_a_kill_and_pauses_while_enough_waits(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    python = await atropos_python(client_python)
    log = log_of(tmp_path, "sums")
    async with (
        inference() as sampled,
        TrajectoryServer(tmp_path, "--max-queue-batches", "2") as server,
    ):
        config = environment_config(
            "sums", sampled, server.url, max_batches_offpolicy=64, max_num_workers=WORKERS
        )
        async with environment(python, tmp_path, config) as running:

            def said() -> str:
                return log.read_text()[-3000:] + server.said()

            # Registered before its trainer: it asks every second until a trainer has asked for a
            # batch.
            await until(lambda: WAITS in log.read_text(), 60, said)
            assert await server.known("sums") is None
            await server.register()
            assert await server.batch() is None
            await until(lambda: server.accepted("sums"), 30, said)

            # Two batches wait, and what was under way: it pauses, and polls on.
            await until(lambda: _paused(server, log), 30, said)
            most = 2 * BATCH_SIZE // GROUP_SIZE + WORKERS
            waited = await server.accepted("sums")
            assert 2 * BATCH_SIZE // GROUP_SIZE <= waited <= most

            # kill -9, and again on the same port: it goes on under its id, and nothing that was
            # acknowledged is gone.
            before = await server.known("sums")
            await server.kill()
            server.start()
            for _ in range(3):
                await until(lambda: _some(server), 20, said)
            await until(lambda: _more_than(server, waited), 20, said)
            after = await server.known("sums")
            assert before is not None and after is not None
            assert (after["env_id"], after["name"]) == (before["env_id"], before["name"])
            assert [env["name"] for env in (await server.diagnostics())["environments"]] == [
                "sums_0"
            ]
            assert running.returncode is None, said()


async def _paused(server: TrajectoryServer, log: Path) -> bool:
    """Whether nothing more comes while it polls ten times."""
    num_groups, num_polls = await server.accepted("sums"), log.read_text().count(POLLED)
    if num_groups * GROUP_SIZE < 2 * BATCH_SIZE:
        return False
    await until(lambda: log.read_text().count(POLLED) >= num_polls + 10, 20)
    return await server.accepted("sums") == num_groups


async def _more_than(server: TrajectoryServer, num_groups: int) -> bool:
    return await server.accepted("sums") > num_groups


async def test_batches_go_on_when_an_environment_with_a_minimum_dies_without_a_word(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """No client of the protocol ever disconnects: a dead one's share is freed by its silence.

    The server asks for a token, which the environments have in its URL: they know of none.
    """
    python = await atropos_python(client_python)
    async with (
        inference() as sampled,
        TrajectoryServer(tmp_path, "--env-timeout", "2", token=TOKEN) as server,
    ):
        await server.register()
        assert await server.batch() is None
        many = environment_config("many", sampled, server.url)
        few = environment_config("few", sampled, server.url, min_batch_allocation=0.5)
        async with (
            environment(python, tmp_path, many) as living,
            environment(python, tmp_path, few) as dying,
        ):

            def said() -> str:
                logs = (log_of(tmp_path, name).read_text()[-1500:] for name in ("many", "few"))
                return "\n".join((*logs, server.said()))

            ids = await until(lambda: _mixed(server), 60, said)
            dying.kill()
            await dying.wait()
            await until(lambda: _starved(server), 20, said)
            assert await server.batch() is None
            later: set[int] = await until(lambda: _ids(server), 20, said)
            few_id = (await server.known("few") or {})["env_id"]
            # What the dead one had sent is served to the end; from then on there are batches
            # without any of it.
            while few_id in later:
                later = await until(lambda: _ids(server), 20, said)
            assert later == ids - {few_id}
            told = await server.known("few")
            assert told is not None and not told["connected"]
            assert living.returncode is None, said()


async def _some(server: TrajectoryServer) -> list[dict[str, Any]]:
    """A batch, exact; empty while there is none."""
    batch = await server.batch() or []
    if batch:
        check_exact(batch)
    return batch


async def _ids(server: TrajectoryServer) -> set[int]:
    """Whose groups the next batch has; nobody's while there is none."""
    return {group["env_id"] for group in await _some(server)}


async def _mixed(server: TrajectoryServer) -> set[int]:
    """The ids of both environments, once a batch has groups of both."""
    ids = await _ids(server)
    return ids if len(ids) == 2 else set()


async def _starved(server: TrajectoryServer) -> bool:
    """Whether the dead environment's share holds the batches up; those that it still has part in
    are taken before.
    """
    told = await server.diagnostics()
    if any(reason["code"] == "min_allocation_unmet" for reason in told["reasons"]):
        return True
    await _some(server)
    return False
