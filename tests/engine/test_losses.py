"""Every engine computes the losses that are accepted, and no others."""

from __future__ import annotations

from halteres.engine import scripted
from halteres.engine.checks import LOSS_INPUTS
from halteres.engine.torch import losses


def test_both_engines_compute_exactly_the_losses_that_are_accepted() -> None:
    assert set(scripted.LOSSES) == set(losses.LOSSES) == set(LOSS_INPUTS)


def test_a_loss_reads_exactly_the_inputs_that_are_checked() -> None:
    for name, loss in losses.LOSSES.items():
        assert {"target_tokens", *loss.inputs} == set(LOSS_INPUTS[name])
