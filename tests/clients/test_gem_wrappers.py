"""Our wrappers beside those of the real GEM 0.1.0, around the same game and with the same search
server.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from environments.games.episodes import GEM
from environments.games.peers import Markup, running_search_server

from halteres.environments.games import make
from halteres.environments.games.wrappers import PYTHON_TOOLS, wrap

pytestmark = pytest.mark.clients

CALL = "I look it up. <search>a number</search> Then"
GAME = "game:GuessTheNumber-v0-hard"
ACTIONS = ["It is \\boxed{3}\n", CALL, CALL, "\\boxed{99}", CALL, CALL, CALL, "\\boxed{40}", CALL]
"""The last call comes after the fifth, and is no action either; without a tool, none of them is."""

BLOCKS = [
    "It is \\boxed{3}",
    "Let me see. <python>\nprint(6 * 7)\n</python> So it is.",
    "```python\nprint('first')\n``` or <python>print('second')</python>",
    "<python>print(1)\n[][2]</python>",
    "<python>...</python>",
    "\\boxed{4}",
    "```\npython\nimport sys\nprint('aside', file=sys.stderr)\nraise SystemExit(3)\n```",
    "<python>print('a sixth')</python>",
]
"""The last comes after the fifth use, and is no action either."""

WRAPPERS = [
    f"{tool}{view}{tracking}"
    for tool in ("", "search_tool,", "search_tool_no_int_reward,")
    for view in ("concat", "concat_with_action", "concat_chat", "concat_chat_on_reset")
    for tracking in ("", ",episode_tracking")
]


def plain(result: tuple[Any, ...]) -> list[Any]:
    """As it comes out of a file."""
    return json.loads(json.dumps(list(result)))


def known(info: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Ours has more; what GEM tells has to be there."""
    return {key: info[key] for key in keys}


def test_blocks_of_python_are_run_shown_and_paid_as_by_gem(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    names = [f"{tool},concat_with_action" for tool in PYTHON_TOOLS]
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"id": GAME, "seed": 5, "actions": BLOCKS, "wrappers": names}))
    python = client_python(*GEM)
    command = [python, Path(__file__).with_name("gem_wrapped.py"), asked, answered]
    # it starts whatever is called `python`
    variables = {"SEARCH_URL": "http://127.0.0.1:9", "PATH": str(Path(python).parent)}
    subprocess.run(command, check=True, env=variables, timeout=300, cwd=tmp_path)
    for name, gems in json.loads(answered.read_text()).items():
        env = wrap(make(GAME), name)
        ours = [env.reset(5), *(env.step(action) for action in BLOCKS), env.reset(5)]
        for our, gem in zip(map(plain, ours), gems, strict=True):
            assert [*our[:-1], known(our[-1], gem[-1])] == gem, name


def test_every_list_of_wrappers_shows_what_gem_shows(
    client_python: Callable[..., str], tmp_path: Path
) -> None:
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"id": GAME, "seed": 5, "actions": ACTIONS, "wrappers": WRAPPERS}))
    with running_search_server() as server:
        command = [client_python(*GEM), Path(__file__).with_name("gem_wrapped.py"), asked, answered]
        subprocess.run(
            command, check=True, env={"SEARCH_URL": server.url}, timeout=300, cwd=tmp_path
        )
        for names, gems in json.loads(answered.read_text()).items():
            env = wrap(make(GAME), names, chat=Markup(), search_url=server.url)
            ours = [env.reset(5), *(env.step(action) for action in ACTIONS), env.reset(5)]
            for our, gem in zip(map(plain, ours), gems, strict=True):
                assert [*our[:-1], known(our[-1], gem[-1])] == gem, names
