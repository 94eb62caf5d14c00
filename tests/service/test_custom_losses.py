"""Custom losses belong to the session that made them and outlive the service's process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from contract.requirements import proves

from halteres.engine.loss_graphs import check_custom
from halteres.errors import InvalidData, NotFound, UserError
from halteres.service import execution
from halteres.service.durable.journal import Journal
from halteres.service.execution import CustomLosses

CAPTURED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "engine" / "custom_loss_0_38_0.json").read_text())
INPUTS, GRAPH = CAPTURED["inputs"], CAPTURED["graph"]


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[CustomLosses]:
    journal = Journal(folder / "journal.sqlite")
    await journal.open()
    losses = CustomLosses(journal)
    await losses.open()
    yield losses
    await journal.close()


async def test_a_loss_is_found_by_its_session_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as losses:
        loss_id = await losses.create("s1", 0, "pd", INPUTS, GRAPH)
        assert check_custom(losses.find("s1", loss_id))[-1].op == "output"
        for session, wanted in (("s2", loss_id), ("s1", "s1:loss:1"), ("s1", None)):
            with pytest.raises(NotFound, match="no custom loss") as caught:
                losses.find(session, wanted)
            assert isinstance(caught.value, UserError)


async def test_a_repeated_request_gets_the_first_answer(tmp_path: Path) -> None:
    async with opened(tmp_path) as losses:
        first = await losses.create("s1", 0, "pd", INPUTS, GRAPH)
        assert await losses.create("s1", 0, "pd", INPUTS, GRAPH) == first
        assert await losses.create("s1", 1, "pd", INPUTS, GRAPH) != first
        assert await losses.create("s2", 0, "pd", INPUTS, GRAPH) != first


async def test_losses_outlive_the_service(tmp_path: Path) -> None:
    async with opened(tmp_path) as losses:
        loss_id = await losses.create("s1", 7, "pd", INPUTS, GRAPH)
        loss = losses.find("s1", loss_id)
    async with opened(tmp_path) as losses:
        assert losses.find("s1", loss_id) == loss
        assert await losses.create("s1", 7, "pd", INPUTS, GRAPH) == loss_id


@proves("custom:whitelist")
async def test_a_graph_that_is_not_allowed_is_not_kept(tmp_path: Path) -> None:
    bad = json.loads(json.dumps(GRAPH).replace("operator.neg", "os.system"))
    async with opened(tmp_path) as losses:
        with pytest.raises(InvalidData, match=r"Node 'neg' \(os\.system\)"):
            await losses.create("s1", 0, "pd", INPUTS, bad)
        with pytest.raises(NotFound):
            losses.find("s1", "s1:loss:0")


async def test_a_session_has_a_bounded_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MAX_LOSSES", 2)
    async with opened(tmp_path) as losses:
        for seq in range(2):
            await losses.create("s1", seq, "pd", INPUTS, GRAPH)
        with pytest.raises(UserError, match="has 2 custom losses"):
            await losses.create("s1", 2, "pd", INPUTS, GRAPH)
        assert await losses.create("s1", 1, "pd", INPUTS, GRAPH)
        assert await losses.create("s2", 0, "pd", INPUTS, GRAPH)
