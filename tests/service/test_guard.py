"""The service has no keys of its own: pages of other origins may not use it (we chose it; the Tinker API is silent)."""

from __future__ import annotations

import pytest

from .scenes import Scene


@pytest.mark.parametrize("headers", [{"Host": "evil.example:8000"}, {"Origin": "http://evil.example"}])
async def test_pages_of_other_origins_are_refused(scene: Scene, headers: dict[str, str]) -> None:
    status, answer = await scene.post("create_session", {}, **headers)
    assert status == 403
    assert "localhost only" in answer["detail"]
    assert (await scene.post("create_session", {}))[0] == 200
