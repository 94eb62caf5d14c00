"""Connecting: client flags, health, capabilities, sessions, telemetry, keys.

Source: tinker SDK 0.38.0, lib/internal_client_holder.py and resources/service.py; cli/auth_api.py for keys, and
lib/_jwt_auth.py for the token, which is asked for only where `pjwt_auth_enabled` is on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import halteres
from halteres.errors import UserError
from halteres.service.answers import answer, body_of
from halteres.service.fleet import Host, running
from halteres.service.routes.middleware import presented
from halteres.service.service import Service
from halteres.service.tenancy.keys import Key, KeyFile
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.codec import PROMPT_BYTES

CLIENT_FLAGS = {
    "pjwt_auth_enabled": False,  # the plain key goes on every request
    "parallel_fwdbwd_chunks": True,  # queues put the chunks in order; one after another they would wait for the network
    "proto_compress_fwdbwd": False,  # on one machine compressing costs more than it saves
    # It doubles the time of a sample (3.5 to 7 ms; 512 at once gain nothing), and SDK 0.38.0 may hang in
    # ServiceClient.close(): its poller loses a cancellation that comes in the middle of a poll.
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,  # the number that a copy draws by itself is as good, and costs no request
    "custom_loss_server_side": True,  # one pass instead of two, and no torch needed by the client
}
"""What steers a client for its life; everything else keeps the SDK's defaults. Older SDKs know fewer of them."""

DYNAMIC_FLAGS = {"sample_cancel_enabled": True}  # what nobody waits for makes room at once
"""What a client asks for again and again."""

REFRESH_S = 300
"""Between two of those questions."""

_TEMPERATURES = {"raw": "temperature 1, whatever they were drawn at", "tempered": "the temperature they were drawn at"}


class ConnectionRoutes:
    """What a client calls before and beside its work."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = KeyFile(service.state)

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/session_heartbeat", self.heartbeat, methods=["POST"]),
            Route("/api/v1/telemetry", self.telemetry, methods=["POST"]),
            Route("/api/v1/healthz", self.health),
            Route("/api/v1/client/config", self.client_config, methods=["POST"]),
            Route("/api/v1/client/dynamic_config", self.dynamic_config, methods=["POST"]),
            Route("/api/v1/get_server_capabilities", self.capabilities),
            Route("/api/v1/create_session", self.create_session, methods=["POST"]),
            Route("/api/v1/sessions/{session_id}/finish", self.finish, methods=["POST"]),
            Route("/halteres/v1/info", self.info),
            Route("/api/v1/auth/token", self.token, methods=["POST"]),
            Route("/api/v1/auth/apikey/me", self.key),
            Route("/api/v1/auth/apikey/me", self.revoke, methods=["DELETE"]),
        ]

    async def token(self, _: Request) -> Response:
        """POST auth/token: refused."""
        raise UserError(
            "This service gives no tokens.",
            "Keys are sent plainly with each request: client/config says pjwt_auth_enabled=false.",
            "Set TINKER_API_KEY to a key; on the service's own machine any text that begins with tml- will do.",
        )

    async def key(self, request: Request) -> Response:
        """GET auth/apikey/me: whose the key of this request is."""
        found, tenant = await self._found(request), tenant_of(request)
        details = {"org_details": {"name": tenant}, "user_details": {"email": f"{tenant}@localhost"}}
        return answer(
            {
                "key_id": int(found.id, 16) if found else 0,
                "name": found.name if found else tenant,
                "note": found.note if found else "This service asks for no key.",
                "details": details,
            }
        )

    async def revoke(self, request: Request) -> Response:
        """DELETE auth/apikey/me: the key of this request is good no more."""
        if (found := await self._found(request)) is not None:
            await asyncio.to_thread(self._keys.revoke, found.id)
        return Response(status_code=204)

    async def _found(self, request: Request) -> Key | None:
        """The key of a request that the guard let pass; None where no key is asked for."""
        key_id, tenant = (presented(request.headers) or "").split("-")[1:2], tenant_of(request)
        known = await asyncio.to_thread(self._keys.read)
        return next((key for key in known if [key.id] == key_id and key.tenant == tenant), None)

    async def client_config(self, _: Request) -> Response:
        """POST client/config."""
        return answer(self._chosen(CLIENT_FLAGS))

    async def dynamic_config(self, _: Request) -> Response:
        """POST client/dynamic_config."""
        return answer({"refresh_interval_sec": REFRESH_S, **self._chosen(DYNAMIC_FLAGS)})

    def _chosen(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """The flags, as this service's options have them."""
        return {name: self._service.options.client_flags.get(name, value) for name, value in flags.items()}

    async def health(self, _: Request) -> Response:
        """GET healthz: 200 once trainer and a sampler have answered `info`, which a host asks before it calls its
        engine ready, and as long as the journal can be written."""
        if away := self._service.fleet.trouble:
            return answer({"detail": away}, 503)
        if (trouble := self._service.journal.trouble) is not None:
            return answer({"detail": trouble.sentence}, 503)
        return answer({"status": "ok", "model": self._service.base.name, "version": halteres.__version__})

    async def capabilities(self, _: Request) -> Response:
        """GET get_server_capabilities."""
        fleet = self._service.fleet
        trainer = await (await running(fleet.trainer)).info()
        sampler = await (await running(fleet.pick(None, b""))).info()
        facts = {
            "max_context_length": min(trainer.max_context_length, sampler.max_context_length),
            "trainable": trainer.trains,
            "sampleable": sampler.samples,
        }
        return answer({"supported_models": [{"model_name": name, **facts} for name in self._service.base.names]})

    async def create_session(self, request: Request) -> Response:
        """POST create_session."""
        asked = bodies.read(await body_of(request), bodies.CreateSession)
        self._service.refuse_session(tenant_of(request))
        session = await self._service.sessions.create(
            tenant_of(request), asked.user_metadata, asked.tags, asked.project_id, asked.display_name
        )
        return answer({"type": "create_session", "session_id": session.id, "info_message": self._info_message()})

    def _info_message(self) -> str:
        base = self._service.base
        return (
            f"Halteres {halteres.__version__} serves '{base.name}'; its tokenizer is in {base.folder}. Set"
            " HF_HUB_OFFLINE=1 to work without network, and name the base model by that folder if a SamplingClient is"
            " asked for its tokenizer. Log-probabilities of sampled tokens are those at"
            f" {_TEMPERATURES[self._service.samples.logprobs]}."
        )

    async def heartbeat(self, request: Request) -> Response:
        """POST session_heartbeat; 410 ends the client's loop."""
        asked = bodies.read(await body_of(request), bodies.Heartbeat)
        session = self._service.sessions.find(asked.session_id, tenant_of(request))
        if session.finished is not None:
            return answer({"detail": f"The session has finished: {session.finished}."}, 410)
        return answer({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        """POST sessions/{id}/finish: the session's adapters leave the engine."""
        asked = bodies.read(await body_of(request), bodies.Finish)
        session = self._service.sessions.find(request.path_params["session_id"], tenant_of(request))
        self._service.sessions.finish(session, asked.reason.type)
        await self._service.reaper.retire(session)
        return Response(status_code=204)

    async def telemetry(self, request: Request) -> Response:
        """POST telemetry: accepted, and not kept."""
        await body_of(request, PROMPT_BYTES)
        return answer({"status": "accepted"})

    async def info(self, request: Request) -> Response:
        """GET /halteres/v1/info."""
        fleet = self._service.fleet
        model = await (await running(fleet.trainer)).info()
        return answer(
            {
                "model": msgspec.to_builtins(model),
                "engine": _facts_of(fleet.trainer),  # the one that trains
                "samplers": [_facts_of(host) for host in fleet.samplers],
                "version": halteres.__version__,
                "policies": self._service.samplers.versions(tenant_of(request)),
            }
        )


def _facts_of(host: Host[Any]) -> dict[str, Any]:
    return {"state": host.state, "pid": host.pid, "restarts": host.restarts}
