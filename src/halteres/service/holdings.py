"""What a tenant holds, compared with what it may hold.

Owns: which sessions and training runs count as alive.
Never: ends anything to make room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from halteres.process import steady_time
from halteres.service.sampling.samplers import sampler_id
from halteres.service.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from halteres.service.service import Service
    from halteres.service.sessions import Session


def refuse_session(service: Service, tenant: Tenant) -> None:
    """Raise LimitReached if a tenant has as many sessions as it may have."""
    service.options.limits.of(tenant).check_sessions(len(_alive(service, tenant)))


def refuse_model(service: Service, session: Session, model_id: str, rank: int | None = None) -> None:
    """Raise LimitReached if a tenant has as many training runs as it may have, or none of this rank; a repetition of
    what made one is not refused."""
    if service.models.of_id(model_id) is not None:
        return
    limits, alive = service.options.limits.of(session.tenant), _alive(service, session.tenant)
    limits.check_models(sum(model.session_id in alive for model in service.models.all(session.tenant)))
    if rank is not None:
        limits.check_rank(rank)


def refuse_sampler(service: Service, session: Session, seq: int) -> None:
    """Raise LimitReached if a tenant has as many sampling sessions as it may have; a repetition is not refused."""
    of_session = service.samplers.of_session
    if sampler_id(session.id, seq) not in of_session(session.id):
        alive = _alive(service, session.tenant) | {session.id}
        service.options.limits.of(session.tenant).check_samplers(sum(len(of_session(one)) for one in alive))


def _alive(service: Service, tenant: Tenant) -> set[str]:
    """The ids of sessions that have not finished, nor fallen silent."""
    oldest = steady_time() - service.options.silent_s
    known = service.sessions.all(tenant)
    return {session.id for session in known if session.finished is None and session.last_seen >= oldest}
