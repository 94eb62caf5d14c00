"""The gateway's own routes: sessions opened, judged and read by whoever owns the service's key.

    POST /gateway/sessions                      open one; its key is shown this once
    POST /gateway/sessions/SESSION/reward       its reward, or its error
    GET  /gateway/sessions/SESSION              its nodes, and what becomes of each
    GET  /gateway/sessions/SESSION/sequences    what is trained on of it

What a program calls is below /g/SESSION (`inference.routes`).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from halteres.errors import InvalidData
from halteres.service.gateway.branches import Branches
from halteres.service.gateway.gateway import Gateway
from halteres.service.gateway.groups import checked_reward, turn_rewards
from halteres.service.gateway.history import History
from halteres.service.gateway.nodes import Node
from halteres.service.gateway.sessions import (
    GatewaySession,
    Opening,
    SessionSampling,
    Verdict,
    named_rewards,
)
from halteres.service.http import answer, body_of, route, tenant_of
from halteres.service.inference.answering import Inference
from halteres.service.inference.fields import Dialect, read

SHORTEST_TTL_S, LONGEST_TTL_S = 1.0, 7 * 86400.0

MOST_SESSIONS_OF_GROUP = 1024

GROUP_NAME = re.compile(r"[!-~]{1,200}")
"""Printable ASCII without blanks: it is part of a key at the trajectory server."""

Seconds = Annotated[float, msgspec.Meta(ge=SHORTEST_TTL_S, le=LONGEST_TTL_S)]

NO_OTHERS = Dialect(refused={}, harmless={})


class OpenSession(msgspec.Struct, kw_only=True):
    """POST gateway/sessions."""

    run: str | None = None
    model: str | None = None
    task: Any = None
    group: str | None = None
    group_size: Annotated[int, msgspec.Meta(ge=2, le=MOST_SESSIONS_OF_GROUP)] | None = None
    group_deadline_s: Seconds | None = None  # from the group's first session on
    pin_policy: bool | int | None = None  # the newest policy version now, or this one
    sampling: SessionSampling = SessionSampling()
    keep_reasoning: bool = False
    train_shaped: bool = False
    ttl_s: Seconds = 3600.0
    metadata: dict[str, Any] = {}


class PostReward(msgspec.Struct, kw_only=True):
    """POST gateway/sessions/SESSION/reward."""

    reward: float | None = None
    rewards: dict[str, float] | None = None
    turn_rewards: list[float] | None = None
    done: bool = True
    error: str | None = None
    code: str = "program_failed"  # of an error


class GatewayRoutes:
    """What opens, judges and reads sessions."""

    def __init__(self, gateway: Gateway, inference: Inference) -> None:
        self._gateway, self._inference = gateway, inference

    def table(self) -> list[BaseRoute]:
        """The routes."""
        return [
            route("/gateway/sessions", self._open, "POST"),
            route("/gateway/sessions/{session_id}", self._view),
            route("/gateway/sessions/{session_id}/sequences", self._sequences),
            route("/gateway/sessions/{session_id}/reward", self._reward, "POST"),
        ]

    def _find(self, request: Request) -> GatewaySession:
        return self._gateway.sessions.find(request.path_params["session_id"], tenant_of(request))

    async def _open(self, request: Request) -> Response:
        body = read(await body_of(request), OpenSession, NO_OTHERS)
        tenant = tenant_of(request)
        _check_group(body)
        opening = Opening(
            run=body.run,
            model=body.model,
            task=body.task,
            group=body.group,
            group_size=body.group_size,
            pin_policy=self._pinned(body, tenant),
            sampling=_checked(body.sampling),
            keep_reasoning=body.keep_reasoning,
            train_shaped=body.train_shaped,
            metadata=body.metadata,
        )
        opened = await self._gateway.open(tenant, opening, body.ttl_s, body.group_deadline_s)
        session = opened.session
        base = f"{request.base_url}g/{session.id}"
        found = {
            "session": session.id,
            "api_key": opened.key,
            "openai_base_url": f"{base}/v1",
            "anthropic_base_url": base,
            "expires": session.expires_at,
        }
        if body.run is not None:
            # For a program whose paths are fixed: there its key names the session.
            found["run_base_url"] = f"{request.base_url}runs/{body.run}/v1"
        return answer(found)

    def _pinned(self, body: OpenSession, tenant: str) -> int | None:
        """The policy version of all calls; None: the newest at each.

        Raises:
            InvalidData: a pin without a run.
            NotFound: there is no such run, or no such weights.
            NotReady, SnapshotLost: the version that is pinned is not there.
        """
        is_pinned = body.pin_policy not in (None, False)
        if body.run == "" or (is_pinned and body.run is None):
            raise InvalidData(
                "The session has no run.",
                "`run` is empty, or `pin_policy` came without one.",
                "Name a run; or leave both out, and the base model answers.",
                param="run",
            )
        if body.run is not None:
            self._inference.check_run(body.run, tenant, body.model)
        if body.model is None and not is_pinned:
            return None  # the run may publish its first weights later
        version = None
        if body.pin_policy is not True and is_pinned:
            version = body.pin_policy
        weights = self._inference.weights(body.model, body.run, tenant, version)
        if not is_pinned:
            return None
        return weights.version

    async def _reward(self, request: Request) -> Response:
        session = self._find(request)
        body = read(await body_of(request), PostReward, NO_OTHERS)
        await self._gateway.judge(session, _verdict(body), done=body.done)
        return answer(await self._gateway.facts_of(session))

    async def _view(self, request: Request) -> Response:
        session = self._find(request)
        facts = await self._gateway.facts_of(session)
        branches = await self._gateway.branches_of(session)
        history = (await self._gateway.capture_of(session)).history
        return answer({**facts, **_nodes_of(history, branches)})

    async def _sequences(self, request: Request) -> Response:
        session = self._find(request)
        facts = await self._gateway.facts_of(session)
        branches = await self._gateway.branches_of(session)
        history = (await self._gateway.capture_of(session)).history
        verdict = session.verdict or Verdict()
        size = 16 * sum(len(branch.tokens) for branch in branches.branches)
        return await self._gateway.in_thread(
            session.tenant,
            size,
            lambda: answer({**facts, **_sequences_of(history, branches, verdict)}),
        )


def _check_group(body: OpenSession) -> None:
    """InvalidData where `group` cannot be used, or what belongs to it came without it."""
    if body.group is None:
        for name in ("group_size", "group_deadline_s"):
            if getattr(body, name) is not None:
                raise InvalidData(
                    f"`{name}` came without a `group`.",
                    "The sessions of one task share a `group`, which is posted once they ended.",
                    "Name one; or leave both out.",
                    param=name,
                )
        return
    if not GROUP_NAME.fullmatch(body.group):
        raise InvalidData(
            "`group` cannot be used.",
            "It has 1 to 200 printable ASCII characters, and no blanks.",
            param="group",
        )
    if body.sampling.temperature == 0:
        raise InvalidData(
            "A group is trained on, and its `temperature` is 0.",
            "Every rollout would be the likeliest answers, and none better than another.",
            "Set one above 0; or leave `group` out to evaluate.",
            param="sampling",
        )


def _checked(sampling: SessionSampling) -> SessionSampling:
    if not 0 <= sampling.temperature <= 100:
        raise InvalidData(
            f"`temperature` is {sampling.temperature}.", "It is 0 to 100.", param="sampling"
        )
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InvalidData("`max_tokens` is below 1.", param="sampling")
    if sampling.seed is not None and not 0 <= sampling.seed < 2**31:
        raise InvalidData(
            f"`seed` is {sampling.seed}.",
            "It is 0 to 2**31 - 1; the calls of the session have seeds that follow from it.",
            "Send another one; or none, and each call's is drawn.",
            param="sampling",
        )
    return sampling


def _verdict(body: PostReward) -> Verdict:
    if body.rewards is not None and not body.rewards:
        raise InvalidData("`rewards` is empty.", "It has a number by name.", param="rewards")
    given = [name for name in ("reward", "rewards", "error") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidData(
            "The episode's end is not clear.", next="Send one of reward, rewards and error."
        )
    if body.error is not None:
        return Verdict(code=body.code, why=body.error)
    rewards = {
        name: checked_reward(value, f"rewards.{name}")
        for name, value in (body.rewards or {}).items()
    }
    reward = body.reward
    if reward is None:
        reward = named_rewards(rewards)
    of_turns = body.turn_rewards
    for value in of_turns or ():
        checked_reward(value, "turn_rewards")
    return Verdict(reward=checked_reward(reward, "reward"), rewards=rewards, turn_rewards=of_turns)


def _nodes_of(history: History, branches: Branches) -> dict[str, Any]:
    """Every node and what becomes of it."""
    nodes = list(history.nodes.values())
    not_trained = Counter[str]()
    for node in nodes:
        if node.id in branches.untrained:
            not_trained[branches.untrained[node.id]] += node.num_sampled
    return {
        "nodes": [_node(node, branches) for node in nodes],
        "roots": [node.id for node in nodes if node.parent is None],
        "branches": [branch.nodes for branch in branches.branches],
        "discarded": [one for one, why in branches.untrained.items() if why == "discarded"],
        "trainable_tokens": branches.num_trained,
        "untrained_tokens": dict(not_trained),
    }


def _node(node: Node, branches: Branches) -> dict[str, Any]:
    return {
        "id": node.id,
        "at": node.at,
        "dialect": node.dialect,
        "harness_session": node.harness_session,
        "parent": node.parent,
        "reused_tokens": node.reused,
        "continues": node.continues,
        "why_root": node.why,
        "prompt_tokens": node.num_prompt,
        "sampled_tokens": node.num_sampled,
        "policy_version": [node.version_min, node.version_max],
        "stop_reason": node.stop_reason,
        "asked": node.asked,
        "shaped_by": node.shaped_by,
        "untrained": branches.untrained.get(node.id),
    }


def _sequences_of(history: History, branches: Branches, verdict: Verdict) -> dict[str, Any]:
    """Every branch, and the turns in order of time."""
    if verdict.turn_rewards is None or len(verdict.turn_rewards) != len(branches.turns):
        verdict = msgspec.structs.replace(verdict, turn_rewards=None)
    sequences = [
        {
            "tokens": branch.tokens,
            "masks": branch.masks,
            "logprobs": branch.logprobs,
            "versions": branch.versions,
            "nodes": branch.nodes,
            "stop_reason": branch.leaf.stop_reason,
            "messages": history.messages_of(branch.leaf),
            "tools": branch.leaf.tools,
        }
        for branch in branches.branches
    ]
    turns = [
        {
            "node": turn.node.id,
            "sequence": turn.sequence,
            "start": turn.start,
            "stop": turn.stop,
            "reward": reward,
        }
        for turn, reward in turn_rewards(branches, verdict)
    ]
    return {"sequences": sequences, "turns": turns}
