"""The tools as a plugin of Hermes Agent, in its toolset `rl`; nothing of Hermes is imported.

Found by the entry point group `hermes_agent.plugins`; the host must have it in `plugins.enabled`. A
handler answers JSON in a text, or, where there is something to see, the host's multimodal envelope.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from halteres.agent.call import call
from halteres.agent.skills import skills
from halteres.agent.table import TOOLS
from halteres.agent.tool import Caller, Tool
from halteres.agent.transports.functions import base64_of, check_rl_api_keys


def register(ctx: Any) -> None:
    """What the host calls, with a context that takes tools and skills."""
    for tool in TOOLS:
        ctx.register_tool(**registration(tool))
    for skill in skills():
        ctx.register_skill(skill.name, skill.file, skill.description)


def register_with(registry: Any) -> None:
    """The same tools by the older contract: `from tools.registry import registry`."""
    for tool in TOOLS:
        registry.register(**registration(tool))


def registration(tool: Tool[...]) -> dict[str, Any]:
    """A tool's arguments for either contract. A plugin context takes no `max_result_size_chars`;
    the host's default is far above our longest answer.
    """
    return {
        "name": tool.name,
        "toolset": "rl",
        "schema": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema(),
        },
        "handler": functools.partial(handle, tool.name),
        "check_fn": check_rl_api_keys,
        "requires_env": [],
        "is_async": True,
        "emoji": "🧪",
    }


async def handle(name: str, args: Mapping[str, Any], **_: Any) -> str | dict[str, Any]:
    """Answer one call; what else the host passes (task_id and the like) does not matter here."""
    reply = await call(name, args, Caller.own())
    text = json.dumps(reply.for_agents, ensure_ascii=False, indent=2)
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        for file in reply.images
        if (data := base64_of(file))
    ]
    if not pictures:
        return text
    return {
        "_multimodal": True,
        "content": [{"type": "text", "text": text}, *pictures],
        "text_summary": text,
    }
