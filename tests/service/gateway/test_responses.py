"""Responses within a session: the dialect knows nothing of it, and is captured as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.inference_fixtures import speaking
from service.live_service import LiveService

from .episodes import EngineTap, Episode, opened, trained

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def play(episode: Episode, tools: list[Any]) -> None:
    """Three turns; the program sends every item back."""
    items: list[Any] = [{"role": "user", "content": "2 + 2?"}]
    for _ in range(3):
        asked = {"input": items, "max_output_tokens": 64, "tools": tools}
        output = (await episode.whole("/v1/responses", asked))["output"]
        items += output
        items += [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
            for item in output
            if item["type"] == "function_call"
        ]
        items.append({"role": "user", "content": "Sure?"})


async def test_responses_are_one_sequence_of_the_engines_tokens(scene: LiveService) -> None:
    tap, episode = EngineTap(scene), await opened(scene)
    await play(episode, [])
    sequences = await episode.sequences()
    assert len(sequences["sequences"]) == 1
    assert trained(sequences) == [(one.tokens, one.logprobs) for one in tap.samplings]


async def test_calls_of_responses_are_those_that_were_sampled(tmp_path: Path) -> None:
    says = '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'
    async with speaking(tmp_path, says) as (scene, _):
        episode = await opened(scene)
        await play(episode, [ADD])
        assert len((await episode.sequences())["sequences"]) == 1
