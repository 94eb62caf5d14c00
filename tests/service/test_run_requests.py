"""What became of the requests of a run's environment, for whoever watches the run."""

from __future__ import annotations

from typing import Any

from halteres.service.http import MOST_RUNS, RequestCounts

from .live_service import LiveService, closing, trainer

NONE: dict[str, Any] = {"answered": 0, "refused": 0, "refused_in_a_row": 0, "last_refusal": None}


async def counted(scene: LiveService, run: str = "r17") -> dict[str, Any]:
    status, counts = await scene.get(f"/halteres/v1/runs/{run}/requests")
    assert status == 200
    return counts


async def test_refused_requests_of_a_run_are_counted_with_the_words_of_the_last(
    scene: LiveService,
) -> None:
    async with closing(await scene.client(halteres_run="r17")) as client:
        await (await trainer(client)).save_weights_and_get_sampling_client()
        chat = "/runs/r17/v1/chat/completions"
        wrong = {"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}
        (status, refused), _ = await scene.ask(chat, **wrong), await scene.ask(chat, **wrong)
        assert status == 400
        counts = await counted(scene)
        assert (counts["answered"], counts["refused"], counts["refused_in_a_row"]) == (0, 2, 2)
        last = counts["last_refusal"]
        assert (last["status"], last["path"]) == (400, "/v1/chat/completions")
        assert last["why"] == refused["error"]["message"]
        await scene.ask("/runs/r17/v1/completions", prompt="1 + 1", max_tokens=2)
        counts = await counted(scene)
        assert (counts["answered"], counts["refused"], counts["refused_in_a_row"]) == (1, 2, 0)
        await scene.ask("/runs/r17/v1/v1/completions", prompt="1 + 1")
        await scene.ask("/runs/r17/generate", text=1)
        counts = await counted(scene)
        assert (counts["refused_in_a_row"], counts["last_refusal"]["path"]) == (2, "/generate")
        assert await counted(scene, "r18") == NONE


async def test_calls_of_a_runs_gateway_sessions_are_counted_with_those_of_the_run(
    scene: LiveService,
) -> None:
    async with closing(await scene.client(halteres_run="r17")) as client:
        await (await trainer(client)).save_weights_and_get_sampling_client()
        _, session = await scene.ask("/gateway/sessions", run="r17")
        _, other = await scene.ask("/gateway/sessions")
        wrong = {"messages": [{"role": "user", "content": "Hi"}], "stop": 1.5}
        for opened in (session, other):
            path = f"/g/{opened['session']}/v1/chat/completions"
            status, refused = await scene.ask(path, **wrong)
            assert status == 400
        counts = await counted(scene)
        assert (counts["answered"], counts["refused"]) == (0, 1)
        last = counts["last_refusal"]
        assert (last["path"], last["why"]) == ("/v1/chat/completions", refused["error"]["message"])
        await scene.ask(f"/g/{session['session']}/v1/completions", prompt="1 + 1", max_tokens=2)
        counts = await counted(scene)
        assert (counts["answered"], counts["refused_in_a_row"]) == (1, 0)
        await scene.ask(f"/gateway/sessions/{session['session']}/reward", error="It crashed.")
        late, _ = await scene.ask(f"/g/{session['session']}/v1/completions", prompt="1 + 1")
        assert (late, (await counted(scene))["refused"]) == (410, 1)


async def test_a_run_that_has_published_nothing_yet_refuses_nothing(scene: LiveService) -> None:
    """503 is answered: come again."""
    assert (await scene.ask("/runs/r17/v1/completions", prompt="1 + 1"))[0] == 503
    assert await counted(scene) == NONE


def test_no_more_runs_are_counted_than_anybody_may_name() -> None:
    counts = RequestCounts()
    for number in range(MOST_RUNS + 5):
        counts.count("local", f"r{number}")
    assert len(counts._by_run) == MOST_RUNS  # pyright: ignore[reportPrivateUsage] - nothing else shows it
