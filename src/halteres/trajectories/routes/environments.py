"""The environments' routes.

Owns: their bodies and the shapes of their replies.
Never: decides.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from halteres.trajectories import posted_group
from halteres.trajectories.intake.posted import Verdict
from halteres.trajectories.records import Place
from halteres.trajectories.routes.reach import CLIENT, Reach, body_of, is_ours, reach, service_of
from halteres.trajectories.wire.answers import (
    Buffered,
    EnvRegistered,
    EnvWaits,
    Failed,
    ListReceived,
    Received,
    SetAside,
    Succeeded,
)
from halteres.trajectories.wire.encoding import reply
from halteres.trajectories.wire.schema import EnvReference, EnvRegistration, PostHeaders, convert, refusal

KEY = "Idempotency-Key"

_KEY, _CLIENT = KEY.lower().encode(), CLIENT.encode()
_QUEUED = Verdict(place=Place.QUEUED)
_RECEIVED = reply(Received(status="received"))
"""What is answered to nearly every group; a response may be sent again."""


async def register_env(request: Request) -> Response:
    """POST /register-env: an environment, as soon as a trainer has asked for a batch."""
    service = service_of(request)
    record = await service.register_env(await body_of(request, EnvRegistration))
    run = service.state.run
    if record is None or run.registration is None:
        return reply(EnvWaits())
    return reply(
        EnvRegistered(
            env_id=record.id,
            wandb_name=record.name,
            checkpoint_dir=run.registration.checkpoint_dir,
            starting_step=run.step,
            checkpoint_interval=run.registration.save_checkpoint_interval,
            num_steps=run.registration.num_steps,
        )
    )


async def disconnect_env(request: Request) -> Response:
    """POST /disconnect-env: an environment ends; failures are 200 too."""
    env_id = (await body_of(request, EnvReference)).env_id
    known = await service_of(request).disconnect_env(env_id)
    return reply(Succeeded() if known else Failed(error=f"There is no environment {env_id}."))


async def status_env(request: Request) -> Response:
    """GET /status-env: the run's step, and what waits, for one environment; which one, a JSON body says."""
    asked = await body_of(request, EnvReference)
    answer = await service_of(request).status_env(asked.env_id, ours=is_ours(request), asked_for=asked.asked_for)
    return reply(answer)


class ScoredData:
    """POST /scored_data: one group."""

    # An ASGI app: a `Request` would cost as much as the decision.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        here: Reach = scope["app"].state.reach
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of two, the first
        key = _key_of(headers[_KEY]) if _KEY in headers else None
        async with here.bodies.of(scope, receive) as body:
            group = await posted_group.read(body, key)
            (verdict,) = await here.service.accept([group], ours=_CLIENT in headers)
        answer = _RECEIVED if verdict == _QUEUED else reply(_received(verdict))
        await answer(scope, receive, send)


async def scored_data_list(request: Request) -> Response:
    """POST /scored_data_list: all groups, or none if one does not fit the schema; at most 16,384."""
    if KEY in request.headers:
        raise refusal(msgspec.ValidationError("A list has none: give each group its own, halteres_key."), "header", KEY)
    async with reach(request).bodies.of(request.scope, request.receive) as body:
        groups = await posted_group.read_list(body)
        verdicts = await service_of(request).accept(groups, ours=is_ours(request))
    buffered = [verdict for verdict in verdicts if verdict.place is Place.BUFFERED]
    return reply(
        ListReceived(
            status="received",
            groups_processed=len(verdicts),
            buffered=len(buffered) or UNSET,
            last_buffer_size=buffered[-1].buffered if buffered else UNSET,
            set_aside=[verdict.problem.why for verdict in verdicts if verdict.problem] or UNSET,
        )
    )


def _key_of(value: bytes) -> str | None:
    return convert({KEY: value.decode("latin-1")}, PostHeaders, "header").key


def _received(verdict: Verdict) -> Received | Buffered:
    if verdict.place is Place.BUFFERED:
        return Buffered(buffer_size=verdict.buffered)
    problem = verdict.problem
    return Received(status="received", set_aside=SetAside(problem.code, problem.why) if problem else UNSET)
