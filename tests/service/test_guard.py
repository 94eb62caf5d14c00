"""The service has no keys of its own: pages of other origins may not use it (we chose it; the
Tinker API is silent).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halteres.service.keys import KeyFile
from halteres.service.limits import Allowances, Limits
from halteres.service.service import Options

from .live_service import LiveService, serving


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example:8000"}, {"Origin": "http://evil.example"}]
)
async def test_pages_of_other_origins_are_refused(
    scene: LiveService, headers: dict[str, str]
) -> None:
    status, answer = await scene.post("create_session", {}, **headers)
    assert status == 403
    assert "localhost only" in answer["detail"]
    assert (await scene.post("create_session", {}))[0] == 200


async def test_a_refused_page_and_a_missing_route_are_told_in_the_shape_of_their_path(
    scene: LiveService,
) -> None:
    for path, shape in SHAPES.items():
        async with scene.http.post(
            f"{scene.url}{path}", json={}, headers={"Origin": "http://evil.example"}
        ) as response:
            assert (response.status, shape(await response.json())) == (403, "permission_error")
        status, missing = await scene.ask(f"{path}/nothing")
        assert (status, shape(missing)) == (404, "not_found_error")
        assert "/v1" in missing["detail"]


async def test_a_key_that_is_missing_and_too_many_requests_are_told_in_the_shape_of_their_path(
    tmp_path: Path,
) -> None:
    limits = Allowances(default=Limits(requests_per_s=0.2))
    key = KeyFile(tmp_path).create("alice").text
    async with serving(tmp_path, Options(limits=limits)) as scene:
        for path, shape in SHAPES.items():
            status, refusal = await scene.ask(path)
            assert (status, shape(refusal)) == (401, "authentication_error")
            assert "halteres keys create" in refusal["detail"] == sentence(refusal)
        headers = {"X-API-Key": key}
        async with scene.http.get(f"{scene.url}/v1/models", headers=headers) as response:
            assert response.status == 200
        for path, shape in SHAPES.items():
            async with scene.http.post(f"{scene.url}{path}", json={}, headers=headers) as response:
                assert (response.status, shape(await response.json())) == (429, "rate_limit_error")
                assert response.headers["Retry-After"] == "5"


def openai(refusal: Any) -> str:
    """The error's type, as OpenAI's client reads it."""
    assert refusal["error"]["message"]
    return refusal["error"]["type"]


def anthropic(refusal: Any) -> str:
    assert refusal["type"] == "error"
    return openai(refusal)


def sentence(refusal: Any) -> str:
    return refusal["error"]["message"]


SHAPES = {
    "/v1/embeddings": openai,
    "/v1/responses": openai,
    "/runs/r/v1/chat/completions": openai,
    "/oai/api/v1/chat/completions": openai,
    "/v1/messages": anthropic,
    "/runs/r/v1/messages": anthropic,
    "/anthropic/api/v1/messages": anthropic,
}


@pytest.mark.parametrize(
    "path", ["/api/v1/nothing", "/nothing", "/runs/r", "/halteres/v1/nothing", "/v1x"]
)
async def test_other_paths_are_answered_with_a_detail_alone(scene: LiveService, path: str) -> None:
    status, refusal = await scene.get(path)
    assert (status, sorted(refusal)) == (404, ["code", "detail"])


async def test_a_wrong_method_of_an_openai_path_is_405_in_its_shape(scene: LiveService) -> None:
    status, refusal = await scene.get("/v1/chat/completions")
    assert (status, openai(refusal)) == (405, "invalid_request_error")


@pytest.mark.parametrize(
    "prefix", ["/", "/v1/", "/v1/models/", "/v1/models/tinker://a/weights/", "/api/v1/sessions/"]
)
async def test_a_long_path_is_not_echoed_whole(scene: LiveService, prefix: str) -> None:
    async with scene.http.get(f"{scene.url}{prefix}{'x' * 100_000}") as response:
        assert response.status in (400, 404)
        assert len(await response.read()) < 2000
