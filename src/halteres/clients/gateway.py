"""The gateway's control plane: sessions that are opened, read and ended. Each is one episode of a
program that knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halteres.clients.json_client import JsonClient

RUNS = "/runs/"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """A session, and what its program is given."""

    id: str
    api_key: str
    openai_base_url: str  # ends in /v1
    anthropic_base_url: str
    # for programs whose paths are fixed, of a session of a run: there the key names the session
    run_base_url: str | None
    expires_at: float  # unix s

    @property
    def variables(self) -> dict[str, str]:
        """What the clients of both APIs read from the environment."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


class GatewayClient(JsonClient):
    """The gateway of a training service.

    Args:
        base_url: of the service, or of a run there (…/runs/RUN/v1), whose policy then answers.
        api_key: the operator's.
    """

    def __init__(self, base_url: str, *, api_key: str = "", ready_within_s: float = 120.0) -> None:
        root, self.run = base_url.rstrip("/").removesuffix("/v1"), ""
        if RUNS in root:
            root, _, self.run = root.rpartition(RUNS)
        super().__init__(root, api_key=api_key, timeout_s=120.0, ready_within_s=ready_within_s)

    async def open(
        self,
        task: Any,
        *,
        model: str | None = None,
        pin_policy: bool | int | None = None,
        group: str | None = None,
        group_size: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        ttl_s: float,
    ) -> OpenSession:
        """A new session. Raises as `JsonClient.post_when_ready`."""
        body = {
            "run": self.run or None,
            "model": model,
            "pin_policy": pin_policy,
            "task": task,
            "group": group,
            "group_size": group_size,
            "sampling": sampling,
            "ttl_s": ttl_s,
        }
        given = {name: value for name, value in body.items() if value is not None}
        opened = await self.post_when_ready("/gateway/sessions", given)
        return OpenSession(
            id=opened["session"],
            api_key=opened["api_key"],
            openai_base_url=opened["openai_base_url"],
            anthropic_base_url=opened["anthropic_base_url"],
            run_base_url=opened.get("run_base_url"),
            expires_at=opened["expires"],
        )

    async def session(self, session: str) -> dict[str, Any]:
        """What the session holds so far."""
        return await self.get(f"/gateway/sessions/{session}")

    async def sequences(self, session: str) -> dict[str, Any]:
        """What would be trained on: `sequences`, and their `turns`."""
        return await self.get(f"/gateway/sessions/{session}/sequences")

    async def post_reward(self, session: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """End the session with its reward, or an error."""
        return await self.post_when_ready(f"/gateway/sessions/{session}/reward", body)
