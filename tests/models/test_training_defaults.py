"""What is proposed for a base model by its size, as its files or its name tell it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from halteres.models import TINY, builtin_path
from halteres.models.training_defaults import ProposedBatch, batch_for, parameters_of, rate_for


@pytest.mark.parametrize(
    ("name", "parameters", "rates", "batch"),
    [
        (
            "vendor/Some-0.5B-Instruct",
            500_000_000,
            (3e-4, 5e-4, 5e-5),
            ProposedBatch(answers=64, group=8),
        ),
        ("vendor/some-1.5b", 1_500_000_000, (1e-4, 5e-4, 1e-5), ProposedBatch(answers=64, group=8)),
        ("vendor/Some-8B", 8_000_000_000, (1e-4, 3e-4, 1e-5), ProposedBatch(answers=64, group=8)),
        # it has much to forget, and its steps are short
        ("vendor/some-50M", 50_000_000, (3e-4, 5e-4, 5e-5), None),
    ],
)
def test_a_model_in_a_service_elsewhere_is_known_by_its_name(
    tmp_path: Path,
    name: str,
    parameters: int,
    rates: tuple[float, float, float],
    batch: ProposedBatch | None,
) -> None:
    """Also where a folder of that name has its tokenizer and its config, and no weights."""
    for has_folder in (False, True):
        if has_folder:
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
        assert parameters_of(name, tmp_path) == parameters
        found = tuple(rate_for(name, tmp_path, how) for how in ("rl", "sft", "dpo"))
        assert found == rates
        assert batch_for(name, tmp_path) == batch


def test_files_go_before_a_name(tmp_path: Path) -> None:
    tiny = builtin_path(TINY)
    assert tiny is not None
    shutil.copytree(tiny, tmp_path / "vendor" / "called-8B")
    parameters = parameters_of("vendor/called-8B", tmp_path)
    assert parameters is not None and parameters < 2_000_000
    assert batch_for("vendor/called-8B", tmp_path) is None


def test_nothing_is_proposed_for_a_model_that_nothing_tells_the_size_of(tmp_path: Path) -> None:
    assert parameters_of("vendor/unsized", tmp_path) is None
    assert rate_for("vendor/unsized", tmp_path, "rl") is None
    assert batch_for("vendor/unsized", tmp_path) is None
