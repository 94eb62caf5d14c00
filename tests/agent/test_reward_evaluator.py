"""The process that scores for a tool leaves a result, however it goes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halteres.agent import reward_models


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process stays the tests'."""
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(reward_models.process, "begin", lambda *_, **__: None)
    monkeypatch.setattr(reward_models.environ, "stay_offline", lambda: None)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_an_evaluation_that_takes_too_long_leaves_its_failure(
    quiet: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"model": "nowhere"}))

    def leave(code: int) -> Any:
        raise SystemExit(code)

    async def late(request: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGALRM)
        return {}

    monkeypatch.setattr(sys, "argv", ["reward_models", str(tmp_path)])
    monkeypatch.setattr(reward_models.os, "_exit", leave)
    monkeypatch.setattr(reward_models, "_score", late)
    with pytest.raises(SystemExit) as exit_:
        reward_models.main()
    assert exit_.value.code == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed" and "too long" in result["error"]
