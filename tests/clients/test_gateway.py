"""Episodes of unmodified SDKs within a gateway session: one sequence, whose tokens are the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service.gateway.episodes import opened
from service.inference_fixtures import TOKENIZER, speaking

from clients.conftest import process
from halteres.engine.protocol import SampleResult
from halteres.errors import ServerError

pytestmark = pytest.mark.clients

SAYS = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'
"""JSON without blanks, as no client writes it."""


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
@pytest.mark.parametrize("template", ["with tools", "without"])
async def test_a_loop_with_a_tool_is_one_sequence_of_the_engines_tokens(
    client_python: Callable[..., str], tmp_path: Path, sdk: str, template: str
) -> None:
    """Whole and streamed; the first call fails once, and the SDK sends it again by itself."""
    python = await asyncio.to_thread(client_python, sdk, sdk)
    reads_tools = {} if template == "with tools" else {"template": None}
    async with speaking(tmp_path, SAYS, **reads_tools) as (scene, speaker):
        sample, failures = speaker.sample, [ServerError("The device is lost.")]

        async def fails_once(*given: Any) -> SampleResult:
            if failures:
                raise failures.pop()
            return await sample(*given)

        speaker.sample = fails_once  # type: ignore[method-assign] - for this test alone
        episode = await opened(scene)
        variables = {
            "OPENAI_BASE_URL": episode.opened["openai_base_url"],
            "OPENAI_API_KEY": episode.opened["api_key"],
            "ANTHROPIC_BASE_URL": episode.opened["anthropic_base_url"],
            "ANTHROPIC_API_KEY": "any",
        }
        program, log = Path(__file__).parent / f"gateway_{sdk}_program.py", tmp_path / "log"
        async with process([python, program], log, env=variables) as child, asyncio.timeout(120):
            assert await child.wait() == 0, log.read_text()[-4000:]
        view = await episode.view()
        assert [node["why_root"] for node in view["nodes"]] == ["first", None, None]
        [sequence] = (await episode.sequences())["sequences"]
        said = [*TOKENIZER.encode(SAYS), TOKENIZER.eos_token_id]
        assert [mask for mask in sequence["masks"] if mask >= 0] == 3 * said
        assert sequence["tokens"] == speaker.prompts[-1] + said
        assert set(sequence["logprobs"]) == {1.0, -0.5}
