"""Taking up what an earlier life of the service accepted and did not settle.

Owns: each open request finds its future, under the id its client knows, and its place: a queue, or the sampler.
Never: decides whether a request is executed: every accepted one is.
"""

from __future__ import annotations

import logging

from halteres.errors import HalteresError, NotFound
from halteres.service.durable.futures import AT_ONCE, LOST_SAMPLE, SAMPLE, Futures, failure, outcome_of_earlier
from halteres.service.durable.journal import Journal, Recorded
from halteres.service.models import Job, Models
from halteres.service.sampling.samples import Samples
from halteres.service.wire.training import Request, read_request

GENERATE = "generate"
"""Inference answered on its own connection, which ended with the earlier life."""

log = logging.getLogger(__name__)


async def take_up(journal: Journal, futures: Futures, models: Models, samples: Samples) -> None:
    """Go on with every open request, oldest first."""
    rows = await journal.left_open()
    for row in rows:
        if row.kind == GENERATE:
            futures.settle(futures.adopt(row), LOST_SAMPLE)
        elif row.kind == SAMPLE:
            await samples.again(row)
        elif row.kind in AT_ONCE:
            futures.settle(futures.adopt(row), outcome_of_earlier(row))
        else:
            _into_lane(row, futures, models)
    if rows:
        log.info("%d requests that were open are taken up again.", len(rows))


def _into_lane(row: Recorded, futures: Futures, models: Models) -> None:
    future = futures.adopt(row)
    try:
        model = models.of_id(row.subject)
        if model is None or row.seq is None:
            raise NotFound(f"There is no training run '{row.subject}' here.", next="Make a new training client.")
        asked = read_request(row.kind, row.content_type, row.body)
    except HalteresError as error:
        futures.settle(future, failure(error))
        return
    model.queue.put(
        Job(model, Request(id=row.id, kind=row.kind, seq=row.seq, asked=asked, drawn=row.drawn or {}), future)
    )
