"""Requests that are promised like training requests, but need no engine: they are settled before they are answered.

Owns: create_custom_loss and unload_model: their results, also of those that an earlier life of the service accepted.
Never: waits for another request.

The work is done before its row is in the journal, and may be repeated: a row that is open when the service ends tells
of work that was done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from halteres.engine.graphs.checked import checked
from halteres.errors import HalteresError
from halteres.service.durable.journal import Entry
from halteres.service.durable.promises import Outcome, Promise, Promises, failure, result
from halteres.service.wire.bodies import CreateCustomLoss, read

CREATE_LOSS, UNLOAD = "create_custom_loss", "unload_model"
KINDS = (CREATE_LOSS, UNLOAD)


async def settled(promises: Promises, entry: Entry, work: Callable[[], Awaitable[Outcome]]) -> Promise:
    """Do the work; the promise of its outcome.

    Raises:
        NotReady: the journal cannot be written.
    """
    try:
        outcome = await work()
    except HalteresError as error:
        outcome = failure(error)
    promise, new = await promises.accept(entry)
    if new:
        promises.settle(promise, outcome)
    return promise


def of_earlier(row: Entry) -> Outcome:
    """The outcome of a request whose work an earlier life of the service did."""
    if row.kind == UNLOAD:
        return unloaded(row.subject)
    try:
        asked = read(row.body, CreateCustomLoss)
        checked(asked.graph, asked.inputs)
    except HalteresError as error:
        return failure(error)
    return loss_created(row.key)


def loss_created(loss_id: str) -> Outcome:
    """Of create_custom_loss."""
    return result({"type": CREATE_LOSS, "loss_id": loss_id})


def unloaded(model_id: str) -> Outcome:
    """Of unload_model."""
    return result({"type": UNLOAD, "model_id": model_id.removesuffix("/unload")})
