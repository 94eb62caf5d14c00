"""docs/inference.md: its first example, asked of the real model, is answered as the page says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest

from .test_process import running

pytestmark = pytest.mark.runs

PAGE = (Path(__file__).parents[2] / "docs" / "inference.md").read_text()


async def test_the_pages_first_question_is_answered_by_the_built_in_model_as_the_page_says(
    tmp_path: Path,
) -> None:
    asked = re.search(r"/v1/chat/completions .*? -d '(.*?)'\n```", PAGE, re.DOTALL)
    told = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert asked and told
    with running(tmp_path, "--engine", "torch") as process:
        async with asyncio.timeout(90), aiohttp.ClientSession() as http:
            await process.info()
            headers = {"Content-Type": "application/json"}
            async with http.post(
                f"{process.url}/v1/chat/completions", data=asked[1], headers=headers
            ) as response:
                answer = await response.json()
    expected = json.loads(told[1])
    assert [(each["message"], each["finish_reason"]) for each in answer["choices"]] == [
        (each["message"], each["finish_reason"]) for each in expected["choices"]
    ]
    assert answer["usage"].items() >= expected["usage"].items()
    assert answer["policy_version"] == expected["policy_version"]
