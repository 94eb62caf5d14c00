"""Training requests, executed: what each of them asks of the engine, and the result its promise gets.

Owns: the translation between the Tinker API's training calls and the engine's; naming and recording what was saved.
Never: decides when (a model's lane does), parses bodies.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from halteres.engine.protocol import Adam, Engine, LoraConfig
from halteres.errors import InvalidData, UserError
from halteres.service.checkpoints import Checkpoints
from halteres.service.host import Host, survived
from halteres.service.models import Model, Models
from halteres.service.promises import Outcome, binary_result, result
from halteres.service.samplers import Samplers
from halteres.service.sessions import Sessions
from halteres.service.snapshots import Snapshots
from halteres.service.wire.bodies import LoadWeights, OptimStep, SaveWeights
from halteres.service.wire.codec import PassRequest, write_pass


class Training:
    """The training calls of the Tinker API over one engine."""

    def __init__(
        self,
        *,
        host: Host,
        models: Models,
        checkpoints: Checkpoints,
        sessions: Sessions,
        samplers: Samplers,
        snapshots: Snapshots,
    ) -> None:
        self._host, self._models, self._checkpoints = host, models, checkpoints
        self._sessions, self._samplers, self._snapshots = sessions, samplers, snapshots

    async def create(self, model: Model, lora: LoraConfig) -> Outcome:
        """A new adapter."""

        async def call(engine: Engine) -> None:
            await engine.create_adapter(model.id, lora)
            model.home, model.lora = engine, lora

        await survived(self._host, call)
        await self._models.record(model)
        return result({"type": "create_model", "model_id": model.id})

    async def load(self, model: Model, asked: LoadWeights) -> Outcome:
        """Make or replace the adapter from saved state."""
        checkpoint = self._checkpoints.find(asked.path)

        async def call(engine: Engine) -> None:
            await engine.load(model.id, str(checkpoint.folder), asked.optimizer)
            model.home, model.lora, model.retired = engine, checkpoint.lora, False

        await survived(self._host, call)
        await self._models.record(model)
        return result({"type": "load_weights", "path": asked.path, "model_id": model.id})

    async def forward_backward(self, model: Model, asked: PassRequest) -> Outcome:
        """A pass; its gradient is added to the model's, unless it is a forward pass alone."""
        if asked.flaw is not None:
            raise asked.flaw
        with self._models.at_home(model) as engine:
            passed = await engine.forward_backward(model.id, asked.data, asked.loss, asked.forward_only)
        return binary_result(write_pass(passed))

    async def optim_step(self, model: Model, asked: OptimStep) -> Outcome:
        """One step of Adam."""
        adam = _adam(asked)
        with self._models.at_home(model) as engine:
            stepped = await engine.optim_step(model.id, adam)
        finite = {name: value for name, value in stepped.metrics.items() if math.isfinite(value)}  # JSON has no others
        return result({"type": "optim_step", "metrics": {**finite, "policy_version:max": float(stepped.version)}})

    async def save(self, model: Model, asked: SaveWeights) -> Outcome:
        """State to go on from: adapter, optimiser, step."""
        path = self._checkpoints.place(model.id, "weights", asked.path, overwrite=asked.overwrite)
        self._snapshots.forget(str(path))  # from here on the folder may hold other weights than its snapshot
        with self._models.at_home(model) as engine:
            saved = await engine.save(model.id, str(self._checkpoints.folder(path)), True)
        self._snapshots.forget(str(path))  # whoever asked meanwhile may have loaded the old ones
        await self._checkpoints.add(path, saved, **_facts(model, asked))
        return result({"type": "save_weights", "path": str(path)})

    async def publish(self, model: Model, asked: SaveWeights) -> Outcome:
        """Immutable weights to sample from, on disk if they are named."""
        if asked.kind != "snapshot":
            raise UserError(f"Sampler weights of kind '{asked.kind}' come later.", next="Save with kind='snapshot'.")
        if asked.path is None:
            return await self._publish_ephemeral(model, asked.sampling_session_seq_id)
        path = self._checkpoints.place(model.id, "sampler_weights", asked.path)
        folder = self._checkpoints.folder(path)
        with self._models.at_home(model) as engine:
            snapshot = await self._snapshots.publish(engine, model.id, model.base_model)
            saved = await engine.save_snapshot(snapshot.name, str(folder))
        await self._checkpoints.add(path, saved, **_facts(model, asked))
        self._snapshots.name(snapshot, str(path), folder)
        self._samplers.published(self._sessions.find(model.session_id), snapshot)
        return result({"type": "save_weights_for_sampler", "path": str(path)})

    async def _publish_ephemeral(self, model: Model, seq: int | None) -> Outcome:
        if seq is None:
            raise InvalidData("The sampler weights have no name and no sampling session.", next="Send path.")
        with self._models.at_home(model) as engine:
            snapshot = await self._snapshots.publish(engine, model.id, model.base_model)
        sampler = await self._samplers.add_ephemeral(model.session_id, seq, snapshot)
        self._samplers.published(self._sessions.find(model.session_id), snapshot)
        return result({"type": "save_weights_for_sampler", "sampling_session_id": sampler.id, "path": None})

    async def save_external(self, model: Model, asked: SaveWeights) -> Outcome:
        """Refused in its turn, so that its sequence number is used up."""
        raise UserError(
            f"The export '{asked.path}' of training run {model.id} comes later.",
            "Saved state is a PEFT folder already.",
            "Use save_state(name) and read the folder in the service's state directory.",
        )


def _adam(asked: OptimStep) -> Adam:
    if asked.optimizer_params is not None:
        kind = asked.optimizer_params.get("type")
        raise InvalidData(f"There are no '{kind}' steps here.", "This service trains with Adam.", "Send AdamParams.")
    fields = msgspec.structs.asdict(asked.adam_params) if asked.adam_params else {}
    for name, value in fields.items():
        if value < 0 or not math.isfinite(value):
            raise InvalidData(f"{name} is {value}.", "It must be a finite number of at least 0.")
    return Adam(**fields)


def _facts(model: Model, asked: SaveWeights) -> dict[str, Any]:
    return {
        "base_model": model.base_model,
        "lora": model.lora,
        "ttl_s": asked.ttl_seconds,
        "user_metadata": asked.user_metadata,
    }
