"""The losses by name: what each reads, which settings it has, what they are where a request says
nothing.

Formulas are each engine's own. Source: the Tinker API's losses. Two defaults are not public and
ours: dro's beta (the documentation's example), and gspo's thresholds, which are those of its paper
(arXiv 2507.18071, section 5.1: 3e-4 and 4e-4 about 1). Thresholds are ratios, not distances from 1.
Of stable_reinforce the name, the inputs and the setting kl_coeff are public alone; the formula is
ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from halteres.errors import InvalidData, nearest

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
STABLE_REINFORCE = "stable_reinforce"
SEQUENCE_RATIO_MASK = "sequence_ratio_mask"

_SAMPLED = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class LossKind:
    """What a loss reads."""

    inputs: tuple[str, ...]  # float32, beside target_tokens
    # its settings and their defaults; none < 0
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    multi_target: bool = False  # K targets per token are understood
    sequences: bool = False  # it reads which sampled sequence a target belongs to
    # the ratio of new to old probability weighs up to a bound, so data may be a little old
    ratio_bounded: bool = False
    # every token counts by that ratio, so that it may come from another distribution
    importance_weighted: bool = False
    # the setting that pulls every sampled token towards the sampler's, whatever its advantage
    kl_setting: str = ""

    @property
    def clips(self) -> bool:
        """The thresholds are settings, and per-token inputs that win over them."""
        return CLIP_LOW in self.config


def _clipped(
    inputs: tuple[str, ...], low: float, high: float, *, importance_weighted: bool = False
) -> LossKind:
    return LossKind(
        inputs,
        {CLIP_LOW: low, CLIP_HIGH: high},
        ratio_bounded=True,
        importance_weighted=importance_weighted,
    )


LOSSES: Mapping[str, LossKind] = MappingProxyType(
    {
        "cross_entropy": LossKind(("weights",), multi_target=True),
        "importance_sampling": LossKind(_SAMPLED, importance_weighted=True),
        "ppo": _clipped(_SAMPLED, 0.8, 1.2),
        "cispo": _clipped(_SAMPLED, 0.0, 4.0, importance_weighted=True),
        "dro": LossKind(_SAMPLED, {"beta": 0.05}, kl_setting="beta"),
        "gspo": _clipped((*_SAMPLED, SEQUENCE_RATIO_MASK), 1 - 3e-4, 1 + 4e-4),
        STABLE_REINFORCE: LossKind(
            _SAMPLED, {"kl_coeff": 0.0}, sequences=True, ratio_bounded=True, kl_setting="kl_coeff"
        ),
    }
)
"""Every loss that is computed. Each engine maps these names to its own formulas."""


def complete_settings(name: str, config: Mapping[str, float]) -> Mapping[str, float]:
    """The settings of a loss, defaults filled in.

    Raises:
        InvalidData: there is no such loss, or a setting is unknown or unusable; the message names
            it.
    """
    kind = find_kind(name)
    for key, value in config.items():
        if key not in kind.config:
            known = f"It has: {', '.join(kind.config)}." if kind.config else "It has none."
            guess = nearest(key, {setting for other in LOSSES.values() for setting in other.config})
            having = [other for other, its in LOSSES.items() if guess in its.config]
            if having and name not in having:
                known = f"{known} Losses with '{guess}': {', '.join(having)}."
            what, own = f"The loss {name} has no setting '{key}'.", nearest(key, kind.config)
            raise InvalidData(what, known, "Leave it out.", did_you_mean=own)
        if not math.isfinite(value) or value < 0:
            raise InvalidData(
                f"The setting '{key}' is {value}.", f"{name} needs a finite number of at least 0."
            )
    settings = {**kind.config, **config}
    if kind.clips and settings[CLIP_LOW] > settings[CLIP_HIGH]:
        raise InvalidData(
            f"{CLIP_LOW} is {settings[CLIP_LOW]:g}, above {CLIP_HIGH}, which is "
            f"{settings[CLIP_HIGH]:g}.",
            "Both are ratios, not distances from 1.",
            f"The defaults of {name} are {kind.config[CLIP_LOW]:g} and "
            f"{kind.config[CLIP_HIGH]:g}; give both.",
        )
    return settings


def find_kind(name: str) -> LossKind:
    """The loss of this name.

    Raises:
        InvalidData: there is none; the message names those that there are.
    """
    if name in LOSSES:
        return LOSSES[name]
    guess, known = nearest(name, LOSSES), sorted(LOSSES)
    hint = f"Did you mean '{guess}'?" if guess else ""
    why = f"There are: {', '.join(known)}."
    raise InvalidData(f"There is no loss '{name}'.", why, hint, did_you_mean=guess, allowed=known)
