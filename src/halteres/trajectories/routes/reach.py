"""The way from a request to the service.

Owns: where the app keeps it.
Never: makes one (`app` does).
"""

from __future__ import annotations

from starlette.requests import Request

from halteres.trajectories.service import TrajectoryService


def service_of(request: Request) -> TrajectoryService:
    """The service of the app that was asked."""
    return request.app.state.service
