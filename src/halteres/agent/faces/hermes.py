"""The tools as a plugin of Hermes Agent.

Owns: registering them in toolset `rl`, by the plugin's context or by the older registry; registering the skills.
Never: asks for a key, imports anything of Hermes.

Found by the entry point group `hermes_agent.plugins`; the host must have it in `plugins.enabled`. A handler answers
JSON in a text, or, where there is something to see, the host's multimodal envelope.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from halteres.agent.call import call
from halteres.agent.faces.functions import base64_of, own_caller
from halteres.agent.faces.requirements import check_rl_api_keys
from halteres.agent.skills import skills
from halteres.agent.table import TOOLS
from halteres.agent.tool import Tool

TOOLSET: Final = "rl"
EMOJI: Final = "🧪"


class PluginContext(Protocol):
    """What the host hands a plugin; only what is used here."""

    def register_tool(self, **tool: Any) -> Any:
        """Offer a tool."""

    def register_skill(self, name: str, path: Path, description: str = "") -> Any:
        """Offer a skill: the path of its SKILL.md."""


class Registry(Protocol):
    """The host's tool registry, which older ones expect modules to fill."""

    def register(self, **tool: Any) -> Any:
        """Offer a tool."""


def register(ctx: PluginContext) -> None:
    """What the host calls."""
    for tool in TOOLS:
        ctx.register_tool(**registration(tool))
    for skill in skills():
        ctx.register_skill(skill.name, skill.file, skill.description)


def register_with(registry: Registry) -> None:
    """The same tools by the older contract: `from tools.registry import registry`."""
    for tool in TOOLS:
        registry.register(**registration(tool))


def registration(tool: Tool) -> dict[str, Any]:
    """A tool's arguments for either contract. A plugin context takes no `max_result_size_chars`; the host's default
    is far above our longest answer."""
    return {
        "name": tool.name,
        "toolset": TOOLSET,
        "schema": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema()},
        "handler": functools.partial(handle, tool.name),
        "check_fn": check_rl_api_keys,
        "requires_env": [],
        "is_async": True,
        "emoji": EMOJI,
    }


async def handle(name: str, args: Mapping[str, Any], **_: Any) -> str | dict[str, Any]:
    """Answer one call; what else the host passes (task_id and the like) does not matter here."""
    reply = await call(name, args, own_caller("hermes"))
    text = json.dumps(reply.for_agents, ensure_ascii=False, indent=2)
    pictures = [_picture(data) for file in reply.images if (data := base64_of(file))]
    if not pictures:
        return text
    return {"_multimodal": True, "content": [{"type": "text", "text": text}, *pictures], "text_summary": text}


def _picture(data: str) -> dict[str, Any]:
    """A PNG as the host takes it."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
