"""What the server answers: the shapes that a client can rely on.

A field that only our own clients are told is absent, not null, where it does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from halteres.trajectories.schema import PlaceName

Pair = Annotated[Sequence[int], msgspec.Meta(min_length=2, max_length=2)]


class Message(msgspec.Struct, frozen=True):
    """GET /"""

    message: str


class Registered(msgspec.Struct, frozen=True):
    """POST /register: 128 bits, as a bare number."""

    uuid: int


class EnvRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """POST /register-env, once a trainer has asked for a batch."""

    status: Literal["success"] = "success"
    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class EnvWaits(msgspec.Struct, frozen=True):
    """POST /register-env, before."""

    status: Literal["wait for trainer to start"] = "wait for trainer to start"


class Succeeded(msgspec.Struct, frozen=True):
    """POST /disconnect-env."""

    status: Literal["success"] = "success"


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """POST /disconnect-env of nobody, with status 200."""

    status: Literal["failure"] = "failure"
    error: str


class WandbInfo(msgspec.Struct, frozen=True):
    """GET /wandb_info; nulls before a trainer registers."""

    group: str | None = None
    project: str | None = None


class Info(msgspec.Struct, frozen=True):
    """GET /info; -1 before a trainer registers."""

    batch_size: int = -1
    max_token_len: int = -1


class NotRegistered(msgspec.Struct, frozen=True):
    """GET /batch, before a trainer registers."""

    status: Literal["error"] = "error"
    message: Literal["Trainer not registered. Call /register first."] = "Trainer not registered. Call /register first."
    batch: tuple[()] = ()


class BatchTail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GET /batch: what follows its elements, for clients that asked for it."""

    batch_id: int | UnsetType = UNSET
    step: int | UnsetType = UNSET  # of the run, with this batch; none of a lease, which is not counted yet
    lease_expires: float | UnsetType = UNSET  # unix s
    num_stale: int | UnsetType = UNSET  # groups of the run that were set aside as too old so far
    run_id: str | UnsetType = UNSET  # of the trainer that registered last; empty where that named none


class BatchAnswer(BatchTail, frozen=True, kw_only=True):
    """GET /batch: groups of exactly batch_size sequences, or null."""

    batch: list[dict[str, Any]] | None


class Settled(msgspec.Struct, frozen=True):
    """POST /v1/batches/{id}/ack, /nack, /extend."""

    batch_id: int
    standing: Literal["delivered", "returned", "leased"]
    step: int | UnsetType = UNSET  # of the run, with this batch
    lease_expires: float | UnsetType = UNSET  # unix s


class Status(msgspec.Struct, frozen=True):
    """GET /status"""

    current_step: int
    queue_size: int


class EnvStatus(msgspec.Struct, frozen=True):
    """GET /status-env; `allowance` and `asked_version` are ours."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float
    allowance: int | UnsetType = UNSET
    asked_version: int | UnsetType = UNSET  # the trainer's, with its question for the batch after `asked_for`


class SetAside(msgspec.Struct, frozen=True):
    """Why a group will never be delivered."""

    code: str
    why: str


class Received(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /scored_data"""

    status: Literal["received"]
    set_aside: SetAside | UnsetType = UNSET


class Buffered(msgspec.Struct, frozen=True, kw_only=True):
    """POST /scored_data of a part of a group: how many sequences its environment has waiting now."""

    status: Literal["buffered"] = "buffered"
    buffer_size: int


class ListReceived(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /scored_data_list"""

    status: Literal["received"]
    groups_processed: int
    buffered: int | UnsetType = UNSET
    last_buffer_size: int | UnsetType = UNSET
    set_aside: list[str] | UnsetType = UNSET


class Group(msgspec.Struct, frozen=True):
    """GET /v1/groups/{id}: what is known of a group; `element` is what a trainer gets of it, null where it is gone."""

    id: int
    env_id: int | None
    size: int  # sequences
    num_bytes: int  # of the element
    received_at: float  # unix s
    place: PlaceName
    policy_version: Pair | None  # smallest and largest
    reason: str | None  # code, where set aside, or served with a flaw
    why: str | None
    batch_id: int | None
    element: msgspec.Raw | UnsetType = UNSET


class Groups(msgspec.Struct, frozen=True):
    """GET /v1/groups: `next` is the `after` of the page behind, null on the last."""

    groups: list[Group]
    next: int | None


class Reason(msgspec.Struct, frozen=True):
    """Why there is no batch; more facts may follow."""

    code: str
    sentence: str


class Diagnostics(msgspec.Struct, frozen=True):
    """GET /v1/diagnostics; more follows."""

    registered: bool
    step: int
    batch_ready: bool
    reasons: list[Reason]
    environments: list[dict[str, Any]]


class Example(msgspec.Struct, frozen=True):
    """GET /latest_example: an element, or empty lists."""

    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    scores: list[float] = []
    advantages: Any = []
    ref_logprobs: Any = []
    generation_params: Any = []
    inference_logprobs: Any = []
    messages: Any = []
    images: Any = []


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a request, and where."""

    type: str
    loc: list[str | int]
    msg: str


class Unprocessed(msgspec.Struct, frozen=True):
    """422"""

    detail: list[Problem]


class Refused(msgspec.Struct, frozen=True):
    """Any other 4xx, and 503."""

    detail: str
    code: str | UnsetType = UNSET
