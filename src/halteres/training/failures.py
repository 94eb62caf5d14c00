"""How training can fail; a failure ends the process with its sentence (`__main__`).

HalteresError
├── LossNotFinite     the loss or a log-probability is NaN or infinite
├── RequestRefused    the training service refused a request, and says what is wrong with it
├── NoExperience      no batch came within the deadline
├── BatchNotOurs      a batch of another size, or of another run
├── ServiceFailed     the training service failed or did not answer
├── VersionsDiffer    trainer and service count optimiser steps differently
└── StopTimedOut      a signal asked for an end, and the final checkpoint took too long
"""

from __future__ import annotations

from typing import Any

from halteres.errors import HalteresError, UserError

LOOK = "Look into logs/service.log and logs/engine.log, then resume from the last checkpoint."


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
    """The trajectory server delivered a batch that is not this run's; nothing was learnt from it."""

    code = "batch_not_ours"


class ServiceFailed(HalteresError):
    """The training service failed or did not answer."""

    code = "service_failed"

    def __init__(self, what: str, why: str = "", next: str = LOOK, **details: Any) -> None:
        super().__init__(what, why, next, **details)


class VersionsDiffer(HalteresError):
    """Trainer and service count optimiser steps differently."""

    code = "versions_differ"


class StopTimedOut(HalteresError):
    """Asked to end by a signal, the trainer could not write its final checkpoint in time."""

    code = "stop_timed_out"
