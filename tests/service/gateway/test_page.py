"""docs/gateway.md: its examples are answered as the page says, and its tables have what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

from halteres.service.gateway.branches import Untrained
from halteres.service.gateway.nodes import Why
from halteres.service.gateway.routes import OpenSession, PostReward
from halteres.service.gateway.sessions import SessionSampling
from service.live_service import LiveService

from .episodes import Episode, user

PAGE = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()


def bodies() -> list[dict[str, Any]]:
    """What the page's commands send."""
    return [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", PAGE)]


def names_in(section: str) -> set[str]:
    """What stands in the first column of a section's tables."""
    part = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(?:sampling\.)?(\w+)[^`]*`", row)}


async def test_the_pages_episode_is_answered_as_the_page_says(scene: LiveService) -> None:
    opening, reward = bodies()
    status, opened = await scene.ask("/gateway/sessions", **opening)
    assert (status, set(opened)) == (
        200,
        {"session", "api_key", "openai_base_url", "anthropic_base_url", "expires"},
    )
    assert all(f'"{name}"' in PAGE for name in opened)
    episode = Episode(scene, opened)
    await episode.chat([user("What is 1 + 1?")])
    await episode.reward(**reward)
    sequences = await episode.sequences()
    for name in ("state", "reward", "sequences", "turns"):
        assert f'"{name}"' in PAGE
        assert name in sequences
    for name in ("tokens", "masks", "logprobs", "versions", "stop_reason", "messages"):
        assert f'"{name}"' in PAGE
        assert name in sequences["sequences"][0]
    assert set(sequences["turns"][0]) == {"node", "sequence", "start", "stop", "reward"}


def test_the_pages_tables_have_every_field_and_every_reason() -> None:
    fields = {*OpenSession.__struct_fields__, *SessionSampling.__struct_fields__} - {"sampling"}
    assert names_in("Opening a session") == fields
    assert names_in("The reward") == set(PostReward.__struct_fields__)
    assert names_in("What is trained on") - {"why_root"} == {*get_args(Why), *get_args(Untrained)}
