"""Adapters in the engine: what requests do to one, and how one comes back that an engine lost.

What an engine holds dies with it, and with the service. An adapter is brought back by its newest restore point (adapter
and optimiser on disk, taken where no gradient waits) and by executing again, in order, the settled requests after it.
A request under way when its engine dies is executed again after that: the outcome is what it would have been, because
nothing of the first attempt is left.

    STATE/points/<training run, ':' as '_'>/<number of a request>/    PEFT folder, optimiser, state.json
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halteres.engine.loss_graphs.validation import checked
from halteres.engine.protocol import Adam, CustomLoss, LoraConfig, LossSpec, PassResult, StepResult, Trains
from halteres.errors import HalteresError, InvalidData, NotFound, NotReady, ServerError, UserError, boundary
from halteres.service.base import WeightsBudget
from halteres.service.durable.journal import Journal, Recorded
from halteres.service.durable.tables import CUSTOM_LOSSES
from halteres.service.fleet import Fleet, with_failover
from halteres.service.sampling.snapshots import Snapshot, Snapshots
from halteres.service.training_runs import Model, record_point
from halteres.service.wire.bodies import CreateModel, OptimStep
from halteres.service.wire.training import PASSES, PassRequest, Request, read_request

T = TypeVar("T")

MAX_LOSSES = 1000  # custom losses of one session; the SDK makes each of them once
ADAM = ("adamw", "adam")  # the optimiser's names; both mean decoupled decay
POINT_SHARE = 20  # A restore point is taken only after so many times its own cost

log = logging.getLogger(__name__)


class CustomLosses:
    """Graphs of operations that clients wrote as losses, by session."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[tuple[str, str], CustomLoss] = {}
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        for row in await self._journal.rows(CUSTOM_LOSSES):
            self._add(row["session_id"], row["id"], msgspec.convert(row["loss"], CustomLoss))

    async def create(self, session_id: str, seq: int, name: str, inputs: object, graph: object) -> str:
        """Check and record a graph; returns its id. The same sequence number again returns the first one's id.

        Args:
            inputs: as it came: `[{"name": ..., "rank": ...}, ...]`.
            graph: as it came: `{"format": 1, "nodes": [...]}`.

        Raises:
            InvalidData: the graph holds what is not allowed; the message names node and target.
            UserError: the session has too many.
        """
        loss_id = f"{session_id}:loss:{seq}"
        if (session_id, loss_id) in self._known:
            return loss_id
        if self._counts[session_id] >= MAX_LOSSES:
            raise UserError(f"This session has {MAX_LOSSES} custom losses.", next="Use those, or make a new session.")
        loss = checked(graph, inputs)
        facts = {"id": loss_id, "session_id": session_id, "seq": seq, "name": name, "created_at": time.time()}
        await self._journal.put(CUSTOM_LOSSES, **facts, loss=msgspec.to_builtins(loss))
        self._add(session_id, loss_id, loss)
        return loss_id

    def find(self, session_id: str, loss_id: str | None) -> CustomLoss:
        """The custom loss of this id."""
        found = self._known.get((session_id, loss_id or ""))
        if found is None:
            raise NotFound(
                f"There is no custom loss '{loss_id}' in this session.",
                "A custom loss belongs to the session that made it.",
                "Make it with create_custom_loss.",
            )
        return found

    def _add(self, session_id: str, loss_id: str, loss: CustomLoss) -> None:
        self._counts[session_id] += (session_id, loss_id) not in self._known
        self._known[session_id, loss_id] = loss


async def create_adapter(engine: Trains, model: Model, request: Request) -> None:
    """Make the adapter that a create_model asks for, with the seed drawn for it."""
    body = request.of(CreateModel)
    check_optimizer(body.optimizer_config.type)
    fields: dict[str, Any] = {**msgspec.structs.asdict(body.lora_config), **request.drawn}
    lora = LoraConfig(**fields)
    await engine.create_adapter(model.id, lora)
    model.lora = lora


async def run_pass(engine: Trains, model: Model, request: Request, losses: CustomLosses) -> PassResult:
    """A forward-backward or forward pass."""
    body = request.of(PassRequest)
    if body.flaw is not None:
        raise body.flaw
    custom = losses.find(model.session_id, body.loss_id) if body.loss == "custom" else None
    loss = LossSpec(name=body.loss, config=dict(body.config), custom=custom)
    return await engine.forward_backward(model.id, body.data, loss, body.forward_only)


async def step(engine: Trains, model: Model, request: Request) -> StepResult:
    """One step of the optimiser."""
    body = request.of(OptimStep)
    if body.optimizer_params is not None:
        check_optimizer(str(body.optimizer_params.get("type")))
        raise InvalidData("optimizer_params are for other optimisers.", next="Send adam_params.")
    fields = msgspec.structs.asdict(body.adam_params) if body.adam_params else {}
    for name, value in fields.items():
        if value is None:
            why = "It came as null, which is what JSON makes of NaN and infinity."
            raise InvalidData(f"{name} is no number.", why, "Send a finite number, or leave the field out.")
    return await engine.optim_step(model.id, Adam(**fields))


def check_optimizer(kind: str) -> None:
    """Raise UserError for an optimiser that is not here."""
    if kind not in ADAM:
        why = "Its constants are not public." if kind == "dimuon" else "This service trains with AdamW."
        remedy = "Leave optimizer_config out and send AdamParams."
        raise UserError(f"There is no optimiser '{kind}' here.", why, remedy)


class AdapterLost(ServerError):
    """An adapter whose restore point and requests are gone."""

    code = "adapter_lost"


class Adapters:
    """What the engine holds, and what can be brought back."""

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        snapshots: Snapshots,
        losses: CustomLosses,
        points: Path,
        tasks: asyncio.TaskGroup,
        budget: WeightsBudget,
        *,
        replay_s: float,
    ) -> None:
        self._fleet, self._journal, self._snapshots, self._losses = fleet, journal, snapshots, losses
        self._points, self._tasks, self._budget, self._replay_s = points, tasks, budget, replay_s
        self._held: OrderedDict[str, Model] = OrderedDict()  # unused for longest first
        snapshots.bring_back = self._take_again

    async def run(self, model: Model, call: Callable[[Trains], Awaitable[T]], *, made_here: bool = False) -> T:
        """The result of a call of the engine that holds the adapter, which is brought back where it is lost; an engine
        that dies under it is survived.

        Args:
            call: what to do; executed again from the start with the next engine.
            made_here: `call` makes or replaces the adapter: it need not be there before.

        Raises:
            EngineDied: engines keep dying under this one request.
            NotReady: no engine is running.
            AdapterLost: it cannot be brought back.
        """

        async def attempt(engine: Trains) -> T:
            async with model.placement.turn:
                if made_here and model.lora is None:
                    await engine.drop(model.id)  # what an attempt that failed half-way left
                else:
                    with suppress(AdapterLost) if made_here else nullcontext():
                        await self._bring_back(model, engine)
                began = time.monotonic()
                with self.replaced(model) if made_here else nullcontext():
                    result = await call(engine)
                model.placement.work_s += time.monotonic() - began
                model.placement.engine = engine
                self._touch(model)
                return result

        return await with_failover(lambda: self._fleet.trainer, attempt)

    @contextmanager
    def replaced(self, model: Model) -> Iterator[None]:
        """The adapter is made or replaced inside; if that fails, nobody knows how far it came: it is brought back as it
        was."""
        try:
            yield
        except BaseException:
            model.placement.engine = None
            raise

    async def _bring_back(self, model: Model, engine: Trains) -> None:
        placement, after = model.placement, -1
        if placement.engine is engine:
            return
        began = time.monotonic()
        await engine.drop(model.id)
        if placement.point is not None:
            folder, after = self._folder(model, placement.point), placement.point
            if not folder.is_dir():
                raise _lost(model)
            await engine.load(model.id, str(folder), True)
        rows = await self._journal.to_replay(model.id, after)
        if placement.forgotten or (after < 0 and not any(row.seq == 0 and row.state == "done" for row in rows)):
            raise _lost(model)
        placement.gradient = False
        for row in rows:
            await self._replay(model, engine, row)
        placement.engine, placement.work_s = engine, time.monotonic() - began
        self._touch(model)
        log.info("Training run %s is back: %d requests in %.2f s.", model.id, len(rows), placement.work_s)

    async def _replay(self, model: Model, engine: Trains, row: Recorded) -> None:
        """Execute a settled request once more, for what it did to the adapter: a failed pass added nothing, but a
        refused step may have cleared the gradient."""
        if row.seq is None or (row.state == "failed_user" and row.kind != "optim_step"):
            return
        if row.kind == "save_weights_for_sampler":
            await self._snapshots.retake(model, row.seq, engine)
            return
        body = read_request(row.kind, row.content_type, row.body)
        request = Request(id=row.id, kind=row.kind, seq=row.seq, body=body, drawn=row.drawn or {})
        try:
            if row.kind == "create_model":
                await create_adapter(engine, model, request)
            elif row.kind in PASSES:
                await run_pass(engine, model, request, self._losses)
            else:
                await step(engine, model, request)
            model.placement.gradient = row.kind in PASSES
        except UserError:
            if row.state == "done":
                raise

    # Restore points

    async def consider_point(self, model: Model, seq: int) -> None:
        """Take a restore point if bringing the adapter back would take long, and far longer than the point takes. One
        that fails leaves the older one."""
        placement, began = model.placement, time.monotonic()
        due_s = max(self._replay_s, POINT_SHARE * placement.point_s) if self._replay_s else 0.0
        if placement.work_s < due_s or placement.gradient or (engine := placement.engine) is None:
            return
        try:
            async with placement.turn:
                await self.write_point(model, engine, seq)
            await self.point_written(model, seq)
            placement.point_s = time.monotonic() - began
        except HalteresError as error:
            log.warning("No restore point of %s after request %d: %s", model.id, seq, error)

    async def write_point(self, model: Model, engine: Trains, seq: int) -> None:
        """The folder of a restore point: adapter and optimiser as they are after the request of this number. Unnamed
        weights published before it cannot be replayed, so they are kept."""
        await self._snapshots.keep(model, engine)
        await engine.save(model.id, str(self._folder(model, seq)), True)

    async def point_written(self, model: Model, seq: int) -> None:
        """From now on the adapter is brought back from there."""
        await record_point(self._journal, model, seq)
        model.placement.point, model.placement.work_s, model.placement.forgotten = seq, 0.0, False
        await asyncio.to_thread(_keep_only, self._folder(model, seq))

    def _folder(self, model: Model, seq: int) -> Path:
        return self._points / model.id.replace(":", "_") / str(seq)

    async def forget(self, model: Model) -> None:
        """Remove what would bring back a training run that nobody goes on with."""
        if not model.placement.forgotten:
            await record_point(self._journal, model, None)
            model.placement.point, model.placement.forgotten = None, True
            await asyncio.to_thread(shutil.rmtree, self._points / model.id.replace(":", "_"), ignore_errors=True)

    # Leaving the engine

    async def unload(self, model: Model) -> None:
        """Let an idle adapter leave the engine; it is brought back when it is asked for."""
        if not model.queue.idle:
            return
        async with model.placement.turn:
            self._held.pop(model.id, None)
            if (engine := model.placement.engine) is not None:
                model.placement.engine = None
                with suppress(NotReady):  # that engine is gone, and the adapter with it
                    await engine.drop(model.id)

    def _touch(self, model: Model) -> None:
        """It was used now; those unused for longest make room for one that is new here."""
        known = model.id in self._held
        self._held[model.id] = model
        self._held.move_to_end(model.id)
        if known:
            return
        excess = sum(self._budget.adapter(held.lora) for held in self._held.values()) - self._budget.of_kind
        for idle in [held for held in self._held.values() if held.queue.idle and held is not model]:
            if excess <= 0:
                return
            excess -= self._budget.adapter(idle.lora)
            del self._held[idle.id]
            self._tasks.create_task(self._unload_quietly(idle), name="adapter leaves")

    async def _unload_quietly(self, model: Model) -> None:
        try:
            with boundary(ServerError, "The adapter's removal"):
                await self.unload(model)
        except HalteresError as error:
            log.warning("The adapter of %s stays in the engine: %s", model.id, error)

    async def _take_again(self, snapshot: Snapshot, engine: Trains) -> None:
        """Bring back the adapter that unnamed weights were published from, and with it the weights."""
        if (model := snapshot.model) is not None:
            async with model.placement.turn:
                await self._bring_back(model, engine)


def _keep_only(point: Path) -> None:
    with suppress(OSError):  # what cannot be removed now is removed with the next one
        for older in point.parent.iterdir():
            if older != point:
                shutil.rmtree(older, ignore_errors=True)


def _lost(model: Model) -> AdapterLost:
    return AdapterLost(
        f"The adapter of training run {model.id} is gone.",
        "Its restore point or its requests are not in this state directory any more.",
        "Resume from a checkpoint: create_training_client_from_state_with_optimizer(path).",
    )
