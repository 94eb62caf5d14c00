"""How training can fail; a failure ends the process with its sentence (`__main__`)."""

from __future__ import annotations

from typing import Any

from halteres.errors import HalteresError, UserError


class LossNotFinite(HalteresError):
    """The loss or a log-probability is NaN or infinite; the adapter is spoiled from here on."""

    code = "nan_loss"


class RequestRefused(UserError):
    """The training service refused a request; the sentence is its own."""

    code = "request_refused"


class NoExperience(HalteresError):
    """No batch came within the deadline."""

    code = "no_experience"


class BatchNotOurs(HalteresError):
    """The trajectory server delivered a batch that is not this run's; nothing was learnt from
    it.
    """

    code = "batch_not_ours"


class ServiceFailed(HalteresError):
    """The training service failed or did not answer."""

    code = "service_failed"

    def __init__(self, what: str, why: str = "", next: str = "", **details: Any) -> None:
        look = (
            "Look into logs/service.log and logs/engine.log, then resume from the last checkpoint."
        )
        super().__init__(what, why, next or look, **details)


class CriticFailed(HalteresError):
    """The critic's process failed or did not answer."""

    code = "critic_failed"

    def __init__(self, what: str, why: str = "", next: str = "", **details: Any) -> None:
        look = "Look into logs/critic.log, then resume from the last checkpoint."
        super().__init__(what, why, next or look, **details)


class VersionsDiffer(HalteresError):
    """Trainer and service count optimiser steps differently."""

    code = "versions_differ"


class StopTimedOut(HalteresError):
    """Asked to end by a signal, the trainer could not write its final checkpoint in time."""

    code = "stop_timed_out"
