"""Sampling: sampling sessions and asample.

Source: tinker SDK 0.38.0, lib/public_interfaces/sampling_client.py.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.service.answers import answer, body_of
from halteres.service.durable.futures import CLONE, SAMPLE
from halteres.service.durable.journal import Entry
from halteres.service.sampling.samples import MAX_SAMPLES, drawn_for
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.codec import PROMPT_BYTES

MAX_CLIENTS = 2**63 // CLONE
"""Copies of one sampling client, so that the number of each one's requests fits 64 bits."""


class SamplingRoutes:
    """What a SamplingClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/asample", self.asample, methods=["POST"]),
            Route("/api/v1/create_sampling_session", self.create_sampling_session, methods=["POST"]),
            Route("/api/v1/join_sampling_session", self.join_sampling_session, methods=["POST"]),
            Route("/api/v1/samplers/{sampler_id}", self.sampler),
        ]

    async def create_sampling_session(self, request: Request) -> Response:
        """POST create_sampling_session: answered at once."""
        asked = bodies.read(await body_of(request), bodies.CreateSamplingSession)
        session = self._service.sessions.find(asked.session_id, tenant_of(request))
        self._service.refuse_sampler(session, asked.sampling_session_seq_id)
        sampler = await self._service.samplers.create(
            session, asked.sampling_session_seq_id, asked.base_model, asked.model_path
        )
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def join_sampling_session(self, request: Request) -> Response:
        """POST join_sampling_session: a number for a copy of a sampling client, drawn so that no two copies share one.

        Drawn rather than counted: a copy that an earlier life of the service knew may not have sent anything yet.
        """
        asked = bodies.read(await body_of(request), bodies.SamplerId)
        self._service.samplers.find(asked.sampling_session_id, tenant_of(request))
        counter = 1 + secrets.randbelow(MAX_CLIENTS - 1)
        return answer({"type": "join_sampling_session", "client_counter": counter})

    async def sampler(self, request: Request) -> Response:
        """GET samplers/{id}."""
        sampler = self._service.samplers.find(request.path_params["sampler_id"], tenant_of(request))
        return answer({"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path})

    async def asample(self, request: Request) -> Response:
        """POST asample: a future, and an id for each sequence that it will have."""
        body, tenant = await body_of(request, PROMPT_BYTES), tenant_of(request)
        asked = await self._service.threads.run(tenant, len(body), lambda: bodies.read(body, bodies.Sample))
        sampler = self._service.samplers.find(asked.sampling_session_id, tenant)
        key = f"{sampler.id}/{asked.seq_id}"
        if self._service.futures.known(key) is None:
            self._service.samples.refuse_if_full(sampler.tenant)
            waiting = self._service.futures.open_bytes(sampler.tenant)
            self._service.options.limits.of(sampler.tenant).check_waiting(waiting)
        drawn, seq = drawn_for(asked, sampler) or None, asked.seq_id
        entry = Entry(key=key, kind=SAMPLE, subject=sampler.id, tenant=tenant, seq=seq, body=body, drawn=drawn)
        future, new = await self._service.futures.accept(entry)
        if new:
            self._service.samples.start(future, sampler, asked, entry.drawn)
        sequences = [f"{key}/{index}" for index in range(min(asked.num_samples, MAX_SAMPLES))]
        return answer({"request_id": future.request_id, "sample_sequence_ids": sequences})
