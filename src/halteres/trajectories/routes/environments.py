"""The environments' routes.

Owns: their bodies and the shapes of their replies.
Never: decides.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import NotFound, as_atropos
from halteres.trajectories.intake.intake import Verdict
from halteres.trajectories.records import Place
from halteres.trajectories.routes.reach import service_of
from halteres.trajectories.wire import scored
from halteres.trajectories.wire.encoding import LARGE, read_body, reply
from halteres.trajectories.wire.schema import EnvReference, EnvRegistration, decode


async def register_env(request: Request) -> Response:
    """POST /register-env"""
    service = service_of(request)
    record = await service.register_env(decode(await read_body(request), EnvRegistration))
    run = service.state.run
    if record is None or run.registration is None:
        return reply({"status": "wait for trainer to start"})
    return reply(
        {
            "status": "success",
            "env_id": record.id,
            "wandb_name": record.name,
            "checkpoint_dir": run.registration.checkpoint_dir,
            "starting_step": run.step,
            "checkpoint_interval": run.registration.save_checkpoint_interval,
            "num_steps": run.registration.num_steps,
        }
    )


async def disconnect_env(request: Request) -> Response:
    """POST /disconnect-env: failures are 200 too."""
    env_id = decode(await read_body(request), EnvReference).env_id
    if await service_of(request).disconnect_env(env_id):
        return reply({"status": "success"})
    return reply(as_atropos(NotFound(f"There is no environment {env_id}.")))


async def scored_data(request: Request) -> Response:
    """POST /scored_data"""
    body = await read_body(request)
    key = request.headers.get("idempotency-key")
    group = await asyncio.to_thread(scored.parse, body, key) if len(body) > LARGE else scored.parse(body, key)
    (verdict,) = await service_of(request).accept([group])
    return reply(_received(verdict))


async def scored_data_list(request: Request) -> Response:
    """POST /scored_data_list: all groups, or none if one does not fit the schema."""
    groups = await asyncio.to_thread(scored.parse_list, await read_body(request))
    verdicts = await service_of(request).accept(groups)
    buffered = [verdict for verdict in verdicts if verdict.place is Place.BUFFERED]
    aside = [verdict.problem.why for verdict in verdicts if verdict.problem]
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(verdicts)}
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1].buffered}
    return reply(answer | ({"set_aside": aside} if aside else {}))


def _received(verdict: Verdict) -> dict[str, Any]:
    if verdict.place is Place.BUFFERED:
        return {"status": "buffered", "buffer_size": verdict.buffered}
    problem = verdict.problem
    return {"status": "received"} | ({"set_aside": {"code": problem.code, "why": problem.why}} if problem else {})


async def status_env(request: Request) -> Response:
    """GET /status-env, with a JSON body."""
    env_id = decode(await read_body(request), EnvReference).env_id
    return reply(await service_of(request).status_env(env_id))
