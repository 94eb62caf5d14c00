"""Sessions and training runs: how a client connects, what it may ask about itself, and what exists.

Source: tinker SDK 0.38.0, lib/internal_client_holder.py and resources/service.py; cli/auth_api.py
for keys, and lib/_jwt_auth.py for the token, which is asked for only where `pjwt_auth_enabled` is
on; for what exists, lib/public_interfaces/rest_client.py and admin_client.py,
types/session_search_request.py, session_summary.py and session_status.py. `access_scope` changes
nothing: a tenant has access to what it owns.
"""

from __future__ import annotations

import asyncio
import datetime
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

import halteres
from halteres.errors import UserError
from halteres.process import steady_time
from halteres.service.fleet import info_of
from halteres.service.http import (
    HEALTH,
    answer,
    body_of,
    page_of,
    presented,
    read_body,
    route,
    tenant_of,
    texts,
    timestamp,
)
from halteres.service.keys import Key, KeyFile, Tenant
from halteres.service.routes.checkpoints import RUN, described
from halteres.service.service import Service
from halteres.service.training_runs import Model, Session
from halteres.service.wire import bodies
from halteres.service.wire.bodies import PROMPT_BYTES

CLIENT_FLAGS = {
    "pjwt_auth_enabled": False,  # the plain key goes on every request
    # queues put the chunks in order; one after another they would wait for the network
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,  # on one machine compressing costs more than it saves
    # There is no /api/v1/retrieve_futures: one poll of a whole sampling session doubled the time of
    # a sample (3.5 to 7 ms; 512 at once gained nothing), and SDK 0.38.0 may hang in
    # ServiceClient.close(): its poller loses a cancellation that comes in the middle of a poll.
    "sample_use_retrieve_futures": False,
    # the number that a copy draws by itself is as good, and costs no request
    "sample_join_sampling_session": False,
    # The SDK then computes a custom loss itself: a forward, and a cross_entropy whose weights are
    # its gradient.
    "custom_loss_server_side": False,
}
"""What steers a client for its life; everything else keeps the SDK's defaults. Older SDKs know
fewer of them.
"""

DYNAMIC_FLAGS = {"sample_cancel_enabled": True}  # what nobody waits for makes room at once
"""What a client asks for again and again."""

REFRESH_S = 300  # between two of those questions

_TEMPERATURES = {
    "raw": "temperature 1, whatever they were drawn at",
    "tempered": "the temperature they were drawn at",
}

NO_PROJECT = "default"  # the project of a session that names none: a summary must name one


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a session stands."""

    type: str
    reason: dict[str, str] | None = None


def _always(value: dict[str, Any]) -> Callable[[Request], Coroutine[Any, Any, dict[str, Any]]]:
    async def handler(_: Request) -> dict[str, Any]:
        return value

    return handler


class SessionRoutes:
    """What a client calls before and beside its work, a RestClient and an AdminClient."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._keys = KeyFile(service.state)

    def table(self) -> list[Route]:
        """The routes."""
        dynamic = {"refresh_interval_sec": REFRESH_S, **DYNAMIC_FLAGS}
        return [
            route("/api/v1/session_heartbeat", self._heartbeat, "POST"),
            route("/api/v1/telemetry", self._telemetry, "POST"),
            route(HEALTH, self._health),
            route("/api/v1/client/config", _always(CLIENT_FLAGS), "POST"),
            route("/api/v1/client/dynamic_config", _always(dynamic), "POST"),
            route("/api/v1/get_server_capabilities", self._capabilities),
            route("/api/v1/create_session", self._create_session, "POST"),
            route("/api/v1/sessions/{session_id}/finish", self._finish, "POST"),
            route("/halteres/v1/info", self._info),
            route("/api/v1/auth/token", self._token, "POST"),
            route("/api/v1/auth/apikey/me", self._key),
            route("/api/v1/auth/apikey/me", self._revoke, "DELETE"),
            route("/api/v1/training_runs", self._training_runs),
            route(RUN, self._training_run),
            route("/api/v1/sessions", self._sessions),
            route("/api/v1/sessions/{session_id}", self._session),
            route("/api/v1/audit", _always({"entries": []})),  # nothing is audited, nor billed
            route("/api/v1/billing/usage/events", _always({"data": [], "sessions": {}})),
            route("/api/v1/billing/usage/checkpoints/current", self._storage),
            route("/api/v1/sessions/{session_id}/trace_export", self._trace),
            route("/api/v1/sessions/search", self._search, "POST"),
            route("/api/v1/sessions/{session_id}/project", self._move, "PUT"),
        ]

    async def _token(self, _: Request) -> Any:
        raise UserError(
            "This service gives no tokens.",
            "Keys are sent plainly with each request: client/config says pjwt_auth_enabled=false.",
            "Set TINKER_API_KEY to a key; on the service's own machine any text that begins with "
            "tml- will do.",
        )

    async def _key(self, request: Request) -> Any:
        found, tenant = await self._key_of(request), tenant_of(request)
        details = {
            "org_details": {"name": tenant},
            "user_details": {"email": f"{tenant}@localhost"},
        }
        return {
            "key_id": int(found.id, 16) if found else 0,
            "name": found.name if found else tenant,
            "note": found.note if found else "This service asks for no key.",
            "details": details,
        }

    async def _revoke(self, request: Request) -> None:
        if (found := await self._key_of(request)) is not None:
            await asyncio.to_thread(self._keys.revoke, found.id)

    async def _key_of(self, request: Request) -> Key | None:
        """The key of a request that the guard let pass; None where no key is asked for."""
        key_id, tenant = (presented(request.headers) or "").split("-")[1:2], tenant_of(request)
        known = await asyncio.to_thread(self._keys.read)
        return next((key for key in known if [key.id] == key_id and key.tenant == tenant), None)

    async def _health(self, _: Request) -> Any:
        """200 once trainer and a sampler have answered `info`, which a host asks before it calls
        its engine ready, and as long as the journal can be written.
        """
        if away := self._service.fleet.trouble:
            return answer({"detail": away}, 503)
        if (trouble := self._service.journal.trouble) is not None:
            return answer({"detail": trouble.sentence}, 503)
        return {"status": "ok", "model": self._service.base.name, "version": halteres.__version__}

    async def _capabilities(self, _: Request) -> Any:
        fleet = self._service.fleet
        trainer = await info_of(fleet.trainer)
        sampler = await info_of(fleet.any_sampler)
        facts = {
            "max_context_length": min(trainer.max_context_length, await fleet.context()),
            "trainable": trainer.trains,
            "sampleable": sampler.samples,
        }
        return {
            "supported_models": [{"model_name": name, **facts} for name in self._service.base.names]
        }

    async def _create_session(self, request: Request) -> Any:
        body, tenant = await read_body(request, bodies.CreateSession), tenant_of(request)
        self._service.refuse_session(tenant)
        session = Session(
            tenant=tenant,
            tags=body.tags,
            user_metadata=body.user_metadata,
            project_id=body.project_id,
            display_name=body.display_name,
        )
        await self._service.sessions.add(session)
        base = self._service.base
        message = (
            f"Halteres {halteres.__version__} serves '{base.name}'; its tokenizer is in "
            f"{base.folder}. Set"
            " HF_HUB_OFFLINE=1 to work without network, and name the base model by that folder if "
            "a SamplingClient is"
            " asked for its tokenizer. Log-probabilities of sampled tokens are those at"
            f" {_TEMPERATURES[self._service.samples.logprobs]}."
        )
        return {"type": "create_session", "session_id": session.id, "info_message": message}

    async def _heartbeat(self, request: Request) -> Any:
        """410 ends the client's loop."""
        session_id = bodies.read_field(await body_of(request), "session_id")
        session = self._service.sessions.find(session_id, tenant_of(request))
        if session.finished is not None:
            return answer({"detail": f"The session has finished: {session.finished}."}, 410)
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> None:
        body, session = await read_body(request, bodies.Finish), self._session_in(request)
        self._service.sessions.finish(session, body.reason.type)
        await self._service.retire(session)

    async def _telemetry(self, request: Request) -> Any:
        await body_of(request, PROMPT_BYTES)
        return {"status": "accepted"}

    async def _info(self, request: Request) -> Any:
        """How the engines are; of them only a trainer that was never ready is waited for."""
        fleet = self._service.fleet
        model = await info_of(fleet.trainer)
        hosts: list[dict[str, Any]] = [
            {"state": host.state, "pid": host.pid, "restarts": host.restarts}
            for host in (fleet.trainer, *fleet.samplers)
        ]
        trainer, samplers = hosts[0], hosts[1:]
        for facts, host in zip(samplers, fleet.samplers, strict=True):
            if (agreement := self._service.samples.agreement.of(host)) is not None:
                facts["agreement"] = agreement
        return {
            "model": model,
            "engine": trainer,
            "samplers": samplers,
            "samples_exactly": fleet.samples_exactly,
            "adapter_targets": fleet.targets,
            "version": halteres.__version__,
            "policies": self._service.samplers.versions(tenant_of(request)),
        }

    async def _training_runs(self, request: Request) -> Any:
        """Newest first; with `project_id` those of its sessions."""
        project = request.query_params.get("project_id")
        made = [run for run in self._service.models.all(tenant_of(request)) if run.lora is not None]
        runs = [run for run in made if project in (None, self._project(run))]
        page, cursor = page_of(runs[::-1], request)
        return {"training_runs": [self._run(model) for model in page], "cursor": cursor}

    async def _training_run(self, request: Request) -> Any:
        run, tenant = request.path_params["run_id"], tenant_of(request)
        found = self._service.checkpoints.all(run, tenant)
        # nothing is known of it but its checkpoints
        if self._service.models.of_id(run) is None and found:
            base = found[-1].base_model or self._service.base.name
            return self._run_facts(run, base, tenant, found[-1].lora.rank, found[-1].created_at)
        return self._run(self._service.models.find(run, tenant))

    def _project(self, model: Model) -> str | None:
        return self._service.sessions.of_model(model.session_id).project_id

    def _run(self, model: Model) -> dict[str, Any]:
        rank = model.lora.rank if model.lora else None
        facts = self._run_facts(
            model.id, model.base_model, model.tenant, rank, model.last_request_at
        )
        return {**facts, "user_metadata": texts(model.user_metadata)}

    def _run_facts(
        self, run: str, base: str, owner: Tenant, rank: int | None, last_at: float
    ) -> dict[str, Any]:
        newest = self._service.checkpoints.newest
        return {
            "training_run_id": run,
            "base_model": base,
            "model_owner": owner,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": rank,
            "last_request_time": timestamp(last_at),
            "last_checkpoint": described(newest(run, "weights")),
            "last_sampler_checkpoint": described(newest(run, "sampler_weights")),
        }

    async def _sessions(self, request: Request) -> Any:
        page, _ = page_of(self._service.sessions.all(tenant_of(request))[::-1], request)
        return {"sessions": [session.id for session in page]}

    async def _session(self, request: Request) -> Any:
        session = self._session_in(request)
        return {
            "training_run_ids": [model.id for model in self._service.models.of_session(session.id)],
            "sampler_ids": list(self._service.samplers.of_session(session.id)),
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name,
        }

    def _session_in(self, request: Request) -> Session:
        return self._service.sessions.find(request.path_params["session_id"], tenant_of(request))

    async def _move(self, request: Request) -> None:
        project_id = bodies.read_field(await body_of(request), "project_id")
        self._service.sessions.move(self._session_in(request), project_id)

    async def _trace(self, request: Request) -> Any:
        why = (
            f"This service records no traces. What session {self._session_in(request).id} asked "
            "for, and when, is in"
            f" the table 'requests' of {self._service.state / 'journal.sqlite'}."
        )
        return {"status": "failed", "error": why}

    async def _storage(self, request: Request) -> Any:
        tenant, only = tenant_of(request), request.query_params.get("project_id")
        by_project: defaultdict[str | None, list[int]] = defaultdict(list)
        for found in self._service.checkpoints.all(tenant=tenant):
            model = self._service.models.of_id(found.path.run)
            by_project[None if model is None else self._project(model)].append(found.size_bytes)
        data = [
            {
                "project_id": project,
                "user_name": tenant,
                "checkpoint_count": len(sizes),
                "size_bytes": sum(sizes),
                "size_gigabytes": sum(sizes) / 10**9,
            }
            for project, sizes in by_project.items()
            if only in (None, project)
        ]
        return {"data": data}

    async def _search(self, request: Request) -> Any:
        body = await read_body(request, bodies.Search)
        known = self._service.sessions.all(tenant_of(request))
        found = sorted(
            (session for session in known if self._fits(session, body)), key=_place, reverse=True
        )
        page, more = found[: body.limit], None
        if len(found) > len(page):
            more = {
                "last_created_at": timestamp(page[-1].created_at),
                "last_session_id": page[-1].id,
            }
        return {"sessions": [self._summary(session) for session in page], "next_cursor": more}

    def _fits(self, session: Session, body: bodies.Search) -> bool:
        metadata, owner, status = texts(session.user_metadata), body.owner, self._status(session)
        words, name = (
            (body.display_name or "").lower().split(),
            (session.display_name or "").lower(),
        )
        by_name = bool(words) and all(word in name for word in words)
        before = body.cursor
        statuses = [
            one for one in body.statuses or () if status is not None and one.type == status.type
        ]
        by_status = any(
            one.reasons is None or session.finished in (None, *one.reasons) for one in statuses
        )
        return (
            # By its id or by its name: with both, either will do; with neither, every session.
            (by_name or session.id == body.session_id or (body.session_id is None and not words))
            and (body.project_ids is None or (session.project_id or NO_PROJECT) in body.project_ids)
            and all(metadata.get(name) == value for name, value in body.user_metadata.items())
            and (owner.type != "user" or session.tenant in owner.owner_urns)
            and (body.statuses is None or by_status)
            and (
                before is None or _place(session) < (before.last_created_at, before.last_session_id)
            )
        )

    def _status(self, session: Session) -> Status | None:
        """None: it has not finished, and nothing was heard of its client for a while."""
        if session.finished is not None:
            return Status(type="client_finished", reason={"type": session.finished})
        alive = steady_time() - session.last_seen < self._service.options.silent_s
        return Status(type="active") if alive else None

    def _summary(self, session: Session) -> dict[str, Any]:
        runs = self._service.models.of_session(session.id)
        saved = [found for run in runs for found in self._service.checkpoints.all(run.id)]
        return {
            "session_id": session.id,
            "created_at": timestamp(session.created_at),
            "owner": session.tenant,
            "project_id": session.project_id or NO_PROJECT,
            "status": self._status(session),
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(found.size_bytes for found in saved),
            "display_name": session.display_name,
            "user_metadata": texts(session.user_metadata),
        }


def _place(session: Session) -> tuple[datetime.datetime, str]:
    return datetime.datetime.fromtimestamp(session.created_at, datetime.UTC), session.id
