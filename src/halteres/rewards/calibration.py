"""Calibration: what a reward model's raw scores mean, measured on held-out pairs; weights are never altered.

Owns: the temperature at which a lead is a probability, the offset and scale at which a score is standardised.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import BaseModel

from halteres.errors import InvalidData
from halteres.rewards import metrics
from halteres.rewards.metrics import Floats
from halteres.scores import Output

FEW_PAIRS, LEAST_PAIRS = 200, 10
"""Fewer make a calibration that is told to be uncertain; too few make none."""

Side = Literal["chosen", "both"]
"""Whose mean score an offset is."""

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)

WIDEST = 1000.0
"""Factor of the leads' mean size within which a temperature lies: all right would ask for 0, all wrong for none."""


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """A calibration; stored with the model, of whose template it is."""

    temperature: float = 1.0  # raw score units: P(a preferred to b) = s((a - b) / temperature)
    offset: float = 0.0  # raw score that is 0 when standardised
    scale: float = 1.0  # raw score units in one standardised
    offset_from: Side = "chosen"  # whose mean the offset is
    num_pairs: int = 0
    data_digest: str = ""  # SHA-256 of the pairs' data
    template_digest: str = ""  # of the scoring template under which they were scored; empty: not known
    calibration_error: tuple[float, float] = (0.0, 0.0)  # before (temperature 1) and after
    brier_score: tuple[float, float] = (0.0, 0.0)
    quantiles: dict[str, float] = {}  # of raw scores, both sides: "0.05" and so on
    warnings: tuple[str, ...] = ()

    def apply(self, raw: float, output: Output) -> float:
        """A raw score in other units; order is kept.

        >>> Calibration(temperature=2.0, offset=1.0, scale=4.0).apply(3.0, "standardised")
        0.5
        """
        match output:
            case "raw":
                return raw
            case "standardised":
                return (raw - self.offset) / self.scale
            case "probability":
                return float(metrics.probabilities(np.asarray(raw - self.offset), self.temperature))

    def covers(self, raw: float) -> bool:
        """Whether a raw score lies between the lowest and the highest that this was made from.

        >>> Calibration(quantiles={"0.0": -1.0, "1.0": 2.0}).covers(2.5)
        False
        """
        lowest, highest = self.quantiles.get("0.0", -math.inf), self.quantiles.get("1.0", math.inf)
        return lowest <= raw <= highest

    def check_template(self, digest: str) -> None:
        """InvalidData if the calibration was made with another scoring template, or another rule for the end token."""
        if self.template_digest and self.template_digest != digest:
            raise InvalidData(
                "The calibration was made with another scoring template.",
                f"It is of {self.template_digest[:12]}, the model's is {digest[:12]}: scores under the two differ.",
                "Calibrate again: halteres reward calibrate MODEL HELD_OUT",
            )


def fit_calibration(
    chosen_P: Floats,
    rejected_P: Floats,
    *,
    data_digest: str,
    template_digest: str = "",
    offset_from: Side = "chosen",
    leads_P: Floats | None = None,
) -> Calibration:
    """The calibration of a model by its raw scores of held-out pairs.

    Args:
        chosen_P, rejected_P: raw scores, shape (P,).
        offset_from: the sides whose mean score becomes 0: the chosen (InstructGPT: demonstrations score 0), or both.
        leads_P: which the pairs judge, where that is not the score: an objective's own; for the temperature.

    Raises:
        InvalidData: fewer than LEAST_PAIRS pairs, or all scores are equal.
    """
    if len(chosen_P) < LEAST_PAIRS:
        raise InvalidData(
            f"Too few ranked pairs to calibrate on: {len(chosen_P)}.",
            f"It takes {LEAST_PAIRS} at least, and {FEW_PAIRS} for a certain temperature; ties and steps are no pairs.",
            "Name more held-out pairs. A calibration that the model has is kept.",
        )
    both = np.concatenate([chosen_P, rejected_P])
    scale = float(both.std())
    if scale == 0.0:
        raise InvalidData(
            "The model cannot be calibrated on these pairs.",
            f"All {len(both)} scores are equal.",
            "Name held-out pairs that the model tells apart.",
        )
    leads = chosen_P - rejected_P if leads_P is None else leads_P
    temperature = _temperature(leads)
    before, after = (metrics.calibration_error(metrics.reliability(leads, each)) for each in (1.0, temperature))
    warnings: list[str] = []
    if len(leads) < FEW_PAIRS:
        warnings.append(f"{len(leads)} pairs are few: {FEW_PAIRS} or more make the temperature certain.")
    if float(leads.mean()) <= 0:
        warnings.append("The rejected side scores no lower than the chosen one: probabilities are near one half.")
    elif bool(np.all(leads > 0)):
        warnings.append("Every pair is right: these pairs do not tell how sure the model may be.")
    return Calibration(
        temperature=temperature,
        offset=float((chosen_P if offset_from == "chosen" else both).mean()),
        scale=scale,
        offset_from=offset_from,
        num_pairs=len(leads),
        data_digest=data_digest,
        template_digest=template_digest,
        calibration_error=(before, after),
        brier_score=(metrics.brier_score(leads), metrics.brier_score(leads, temperature)),
        quantiles={str(q): float(np.quantile(both, q)) for q in QUANTILES},
        warnings=tuple(warnings),
    )


def _temperature(leads_P: Floats) -> float:
    """The temperature of the least negative log-likelihood of s(lead / temperature).

    In 1/temperature the likelihood is concave, so its slope changes its sign once: bisection finds the place.
    """
    size = float(np.abs(leads_P).mean()) or 1.0
    low, high = math.log(1 / (WIDEST * size)), math.log(WIDEST / size)  # of 1/temperature
    for _ in range(60):
        middle = (low + high) / 2
        inverse = math.exp(middle)
        if float(np.mean(leads_P * metrics.probabilities(-leads_P * inverse))) > 0:
            low = middle
        else:
            high = middle
    return math.exp(-low)
