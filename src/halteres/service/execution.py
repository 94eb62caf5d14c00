"""Training requests, executed: what each of them asks of the engine, and the result its future gets.

Exports are files for others, which only their recipients can read where that is asked for (age-encryption.org/v1, by
the library pyrage, the extra `age`).
"""

from __future__ import annotations

import asyncio
import importlib
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import Saved, Trains
from halteres.errors import InvalidData, ServerError, UserError, boundary
from halteres.losses import STABLE_REINFORCE
from halteres.service.adapters import Adapters, CustomLosses, check_optimizer, create_adapter, run_pass, step
from halteres.service.base import BaseModel
from halteres.service.checkpoints.paths import Kind, TinkerPath, refuse_token
from halteres.service.checkpoints.peft_folders import FILES, copy_for_tinker
from halteres.service.checkpoints.store import Checkpoints
from halteres.service.durable.futures import Outcome, binary_result, result
from halteres.service.durable.journal import Journal
from halteres.service.sampling.samplers import Samplers
from halteres.service.sampling.snapshots import Snapshot, Snapshots
from halteres.service.sessions import Sessions
from halteres.service.training_runs import Job, Model, record
from halteres.service.wire.bodies import LoadWeights, SaveWeights
from halteres.service.wire.results import write_pass
from halteres.service.wire.training import PassRequest, Request

MAX_RECIPIENTS = 10

SUFFIX = ".age"

MAX_SHOWN = 24  # characters of a recipient that a message repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training calls of the Tinker API over one engine."""

    journal: Journal
    adapters: Adapters
    checkpoints: Checkpoints
    sessions: Sessions
    samplers: Samplers
    snapshots: Snapshots
    losses: CustomLosses
    base: BaseModel
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
        return await methods[job.request.kind](job.model, job.request)

    async def afterwards(self, job: Job) -> None:
        """A restore point, if one is due."""
        outcome = job.future.outcome
        if outcome is not None and outcome.state == "done":
            await self.adapters.consider_point(job.model, job.request.seq)

    async def _create(self, model: Model, request: Request) -> Outcome:
        await self.adapters.run(model, lambda engine: create_adapter(engine, model, request), made_here=True)
        await record(self.journal, model)
        return result({"type": "create_model", "model_id": model.id})

    async def _load(self, model: Model, request: Request) -> Outcome:
        """Make or replace the adapter from saved state; the restore point is part of it, for what lies at the path may
        change."""
        body = request.of(LoadWeights)
        refuse_token(body.weights_access_token)
        if not body.optimizer:  # a saved optimiser is restored whatever is asked for
            check_optimizer(body.optimizer_config.type)
        found = self.checkpoints.find(body.path, model.tenant)

        async def load(engine: Trains) -> None:
            await engine.load(model.id, str(found.folder), body.optimizer)
            await self.adapters.write_point(model, engine, request.seq)

        await self.adapters.run(model, load, made_here=True)
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
        passed = await self.adapters.run(model, lambda engine: run_pass(engine, model, request, self.losses))
        model.placement.gradient = model.placement.gradient or request.kind == "forward_backward"
        return binary_result(write_pass(passed))

    async def _step(self, model: Model, request: Request) -> Outcome:
        stepped = await self.adapters.run(model, lambda engine: step(engine, model, request))
        model.placement.gradient = False
        finite = {name: value for name, value in stepped.metrics.items() if math.isfinite(value)}  # JSON has no others
        return result({"type": "optim_step", "metrics": {**finite, "policy_version:max": float(stepped.version)}})

    async def _save(self, model: Model, request: Request) -> Outcome:
        """State to go on from: adapter, optimiser, step."""
        path = self._place(model, request, "weights")
        if self.checkpoints.outcome_of(request.id, model.tenant) is None:
            folder = str(self.checkpoints.waiting_folder(path, request.id))
            saved = await self.adapters.run(model, lambda engine: engine.save(model.id, folder, True))
            await self._add(path, saved, model, request, overwrite=request.of(SaveWeights).overwrite)
        return result({"type": "save_weights", "path": str(path)})

    async def _publish(self, model: Model, request: Request) -> Outcome:
        """Immutable weights to sample from, on disk if they are named."""
        body, session = request.of(SaveWeights), self.sessions.of_model(model.session_id)
        if body.kind not in ("snapshot", "inflight"):
            raise UserError(f"There are no sampler weights of kind '{body.kind}'.", next="Use snapshot or inflight.")
        if body.path is None:
            if body.sampling_session_seq_id is None:
                raise InvalidData("The sampler weights have no name and no sampling session.", next="Send path.")
            snapshot = await self.adapters.run(model, lambda engine: self.snapshots.publish(engine, model, request.seq))
            sampler = await self.samplers.add_unnamed(
                session, body.sampling_session_seq_id, snapshot, inflight=body.kind == "inflight"
            )
            self.samplers.published(session, snapshot)
            return result({"type": "save_weights_for_sampler", "sampling_session_id": sampler.id, "path": None})
        path = self._place(model, request, "sampler_weights")
        if self.checkpoints.outcome_of(request.id, model.tenant) is None:
            folder = str(self.checkpoints.waiting_folder(path, request.id))

            async def publish(engine: Trains) -> tuple[Snapshot, Saved]:
                snapshot = await self.snapshots.publish(engine, model, request.seq)
                return snapshot, await engine.save_snapshot(snapshot.name, folder)

            snapshot, saved = await self.adapters.run(model, publish)
            await self._add(path, saved, model, request)
            self.snapshots.name(snapshot, str(path), self.checkpoints.folder(path), saved.sha256)
            self.samplers.published(session, snapshot)
        return result({"type": "save_weights_for_sampler", "path": str(path)})

    async def _add(
        self, path: TinkerPath, saved: Saved, model: Model, request: Request, *, overwrite: bool = False
    ) -> None:
        """Put new weights in their place. Older ones keep a numbered name, and whoever samples from them follows them
        there; those that are overwritten live on with whoever samples from them."""
        try:
            if overwrite:
                await self.snapshots.detach(str(path))
                self.snapshots.forget(str(path))  # whoever asked meanwhile means the new ones
            elif (kept := await self.checkpoints.keep(path, model.tenant)) is not None:
                await self.samplers.rename(str(path), str(kept.path))
                await self.snapshots.rename(str(path), kept)
            await self.checkpoints.add(path, saved, **_facts(model, request))
        finally:
            await asyncio.to_thread(shutil.rmtree, saved.folder, ignore_errors=True)  # unless it has its place

    async def _export(self, model: Model, request: Request) -> Outcome:
        """Files for others: a PEFT folder, encrypted where that is asked for."""
        path, keys = self._place(model, request, "external_weights"), request.of(SaveWeights).age_encryption_recipients
        folder, encrypt = self.checkpoints.folder(path), None if keys is None else encryption_to(keys)
        saved = await self.adapters.run(
            model, lambda engine: write_export(engine, model.id, folder, self.base.folder, encrypt)
        )
        await self.checkpoints.add(path, saved, **_facts(model, request))
        return result({"type": "save_weights_external", "path": str(path), "size_bytes": saved.size_bytes})

    def _place(self, model: Model, request: Request, kind: Kind) -> TinkerPath:
        """Where a save goes; raises what `Checkpoints.place` raises."""
        body = request.of(SaveWeights)
        return self.checkpoints.place(
            model.id,
            kind,
            body.path,
            overwrite=body.overwrite and kind == "weights",
            ttl_s=body.ttl_seconds,
            tenant=model.tenant,
            request_id=request.id,
        )


def _facts(model: Model, request: Request) -> dict[str, Any]:
    body = request.of(SaveWeights)
    return {
        "tenant": model.tenant,
        "base_model": model.base_model,
        "lora": model.lora,
        "ttl_s": body.ttl_seconds,
        "user_metadata": body.user_metadata,
        "request_id": request.id,
    }


Encrypt = Callable[[Path, Path], None]


def encryption_to(keys: Sequence[str]) -> Encrypt:
    """What writes a second file that nobody but the recipients can read: native `age1…` keys (X25519) or SSH public
    keys."""
    if not 1 <= len(keys) <= MAX_RECIPIENTS:
        raise InvalidData(
            f"An export cannot be encrypted to {len(keys)} recipients.",
            f"It has 1 to {MAX_RECIPIENTS}.",
            "Leave age_encryption_recipients out for plain files.",
        )
    try:
        pyrage: Any = importlib.import_module("pyrage")
    except ImportError as error:
        raise UserError(
            "This service cannot encrypt an export.",
            "The package pyrage is not installed beside it.",
            "Run `pip install 'halteres[age]'` there, or leave age_encryption_recipients out.",
        ) from error
    recipients: list[Any] = []
    for key in map(str.strip, keys):
        kind = pyrage.x25519.Recipient if key.startswith("age1") else pyrage.ssh.Recipient
        try:
            recipients.append(kind.from_str(key))
        except pyrage.RecipientError as error:
            raise InvalidData(
                f"'{key[:MAX_SHOWN]}' is no age recipient.",
                f"{error}.",
                "Send a public key: one that begins with age1 (age-keygen prints it), or an SSH public key.",
            ) from error

    def encrypt(source: Path, target: Path) -> None:
        with boundary(ServerError, "pyrage.encrypt_file"):
            pyrage.encrypt_file(str(source), str(target), recipients)

    return encrypt


async def write_export(engine: Trains, model_id: str, folder: Path, base: Path, encrypt: Encrypt | None) -> Saved:
    """A training run's weights as files for others, as the base model in `base` needs them."""

    def fill(plain: Path, place: Path) -> None:
        if encrypt is None:
            copy_for_tinker(plain, place, base)
            return
        with tempfile.TemporaryDirectory(dir=plain.parent) as named:
            copy_for_tinker(plain, Path(named), base)
            for name in FILES:
                encrypt(Path(named) / name, place / f"{name}{SUFFIX}")

    with written(folder) as place, tempfile.TemporaryDirectory(dir=place) as work:
        plain = Path(work) / "plain"
        saved = await engine.save(model_id, str(plain), False)
        await asyncio.to_thread(fill, plain, place)
    return Saved(folder=str(folder), size_bytes=await asyncio.to_thread(size_of, folder), version=saved.version)
