"""What a training request asks of the engine.

Owns: the translation of requests that change an adapter into engine calls, the same when a request is executed and when
it is executed again to bring an adapter back.
Never: decides when, names files, answers a client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from halteres.engine.protocol import Adam, LoraConfig, LossSpec, PassResult, StepResult, Trains
from halteres.errors import InvalidData, UserError
from halteres.service.training.custom_losses import CustomLosses
from halteres.service.training.models import Model
from halteres.service.wire.bodies import CreateModel, OptimStep
from halteres.service.wire.training import PassRequest, Request

ADAM = ("adamw", "adam")
"""The optimiser's names; both mean decoupled decay."""


async def create(engine: Trains, model: Model, request: Request) -> LoraConfig:
    """Make the adapter that a create_model asks for; returns its shape, with the seed drawn for it."""
    asked = request.asked
    assert isinstance(asked, CreateModel)  # noqa: S101 - for the type checker
    check_optimizer(asked.optimizer_config.type)
    fields: dict[str, Any] = {**msgspec.structs.asdict(asked.lora_config), **request.drawn}
    lora = LoraConfig(**fields)
    await engine.create_adapter(model.id, lora)
    return lora


def check_optimizer(kind: str) -> None:
    """Raise UserError for an optimiser that is not here."""
    if kind not in ADAM:
        raise _other_optimizer(kind)


async def run_pass(engine: Trains, model: Model, request: Request, losses: CustomLosses) -> PassResult:
    """A forward-backward or forward pass."""
    asked = request.asked
    assert isinstance(asked, PassRequest)  # noqa: S101 - for the type checker
    if asked.flaw is not None:
        raise asked.flaw
    custom = losses.find(model.session_id, asked.loss_id) if asked.loss == "custom" else None
    loss = LossSpec(name=asked.loss, config=dict(asked.config), custom=custom)
    return await engine.forward_backward(model.id, asked.data, loss, asked.forward_only)


async def step(engine: Trains, model: Model, request: Request) -> StepResult:
    """One step of the optimiser."""
    asked = request.asked
    assert isinstance(asked, OptimStep)  # noqa: S101 - for the type checker
    return await engine.optim_step(model.id, _adam(asked))


def _adam(asked: OptimStep) -> Adam:
    params = asked.adam_params
    if asked.optimizer_params is not None:
        kind = asked.optimizer_params.get("type")
        if kind not in ADAM:
            raise _other_optimizer(str(kind))
        raise InvalidData("optimizer_params are for other optimisers.", next="Send adam_params.")
    fields = msgspec.structs.asdict(params) if params else {}
    for name, value in fields.items():
        if value is None:
            why = "It came as null, which is what JSON makes of NaN and infinity."
            raise InvalidData(f"{name} is no number.", why, "Send a finite number, or leave the field out.")
    return Adam(**fields)


def _other_optimizer(kind: str) -> UserError:
    why = "Its constants are not public." if kind == "dimuon" else "This service trains with AdamW."
    return UserError(f"There is no optimiser '{kind}' here.", why, "Leave optimizer_config out and send AdamParams.")
