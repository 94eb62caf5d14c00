"""Sampling: sampling sessions and asample.

Source: tinker SDK 0.38.0, lib/public_interfaces/sampling_client.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.service.promises import SAMPLE
from halteres.service.routes.answers import answer, body_of
from halteres.service.sampling import MAX_SAMPLES, drawn_seed
from halteres.service.service import Service
from halteres.service.wire import bodies


class SamplingRoutes:
    """What a SamplingClient calls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/asample", self.asample, methods=["POST"]),
            Route("/api/v1/create_sampling_session", self.create_sampling_session, methods=["POST"]),
            Route("/api/v1/samplers/{sampler_id}", self.sampler),
        ]

    async def create_sampling_session(self, request: Request) -> Response:
        """POST create_sampling_session: answered at once."""
        asked = bodies.read(await body_of(request), bodies.CreateSamplingSession)
        session = self._service.sessions.find(asked.session_id)
        sampler = await self._service.samplers.create(
            session.id, asked.sampling_session_seq_id, asked.base_model, asked.model_path
        )
        return answer({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def sampler(self, request: Request) -> Response:
        """GET samplers/{id}."""
        sampler = self._service.samplers.find(request.path_params["sampler_id"])
        return answer({"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path})

    async def asample(self, request: Request) -> Response:
        """POST asample: a promise, and an id for each sequence that it will have."""
        body = await body_of(request)
        asked = bodies.read(body, bodies.Sample)
        sampler = self._service.samplers.find(asked.sampling_session_id)
        key = f"{sampler.id}/{asked.seq_id}"
        if self._service.promises.known(key) is None:
            self._service.samples.refuse_if_full()
        seed = asked.sampling_params.seed
        drawn = {"seed": drawn_seed()} if seed is None else None
        promise, new = await self._service.promises.accept(
            SAMPLE, key, sampler.id, seq=asked.seq_id, body=body, drawn=drawn
        )
        if new:
            work = self._service.samples.keep(promise, sampler, asked, drawn["seed"] if drawn else seed or 0)
            self._service.tasks.create_task(work, name="sample")
        sequences = [f"{key}/{index}" for index in range(min(asked.num_samples, MAX_SAMPLES))]
        return answer({"request_id": promise.request_id, "sample_sequence_ids": sequences})
