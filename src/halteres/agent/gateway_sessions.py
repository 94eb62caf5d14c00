"""The tools on gateway sessions, rl_open_session and rl_post_reward: the caller plays an episode
with a program of its own, and a service captures it.

The service is a run's, which is asked with the run's key, or one that is named, which is asked with
TINKER_API_KEY. Neither key is in an answer; the session's own key is, for its program.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from halteres.agent.answer_text import nonempty
from halteres.agent.open_access import check_gateway
from halteres.agent.tool import Caller, Hints, Result, RunId, chosen_run, tool
from halteres.clients.gateway import GatewayClient
from halteres.clients.trajectories.address import Address
from halteres.config import environ
from halteres.errors import Conflict, InvalidData, NotReady, UserError
from halteres.next_step import Advice, NextStep, Placeholder
from halteres.runs.servers import servers_of

NO_LONGER_THERE = (404, 410)
"""What a service answers of a session that was never opened there, or that is over."""

ANSWERS_WITHIN_S = 24.0
"""How long a service is waited for: MCP clients give a call up after 60 s."""

Service = Annotated[
    str | None,
    Field(
        description="address of a training service to ask instead of a run's; its base model "
        "answers, or that run's policy in http://HOST:PORT/runs/RUN"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A service, and how a call names it."""

    url: str
    key: str = field(repr=False)
    named: Mapping[str, str]  # arguments of a call that means the same service
    sampling: Mapping[str, Any]
    run_id: str | None = None

    def client(self) -> GatewayClient:
        return GatewayClient(self.url, api_key=self.key, ready_within_s=ANSWERS_WITHIN_S)

    def open_another(self, **arguments: Any) -> NextStep:
        """The call that opens a session here."""
        named = {**arguments, **self.named}
        return NextStep.of("rl_open_session", task=Placeholder("task"), **named)


def _place_of(caller: Caller, run_id: str | None, service: str | None) -> _Place:
    """The service that a call means.

    Raises:
        TokenNeeded: the caller has none. UserError, InvalidConfig: it means two, or no address.
        Conflict, NotReady: the run has ended, or is starting.
    """
    if caller.is_open:
        check_gateway()
    if service is not None:
        if run_id is not None:
            raise UserError(
                "run_id and service name two services.",
                "",
                "Leave one of them out.",
                field="service",
            )
        Address.of(service)  # whether it is one
        key = environ.api_key() or ""
        return _Place(url=service, key=key, named={"service": service}, sampling={})
    run = chosen_run(run_id)
    found, state = run.run_id, run.state()
    if state.kind != "rl":
        raise UserError(
            f"Run {found} has no policy to sample from.",
            "It trains a reward model.",
            NextStep("rl_list_runs"),
        )
    if state.is_relayed:
        raise Conflict(
            f"Run {found} has no gateway.",
            "Its service speaks the Tinker API alone.",
            "Start a run without TINKER_BASE_URL: it has a service of its own.",
        )
    if state.terminal and not state.service_given:
        raise Conflict(
            f"Run {found} has ended, and its service with it.",
            f"Its status is {state.status}.",
            NextStep("rl_start_training", {"resume_from": found}),
        )
    server = servers_of(run).service
    if server is None:
        raise NotReady(
            f"Run {found} has no service yet.",
            "It is starting.",
            NextStep.of("rl_check_status", found, wait_s=45, until="running"),
        )
    return _Place(
        url=f"{server.url}/runs/{found}/v1",
        key=server.key or "",
        named={"run_id": found},
        # what the run's trainer takes for granted
        sampling={"temperature": run.settings().env.get("temperature", 1.0)},
        run_id=found,
    )


class SessionOpened(Result):
    """A session, and what its program is given."""

    # The key opens nothing but its session, and is made for the program that the caller starts.
    handed_over: ClassVar[tuple[str, ...]] = ("api_key",)

    session: str
    api_key: str
    openai_base_url: str  # OPENAI_BASE_URL
    anthropic_base_url: str  # ANTHROPIC_BASE_URL
    run_base_url: str = ""  # for a program whose paths are fixed: there the key names the session
    expires: float  # unix seconds
    run_id: str = ""


@tool(title="Open a session for a program's episode", hints=Hints())
async def rl_open_session(
    caller: Caller,
    run_id: RunId = None,
    task: Annotated[
        Any, Field(description="what the episode is about: any JSON, kept with the session")
    ] = None,
    group: Annotated[
        str | None,
        Field(
            max_length=200,
            description="the same name for all episodes of one task, which are trained on together",
        ),
    ] = None,
    group_size: Annotated[
        int | None, Field(ge=2, le=1024, description="how many sessions the group will have")
    ] = None,
    pin_policy: Annotated[
        bool | int | None,
        Field(
            description="true: the policy of now answers every call; a number: that version; "
            "default: the newest at each call"
        ),
    ] = None,
    ttl_s: Annotated[
        float,
        Field(ge=1, le=604_800, description="seconds until it fails, if no reward was posted"),
    ] = 3600,
    service: Service = None,
) -> SessionOpened:
    """Open a session in which a program plays one episode with the policy of a run. Start the
    program with the answer's address and key (OPENAI_BASE_URL, OPENAI_API_KEY, or ANTHROPIC_…),
    then say with rl_post_reward what the episode was worth.
    """
    place = await asyncio.to_thread(_place_of, caller, run_id, service)
    if (group is None) != (group_size is None):
        raise UserError(
            "group and group_size go together.", "", "Give both, or neither.", field="group"
        )
    async with place.client() as gateway:
        opened = await gateway.open(
            task,
            group=group,
            group_size=group_size,
            pin_policy=pin_policy,
            sampling=place.sampling,
            ttl_s=ttl_s,
        )
    reward = Placeholder("reward")
    return SessionOpened(
        session=opened.id,
        api_key=opened.api_key,
        openai_base_url=opened.openai_base_url,
        anthropic_base_url=opened.anthropic_base_url,
        **nonempty(run_base_url=opened.run_base_url, run_id=place.run_id),
        expires=opened.expires_at,
        next=(
            "let the program play, then ",
            NextStep.of("rl_post_reward", opened.id, reward=reward, **place.named),
        ),
    )


class RewardPosted(Result):
    """A session that has ended, and what of it is trained on."""

    session: str
    state: str  # scored, failed
    reward: float | None = None
    failure: dict[str, str] = {}  # code, why
    # name, size, sessions so far, state (gathering, pending, posted, dropped) and why
    group: dict[str, Any] = {}
    calls: int  # sampled answers
    sequences: int
    trained_tokens: int
    untrained_tokens: dict[str, int] = {}  # why -> tokens


@tool(title="Say what an episode was worth", hints=Hints(idempotent=True))
async def rl_post_reward(
    caller: Caller,
    session: Annotated[
        str, Field(pattern=r"^[\w-]{1,100}$", description="its name, from rl_open_session")
    ],
    reward: Annotated[float | None, Field(description="what the episode was worth")] = None,
    rewards: Annotated[
        dict[str, float] | None,
        Field(description='instead: named parts, of which the reward is the sum: {"correct": 1}'),
    ] = None,
    error: Annotated[
        str | None,
        Field(description="instead: why the episode failed; it is not trained on then"),
    ] = None,
    run_id: RunId = None,
    service: Service = None,
) -> RewardPosted:
    """End a session with its reward, its rewards by name, or an error. Safe to repeat with the
    same reward; another one is refused. Answers how much of the episode is trained on.
    """
    place = await asyncio.to_thread(_place_of, caller, run_id, service)
    given = nonempty(reward=reward, rewards=rewards, error=error)
    async with place.client() as gateway:
        try:
            await gateway.post_reward(session, given)
            view = await gateway.session(session)
        except InvalidData as refused:
            if refused.details.get("answered") in NO_LONGER_THERE:
                refused.next = ("name a session that is open, or open one: ", place.open_another())
            raise
    names = ("reward", "failure", "group")
    return RewardPosted(
        session=session,
        state=view["state"],
        **nonempty(**{name: view.get(name) for name in names}),
        calls=len(view["nodes"]),
        sequences=len(view["branches"]),
        trained_tokens=view["trainable_tokens"],
        **nonempty(untrained_tokens=view["untrained_tokens"]),
        next=_next(place, view),
    )


def _next(place: _Place, view: Mapping[str, Any]) -> Advice:
    group = view.get("group")
    if group is not None and group["state"] == "gathering":
        if group["sessions"] == group["size"]:
            return "post what the group's other sessions were worth"
        another = place.open_another(group=group["name"], group_size=group["size"])
        return "open the group's other sessions: ", another
    if group is not None and place.run_id is not None:
        return NextStep.of("rl_check_status", place.run_id, wait_s=45, until="change")
    if view.get("failure", {}).get("code") == "nothing_sampled":
        return "see that the program calls its session's address, then ", place.open_another()
    path = f"/gateway/sessions/{view['session']}/sequences"
    return f"what is trained on is at the service: GET {path}"
