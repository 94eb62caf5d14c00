"""mini-swe-agent 2.4.6, unmodified: it acts by calls of its one tool, `bash`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clients.conftest import process
from service.inference_fixtures import TOKENIZER, speaking

pytestmark = pytest.mark.harnesses

COMMAND = (
    "test -f seen && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT || { touch seen; echo first; }"
)
SAYS = (
    "I look.\n<tool_call>\n"
    f"{json.dumps({'name': 'bash', 'arguments': {'command': COMMAND}})}\n</tool_call>"
)


async def test_its_calls_are_read_and_their_results_told_where_the_template_has_no_place_for_tools(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    """The model says one call again and again: the first time it leaves a file, then it submits."""
    python = await asyncio.to_thread(client_python, "mini-swe-agent", "mini-swe-agent==2.4.6")
    folder, log = tmp_path / "work", tmp_path / "program.log"
    folder.mkdir()
    variables = {
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path / "config"),
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    async with speaking(tmp_path / "service", SAYS, template=None) as (scene, speaker):
        program = [python, Path(__file__).parent / "mini_swe_program.py"]
        argv = [*program, scene.url, scene.service.base.name, folder]
        async with process(argv, log, env=variables, cwd=tmp_path) as child, asyncio.timeout(180):
            assert await child.wait() == 0, log.read_text()[-4000:]
    told = json.loads(log.read_text().splitlines()[-1])
    assert told == {"exit_status": "Submitted", "calls": 2}
    first, second = [TOKENIZER.decode(one, skip_special_tokens=False) for one in speaker.prompts]
    assert '"name": "bash"' in first and "<tool_response>" not in first
    assert SAYS in second and "first" in second.partition("<tool_response>")[2]
