"""Our DPO against TRL's DPOTrainer on a batch: tokens, loss, gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halteres.models import TINY, builtin_path
from halteres.rewards.preferences import read_preferences
from halteres.tokenizer import Tokenizer
from halteres.training.conversations import read_pairs
from halteres.training.dpo import pair_losses

from .test_reference_values import ran

pytestmark = pytest.mark.clients

ROWS = [
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5, I think"},
    {"prompt": "What is the capital of France?", "chosen": " Paris.", "rejected": " A city."},
    {"prompt": "Say it:", "chosen": " It is said now.", "rejected": " No"},
]
BETA = 0.3


@pytest.fixture(scope="module")
def trl(client_python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trl")
    asked = {
        "model": str(builtin_path(TINY)),
        "scratch": str(folder),
        "rows": ROWS,
        "beta": BETA,
    }
    python = client_python("trl", "torch", "trl==1.16.*", "peft", "datasets")
    return ran(python, "trl_dpo_values.py", folder, asked)


def test_answers_have_trls_tokens(trl: Any) -> None:
    tokenizer = Tokenizer(Path(str(builtin_path(TINY))))
    found = read_preferences(ROWS)
    pairs = read_pairs(found.source, found.comparisons, tokenizer)
    ours = [
        (sequence.tokens_T.tolist(), sequence.answers_T.astype(int).tolist())
        for row in pairs
        for sequence in row.sequences
    ]
    theirs = list(zip(trl["ids"], trl["masks"], strict=True))
    assert sorted(ours) == sorted((list(ids), list(mask)) for ids, mask in theirs)


def test_loss_and_gradient_are_trls(trl: Any) -> None:
    """TRL has the chosen answers first, then the rejected ones."""

    def pairs(values: list[float]) -> Any:
        return np.array(values).reshape(2, -1).T

    found = pair_losses(pairs(trl["policy"]), pairs(trl["reference"]), beta=BETA)
    count = len(found.losses_P)
    assert not np.allclose(found.margins_P, 0.0, atol=1e-3)
    assert found.losses_P.mean() == pytest.approx(trl["loss"], rel=1e-5)
    # the service's cross entropy: the sum of -weight * logp
    weights = np.concatenate([-found.weights_P, found.weights_P]) / count
    gradient = weights @ np.array(trl["slopes"])
    np.testing.assert_allclose(gradient, trl["gradient"], rtol=2e-4, atol=2e-6)
