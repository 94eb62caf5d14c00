"""Training requests, executed: what each asks of the engine, and how an adapter comes back that an
engine lost.

What an engine holds dies with it, and with the service. An adapter is brought back by its newest
restore point (adapter and optimiser on disk, taken where no gradient waits) and by executing again,
in order, the settled requests after it. A request under way when its engine dies is executed again
after that: the outcome is what it would have been, because nothing of the first attempt is left.

    STATE/points/<training run, ':' as '_'>/<number of a request>/    PEFT folder, optimiser,
                                                                      state.json
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from halteres.engine.folders import recover
from halteres.engine.protocol import (
    Adam,
    LoraConfig,
    LossSpec,
    PassResult,
    Saved,
    Trains,
)
from halteres.errors import HalteresError, InvalidData, NotReady, ServerError, UserError, boundary
from halteres.losses import STABLE_REINFORCE
from halteres.service.base import BaseModel, WeightsBudget
from halteres.service.checkpoint_folders import Kind, TinkerPath, refuse_token
from halteres.service.checkpoints import Checkpoints
from halteres.service.conversion import encryption_to, write_export
from halteres.service.durable.futures import Outcome, binary_result, result
from halteres.service.durable.journal import Journal, Recorded
from halteres.service.fleet import Fleet, info_of, with_failover
from halteres.service.sampling.sessions import Samplers
from halteres.service.sampling.snapshots import Snapshot, Snapshots
from halteres.service.training_metrics import TrainingMetrics
from halteres.service.training_runs import Job, Model, Sessions, record, record_point
from halteres.service.wire.bodies import CreateModel, LoadWeights, OptimStep, SaveWeights
from halteres.service.wire.results import write_pass
from halteres.service.wire.training import PASSES, TAKES_FAMILIES, PassRequest, Request

T = TypeVar("T")


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training calls of the Tinker API over one engine."""

    journal: Journal
    adapters: Adapters
    checkpoints: Checkpoints
    sessions: Sessions
    samplers: Samplers
    snapshots: Snapshots
    base: BaseModel
    metrics: TrainingMetrics
    refuse_stable_reinforce: bool

    async def execute(self, job: Job) -> Outcome:
        """What a request's future is settled with."""
        methods = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._run_pass,
            "forward": self._run_pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._publish,
            "save_weights_external": self._export,
        }
        outcome = await methods[job.request.kind](job.model, job.request)
        return replace(outcome, repeatable=job.model.placement.is_exact)

    async def afterwards(self, job: Job) -> None:
        """A restore point, if one is due: after each step of an engine that is not exact, whose
        step is another one when it is taken again.
        """
        outcome = job.future.outcome
        if outcome is not None and outcome.state == "done":
            is_due = job.request.kind == "optim_step" and not job.model.placement.is_exact
            await self.adapters.consider_point(job.model, job.request.seq, is_due=is_due)

    async def _create(self, model: Model, request: Request) -> Outcome:
        self.adapters.check_sampled(lora_of(request))
        await self.adapters.run(
            model, lambda engine: create_adapter(engine, model, request), made_here=True
        )
        await record(self.journal, model)
        return result({"type": "create_model", "model_id": model.id})

    async def _load(self, model: Model, request: Request) -> Outcome:
        """Make or replace the adapter from saved state; the restore point is part of it, for what
        lies at the path may change.
        """
        body = request.of(LoadWeights)
        refuse_token(body.weights_access_token)
        if not body.optimizer:  # a saved optimiser is restored whatever is asked for
            check_optimizer(body.optimizer_config.type)
        found = self.checkpoints.find(body.path, model.tenant)
        self.adapters.check_sampled(found.lora)
        if model.lora is not None:
            takes_families = TAKES_FAMILIES in request.drawn
            refuse_other_shape(body.path, found.lora, model.lora, takes_families=takes_families)

        async def load(engine: Trains) -> None:
            await engine.load(model.id, str(found.folder), body.optimizer)
            await self.adapters.write_point(model, engine, request.seq)

        await self.adapters.run(model, load, made_here=True)
        self.metrics.forget_passes(model.id)
        with self.adapters.replaced(model):
            model.lora, model.placement.gradient = found.lora, False
            await record(self.journal, model)
            await self.adapters.point_written(model, request.seq)
        return result({"type": "load_weights", "path": body.path, "model_id": model.id})

    async def _run_pass(self, model: Model, request: Request) -> Outcome:
        if self.refuse_stable_reinforce and request.of(PassRequest).loss == STABLE_REINFORCE:
            raise InvalidData(
                f"The loss '{STABLE_REINFORCE}' is refused here.",
                "Its formula is not public, and the operator wants none of ours under its name.",
                "Use 'importance_sampling', 'cispo' or 'gspo'.",
            )
        began = time.monotonic()
        passed = await self.adapters.run(model, lambda engine: run_pass(engine, model, request))
        took_s = time.monotonic() - began
        self.metrics.passed(model.id, request.of(PassRequest), passed, took_s)
        model.placement.gradient = model.placement.gradient or request.kind == "forward_backward"
        return binary_result(write_pass(passed))

    async def _step(self, model: Model, request: Request) -> Outcome:
        began, adam = time.monotonic(), adam_of(request)
        stepped = await self.adapters.run(model, lambda engine: engine.optim_step(model.id, adam))
        self.metrics.stepped(model.id, stepped, adam.learning_rate, time.monotonic() - began)
        model.placement.gradient = False
        # JSON has no others
        finite = {name: value for name, value in stepped.metrics.items() if math.isfinite(value)}
        return result(
            {
                "type": "optim_step",
                "metrics": {**finite, "policy_version:max": float(stepped.version)},
            }
        )

    async def _save(self, model: Model, request: Request) -> Outcome:
        path = self._place(model, request, "weights")
        if self.checkpoints.outcome_of(request.id, model.tenant) is None:
            folder = str(self.checkpoints.waiting_folder(path, request.id))
            saved = await self.adapters.run(
                model, lambda engine: engine.save(model.id, folder, True)
            )
            await self._replace(
                path, saved, model, request, overwrite=request.of(SaveWeights).overwrite
            )
        return result({"type": "save_weights", "path": str(path)})

    async def _publish(self, model: Model, request: Request) -> Outcome:
        """Immutable weights to sample from, on disk if they are named."""
        body, session = request.of(SaveWeights), self.sessions.of_model(model.session_id)
        if body.kind not in ("snapshot", "inflight"):
            raise UserError(
                f"There are no sampler weights of kind '{body.kind}'.",
                next="Use snapshot or inflight.",
            )
        if body.path is None:
            if body.sampling_session_seq_id is None:
                raise InvalidData(
                    "The sampler weights have no name and no sampling session.", next="Send path."
                )
            snapshot = await self.adapters.run(
                model, lambda engine: self.snapshots.publish(engine, model, request.seq)
            )
            sampler = await self.samplers.add_unnamed(
                session, body.sampling_session_seq_id, snapshot, inflight=body.kind == "inflight"
            )
            self.samplers.published(session, snapshot)
            return result(
                {
                    "type": "save_weights_for_sampler",
                    "sampling_session_id": sampler.id,
                    "path": None,
                }
            )
        path = self._place(model, request, "sampler_weights")
        if self.checkpoints.outcome_of(request.id, model.tenant) is None:
            folder = str(self.checkpoints.waiting_folder(path, request.id))

            async def publish(engine: Trains) -> tuple[Snapshot, Saved]:
                snapshot = await self.snapshots.publish(engine, model, request.seq)
                return snapshot, await engine.save_snapshot(snapshot.name, folder)

            snapshot, saved = await self.adapters.run(model, publish)
            await self._replace(path, saved, model, request)
            self.snapshots.name(snapshot, str(path), self.checkpoints.folder(path), saved)
            self.samplers.published(session, snapshot)
        return result({"type": "save_weights_for_sampler", "path": str(path)})

    async def _replace(
        self,
        path: TinkerPath,
        saved: Saved,
        model: Model,
        request: Request,
        *,
        overwrite: bool = False,
    ) -> None:
        """Put new weights in their place. Older ones get a numbered name, and whoever samples from
        them follows them there; those that are overwritten live on with whoever samples from them.
        """
        try:
            if overwrite:
                await self.snapshots.detach(str(path))
                self.snapshots.forget(str(path))  # whoever asked meanwhile means the new ones
            elif (older := await self.checkpoints.keep(path, model.tenant)) is not None:
                await self.samplers.rename(str(path), str(older.path))
                await self.snapshots.rename(str(path), older)
            await self._add(path, saved, model, request)
        finally:
            # unless it has its place
            await asyncio.to_thread(shutil.rmtree, saved.folder, ignore_errors=True)

    async def _add(self, path: TinkerPath, saved: Saved, model: Model, request: Request) -> None:
        ttl_s, metadata = request.of(SaveWeights).ttl_seconds, request.of(SaveWeights).user_metadata
        await self.checkpoints.add(
            path, saved, model, ttl_s=ttl_s, user_metadata=metadata, request_id=request.id
        )

    async def _export(self, model: Model, request: Request) -> Outcome:
        path, keys = (
            self._place(model, request, "external_weights"),
            request.of(SaveWeights).age_encryption_recipients,
        )
        folder, encrypt = (
            self.checkpoints.folder(path),
            None if keys is None else encryption_to(keys),
        )
        saved = await self.adapters.run(
            model, lambda engine: write_export(engine, model.id, folder, self.base.folder, encrypt)
        )
        await self._add(path, saved, model, request)
        return result(
            {"type": "save_weights_external", "path": str(path), "size_bytes": saved.size_bytes}
        )

    def _place(self, model: Model, request: Request, kind: Kind) -> TinkerPath:
        body = request.of(SaveWeights)
        overwrite = body.overwrite and kind == "weights"
        return self.checkpoints.place(
            model,
            kind,
            body.path,
            overwrite=overwrite,
            ttl_s=body.ttl_seconds,
            request_id=request.id,
        )


ADAM = ("adamw", "adam")  # the optimiser's names; both mean decoupled decay
POINT_SHARE = 20  # A restore point is taken only after so many times its own cost


async def create_adapter(engine: Trains, model: Model, request: Request) -> None:
    """Make the adapter that a create_model asks for, with the seed drawn for it."""
    check_optimizer(request.of(CreateModel).optimizer_config.type)
    lora = lora_of(request)
    await engine.create_adapter(model.id, lora)
    model.lora = lora


def lora_of(request: Request) -> LoraConfig:
    """The adapter that a create_model asks for, with the seed drawn for it."""
    config = request.of(CreateModel).lora_config
    return msgspec.convert({**msgspec.structs.asdict(config), **request.drawn}, LoraConfig)


FAMILIES = ("train_mlp", "train_attn", "train_unembed")
"""Which weights of the base model an adapter has its own for."""


def refuse_other_shape(
    path: str, saved: LoraConfig, own: LoraConfig, *, takes_families: bool = False
) -> None:
    """InvalidData where saved weights have another shape than the adapter of the training run that
    loads them. `takes_families`: an adapter of all families may get those of the weights.
    """
    compared = ("rank", *FAMILIES)
    if takes_families and all(getattr(own, name) for name in FAMILIES):
        compared = ("rank",)
    differences = [
        f"{name} is {getattr(saved, name)} there and {getattr(own, name)} here"
        for name in compared
        if getattr(saved, name) != getattr(own, name)
    ]
    if differences:
        raise InvalidData(
            f"The weights {path} do not fit the adapter of this training run.",
            f"{', '.join(differences)}.",
            f"Go on from them with create_training_client_from_state('{path}'): its adapter has "
            "their shape.",
        )


async def run_pass(engine: Trains, model: Model, request: Request) -> PassResult:
    """A forward-backward or forward pass."""
    body = request.of(PassRequest)
    if body.flaw is not None:
        raise body.flaw
    loss = LossSpec(name=body.loss, config=dict(body.config))
    return await engine.forward_backward(model.id, body.data, loss, body.forward_only)


def adam_of(request: Request) -> Adam:
    """What an optim_step asks of the optimiser; UserError for what is not here, or no number."""
    body = request.of(OptimStep)
    if body.optimizer_params is not None:
        check_optimizer(str(body.optimizer_params.get("type")))
        raise InvalidData("optimizer_params are for other optimisers.", next="Send adam_params.")
    fields = msgspec.structs.asdict(body.adam_params) if body.adam_params else {}
    for name, value in fields.items():
        if value is None:
            why = "It came as null, which is what JSON makes of NaN and infinity."
            raise InvalidData(
                f"{name} is no number.", why, "Send a finite number, or leave the field out."
            )
    return Adam(**fields)


def check_optimizer(kind: str) -> None:
    """Raise UserError for an optimiser that is not here."""
    if kind not in ADAM:
        why = (
            "Its constants are not public."
            if kind == "dimuon"
            else "This service trains with AdamW."
        )
        raise UserError(
            f"There is no optimiser '{kind}' here.",
            why,
            "Leave optimizer_config out and send AdamParams.",
        )


WITHDRAWN = "custom"
"""The loss of passes by graphs of operations, which earlier versions computed here."""


class AdapterLost(ServerError):
    """An adapter whose restore point and requests are gone."""

    code = "adapter_lost"


class Adapters:
    """Which adapters the engine holds; one that it lost comes back from its restore point and the
    requests after it.
    """

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        snapshots: Snapshots,
        points: Path,
        tasks: asyncio.TaskGroup,
        budget: WeightsBudget,
        metrics: TrainingMetrics,
        *,
        replay_s: float,
    ) -> None:
        self._fleet, self._journal, self._snapshots = fleet, journal, snapshots
        self._metrics = metrics
        self._points, self._tasks, self._budget, self._replay_s = points, tasks, budget, replay_s
        self._held: OrderedDict[str, Model] = OrderedDict()  # unused for longest first
        snapshots.bring_back = self.bring_back

    def check_sampled(self, lora: LoraConfig) -> None:
        """InvalidData for an adapter that no sampler can be given."""
        self._fleet.check_adapter(lora)

    async def run(
        self, model: Model, call: Callable[[Trains], Awaitable[T]], *, made_here: bool = False
    ) -> T:
        """The result of a call of the engine that holds the adapter, which is brought back where it
        is lost (AdapterLost where it cannot be); raises as `failover_engines`, which calls again
        with the next engine. `made_here`: the call makes or replaces the adapter, which need not be
        there before.
        """

        async def attempt(engine: Trains) -> T:
            model.placement.is_exact = (await info_of(self._fleet.trainer)).exact
            async with model.placement.lock:
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

        return await with_failover(lambda _: self._fleet.trainer, attempt)

    @contextmanager
    def replaced(self, model: Model) -> Iterator[None]:
        """The adapter is made or replaced inside; if that fails, nobody knows how far it came: it
        is brought back as it was.
        """
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
                # whoever replaced it may have been killed between two renames
                await asyncio.to_thread(recover, folder.parent)
            if not folder.is_dir():
                raise _lost(model)
            await engine.load(model.id, str(folder), True)
        rows = await self._journal.to_replay(model.id, after)
        if placement.forgotten or (
            after < 0 and not any(row.seq == 0 and row.state == "done" for row in rows)
        ):
            raise _lost(model)
        placement.gradient = False
        self._metrics.forget_passes(model.id)
        for row in rows:
            await self._replay(model, engine, row)
        placement.engine, placement.work_s = engine, time.monotonic() - began
        self._touch(model)
        log.info(
            "Training run %s is back: %d requests in %.2f s.", model.id, len(rows), placement.work_s
        )

    async def _replay(self, model: Model, engine: Trains, row: Recorded) -> None:
        """Execute a settled request once more, for what it did to the adapter: a failed pass added
        nothing, but a refused step may have cleared the gradient.
        """
        if row.seq is None or (row.state == "failed_user" and row.kind != "optim_step"):
            return
        if row.kind == "save_weights_for_sampler":
            await self._snapshots.retake(model, row.seq, engine)
            return
        request = Request.read(row.id, row.kind, row.seq, row.content_type, row.body, row.drawn)
        if row.kind in PASSES and request.of(PassRequest).loss == WITHDRAWN:
            raise _not_repeatable(model, row.seq)
        try:
            if row.kind == "create_model":
                await create_adapter(engine, model, request)
            elif row.kind in PASSES:
                began = time.monotonic()
                passed = await run_pass(engine, model, request)
                took_s = time.monotonic() - began
                self._metrics.passed(model.id, request.of(PassRequest), passed, took_s)
            else:
                await engine.optim_step(model.id, adam_of(request))
                self._metrics.forget_passes(model.id)
            model.placement.gradient = row.kind in PASSES
        except UserError:
            if row.state == "done":
                raise

    # Restore points

    async def consider_point(self, model: Model, seq: int, *, is_due: bool = False) -> None:
        """Take a restore point if it is due anyway, or if bringing the adapter back would take
        long, and far longer than the point takes. One that fails leaves the older one.
        """
        placement, began = model.placement, time.monotonic()
        if placement.point == seq:  # a load has written it
            return
        due_s = max(self._replay_s, POINT_SHARE * placement.point_s) if self._replay_s else 0.0
        is_due = is_due or placement.work_s >= due_s
        if not is_due or placement.gradient or (engine := placement.engine) is None:
            return
        try:
            async with placement.lock:
                await self.write_point(model, engine, seq)
            await self.point_written(model, seq)
            placement.point_s = time.monotonic() - began
        except HalteresError as error:
            log.warning("No restore point of %s after request %d: %s", model.id, seq, error)

    async def write_point(self, model: Model, engine: Trains, seq: int) -> None:
        """The folder of a restore point: adapter and optimiser as they are after the request of
        this number. Unnamed weights published before it cannot be replayed, so they are kept.
        """
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
            await asyncio.to_thread(
                shutil.rmtree, self._points / model.id.replace(":", "_"), ignore_errors=True
            )

    # Leaving the engine

    async def unload(self, model: Model) -> None:
        """Let an idle adapter leave the engine; it is brought back when it is asked for."""
        if not model.queue.idle:
            return
        async with model.placement.lock:
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

        async def leave(idle: Model) -> None:
            try:
                with boundary(ServerError, "The adapter's removal"):
                    await self.unload(idle)
            except HalteresError as error:
                log.warning("The adapter of %s stays in the engine: %s", idle.id, error)

        if not known:
            idle = self._budget.evict(
                self._held, lambda one: one.queue.idle and one is not model, trained=True
            )
            for one in idle:
                self._tasks.create_task(leave(one), name="adapter leaves")

    async def bring_back(self, model: Model, engine: Trains) -> None:
        """Bring an adapter back, and with it the unnamed weights that were published from it."""
        async with model.placement.lock:
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


def _not_repeatable(model: Model, seq: int) -> AdapterLost:
    return AdapterLost(
        f"The adapter of training run {model.id} cannot be brought back.",
        f"Its request {seq}, after its last restore point, is a pass with a custom loss that an "
        "earlier version of Halteres computed in the service; this version cannot take it again.",
        "Start the version that served this state directory before, and save a checkpoint with it "
        "(save_state); or leave this training run, which holds up no other, and resume from an "
        "older checkpoint: create_training_client_from_state_with_optimizer(path).",
    )
