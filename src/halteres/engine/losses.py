"""A loss as a request asks for it: settings checked and completed, a custom graph checked.

Owns: names that engines share beside those of `halteres.losses`.
Never: looks at data (`datums` does), computes.
"""

from __future__ import annotations

from collections.abc import Mapping

from halteres.engine.graphs.checked import check_custom
from halteres.engine.protocol import LossSpec
from halteres.errors import InvalidData
from halteres.losses import CUSTOM, complete_settings

TARGETS = "target_tokens"
MAX_SEQUENCE_RATIO = 2.0
"""Above it stable_reinforce weighs a sequence no more."""
SEQUENCES = "sampled_sequences"
"""Int32 among a loss's inputs: `Datum.sequences`, or who has none, 1 where a token seems sampled."""


def settled(spec: LossSpec) -> Mapping[str, float]:
    """The loss's settings, defaults filled in.

    Raises:
        InvalidData: there is no such loss, or a setting is unknown or unusable; the message names it.
    """
    settings = complete_settings(spec.name, spec.config)
    _check_graph(spec)
    return settings


def _check_graph(spec: LossSpec) -> None:
    if (spec.name == CUSTOM) != (spec.custom is not None):
        raise InvalidData(
            f"The loss '{spec.name}' was sent {'with' if spec.custom else 'without'} a graph.",
            "The loss 'custom' has one, no other has.",
            "Make one with create_custom_loss and send its id.",
        )
    if spec.custom is not None:
        check_custom(spec.custom)
