"""The trajectory API's messages: what clients send, checked once, and the shapes of what they are
answered.

A refusal is 422 with `{"detail": [{"type", "loc", "msg"}]}`, as the original's framework words it.
Truth values and numbers written as text are numbers where the schema wants one; only bodies that
the strict reader refused are coerced. In replies a field that only our own clients get is absent,
not null, where it does not apply.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType, inspect

from halteres.config.environ import LARGEST_BATCH
from halteres.errors import InvalidData

_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_LONGEST = 4300  # digits of an integer; Python reads no longer ones
T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Bounded = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
# PostgreSQL has no place for NUL
Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00]*$")]
# of a group; held in memory
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern="^[ -~]*$")]
Lease = Annotated[float, msgspec.Meta(ge=0.1, le=86400)]  # seconds
LONGEST_NAME = 4096  # characters of an environment's name
HEAVIEST = 1e12  # a weight: times the length of a context it must stay a number
_MOST = 2**31
# as `records.Place`
PlaceName = Literal["queued", "buffered", "out", "delivered", "set_aside", "archived"]
# no JSON, or not of the shape that is decoded
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
LARGEST_REREAD = 1024 * 1024  # bytes of a body that is read a second time, value by value
_AT = re.compile(r" - at `\$([^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(\w+)`")


def _says(words: str) -> msgspec.Meta:
    """A field's meaning, for the API's description."""
    return msgspec.Meta(description=words)


class Unprocessable(InvalidData):
    """The body does not fit the route's schema; `problems` is the reply's `detail`."""

    status = 422

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems))
        self.problems = problems

    def of_item(self, index: int) -> Unprocessable:
        """The same of one item of a body that is a list."""
        return Unprocessable(
            [{**each, "loc": [*each["loc"][:1], index, *each["loc"][1:]]} for each in self.problems]
        )


# -- requests


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """POST /register: the trainer. The last three fields are our extensions."""

    wandb_group: Text
    wandb_project: Text
    batch_size: Count
    max_token_len: Integer
    checkpoint_dir: Text
    save_checkpoint_interval: Integer
    starting_step: Bounded
    num_steps: Integer
    run_id: Text | None = None
    max_staleness: Bounded | None = None
    updates_per_batch: Count = 1  # policy versions that one batch may make

    def __post_init__(self) -> None:
        """Refuse half a surrogate pair, which an escape of JSON may write: no store has a place for
        it.
        """
        for name in ("wandb_group", "wandb_project", "checkpoint_dir", "run_id"):
            text: str = getattr(self, name) or ""
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ValueError(f"`{name}` holds half a character: it is no valid Unicode")

    def checked(self) -> Self:
        """Itself.

        Raises:
            Unprocessable: no batch of that size can ever be served.
        """
        if self.batch_size <= LARGEST_BATCH:
            return self
        text = f"A batch has at most {LARGEST_BATCH} sequences, not {self.batch_size}."
        raise Unprocessable([{"type": "value_error", "loc": ["body", "batch_size"], "msg": text}])

    @property
    def identity(self) -> tuple[str, ...]:
        """What makes it the same run when it registers again."""
        if self.run_id is not None:
            return (self.run_id,)
        return (self.wandb_project, self.wandb_group, self.checkpoint_dir)


class EnvRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """POST /register-env. An unmodified client dies of a refusal, so what cannot be used is brought
    within bounds.
    """

    max_token_length: int
    desired_name: str | None = None
    weight: float
    group_size: int  # sequences
    min_batch_allocation: float | None = None

    def __post_init__(self) -> None:
        """A weight that is no finite number is 1, an allocation none; a group has a sequence or
        more.

        With a group size below 1 the original's client drops every group but those with a size of
        their own, which are whole whatever their size: as they are beside a group size of 1.
        """
        name = (self.desired_name or "").replace("\0", "")[:LONGEST_NAME]
        weight = 1.0
        if math.isfinite(self.weight):
            weight = min(max(self.weight, -HEAVIEST), HEAVIEST)
        share = self.min_batch_allocation
        if share is not None and not math.isfinite(share):
            share = None
        self._set("max_token_length", min(max(self.max_token_length, -_MOST), _MOST))
        # half a surrogate pair becomes "?"
        self._set("desired_name", name.encode(errors="replace").decode() or None)
        self._set("weight", weight)
        self._set("group_size", min(max(self.group_size, 1), _MOST))
        self._set("min_batch_allocation", share)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)


class EnvReference(msgspec.Struct, frozen=True):
    """POST /disconnect-env, GET /status-env."""

    env_id: int
    # ours, of /status-env: batches before one whose `asked_version` is to be shown
    asked_for: Integer | None = None


class PostHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """POST /scored_data."""

    key: Key | None = msgspec.field(name="Idempotency-Key", default=None)


_OF_WEIGHTS = _says(
    "Version of the trainer's weights; groups that are too far from it are set aside."
)
_AFTER = _says("Id of the last batch the trainer holds, which acknowledges it; 0: it holds none.")
_LEASE = _says(
    "Seconds until the batch comes back unless it is acknowledged; without it, the reply delivers "
    "the batch."
)


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /batch: all optional, all ours."""

    policy_version: Annotated[Bounded | None, _OF_WEIGHTS] = None
    after: Annotated[Integer | None, _AFTER] = None
    wait: Annotated[
        float, msgspec.Meta(ge=0, le=60), _says("Seconds to hold the reply until there is a batch.")
    ] = 0.0
    lease: Annotated[Lease | None, _LEASE] = None

    @property
    def extended(self) -> bool:
        """The client is one of ours: its answer may hold more than the original's."""
        return self.policy_version is not None or self.after is not None or self.lease is not None


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches/{id}/extend, as query or body."""

    lease: Annotated[Lease, _says("Seconds from now until the lease ends; here or in the body.")]


class BatchReference(msgspec.Struct, frozen=True, kw_only=True):
    """The batch that a path names."""

    batch_id: Annotated[Integer, _says("Of a batch that was given under a lease.")]


class GroupReference(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a path names."""

    group_id: Annotated[Integer, _says("Of the group.")]


class GroupsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/groups: all optional."""

    after: Annotated[Integer, _says("Only groups with a larger id.")] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="The first so many.")] = 100
    place: Annotated[
        tuple[PlaceName, ...],
        _says("Only groups that are there; may be repeated. Without it, all."),
    ] = ()
    env_id: Annotated[Integer | None, _says("Only groups of this environment.")] = None
    newest: Annotated[
        bool, _says("The last `limit` groups instead of the first; the oldest of them first.")
    ] = False
    bodies: Annotated[bool, _says("With their tokens: what a trainer gets of them.")] = False


# -- replies

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
    message: Literal["Trainer not registered. Call /register first."] = (
        "Trainer not registered. Call /register first."
    )
    batch: tuple[()] = ()


class BatchTail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GET /batch: what follows its elements, for clients that asked for it."""

    batch_id: int | UnsetType = UNSET
    # of the run, with this batch; none of a lease, which is not counted yet
    step: int | UnsetType = UNSET
    lease_expires: float | UnsetType = UNSET  # unix s
    num_stale: int | UnsetType = UNSET  # groups of the run that were set aside as too old so far
    # of the trainer that registered last; empty where that named none
    run_id: str | UnsetType = UNSET


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


class EnvStatus(msgspec.Struct):
    """GET /status-env; `allowance` and `asked_version` are ours."""

    current_step: int
    queue_size: int = 0
    unallocated_fraction: float = 0.0
    self_queue_size: int = 0
    max_group_size: int = 1
    env_weight: float = 1.0
    allowance: int = 0
    # the trainer's, with its question for the batch after `asked_for`
    asked_version: int | UnsetType = UNSET


class SetAside(msgspec.Struct, frozen=True):
    """Why a group will never be delivered."""

    code: str
    why: str


class Received(msgspec.Struct, frozen=True, omit_defaults=True):
    """POST /scored_data"""

    status: Literal["received"]
    set_aside: SetAside | UnsetType = UNSET


class Buffered(msgspec.Struct, frozen=True, kw_only=True):
    """POST /scored_data of a part of a group: how many sequences its environment has waiting
    now.
    """

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
    """GET /v1/groups/{id}: what is known of a group; `element` is what a trainer gets of it, null
    where it is gone.
    """

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


class Misfit(msgspec.Struct, frozen=True):
    """What is wrong with a request, and where."""

    type: str
    loc: list[str | int]
    msg: str


class Unprocessed(msgspec.Struct, frozen=True):
    """422"""

    detail: list[Misfit]


class Refused(msgspec.Struct, frozen=True):
    """Any other 4xx, and 503."""

    detail: str
    code: str | UnsetType = UNSET


# -- reading


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as a value of `kind`; where it must, with Python's NaN, truth values and padded
    texts as numbers.

    Raises:
        Unprocessable: it is no JSON, or does not fit.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except UNREADABLE as error:
        if len(body) > LARGEST_REREAD:
            raise refusal(error, "body") from error
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            raise refusal(error, "body") from error
        return convert(coerced(values, inspect.type_info(kind)), kind, "body")


def convert(values: Any, kind: type[T], where: str) -> T:
    """Plain values, e.g. of a query string, as a value of `kind`."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise refusal(error, where) from error


def refusal(error: Exception, *where: str | int) -> Unprocessable:
    """msgspec's message as the entry of a `detail` list."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return Unprocessable([{"type": "json_invalid", "loc": [*where], "msg": text}])
    kind, message = "value_error", text
    path: list[str | int] = list(where)
    at = _AT.search(text)
    if at is not None:
        message = text[: at.start()]
        path += _path_of(at.group(1))
    missing = _MISSING.match(message)
    if missing is not None:
        kind, message = "missing", "Field required"
        path.append(missing.group(1))
    return Unprocessable([{"type": kind, "loc": path, "msg": message}])


def _path_of(written: str) -> Iterator[str | int]:
    """The parts of a path as msgspec writes it, `.name[3][...]`; "*" for any item."""
    for name, index in re.findall(r"\.([\w-]+)|\[(\d*)\]", written):
        if name:
            yield name
        elif index:
            yield int(index)
        else:
            yield "*"


def coerced(value: Any, kind: inspect.Type) -> Any:
    """A plain value, with what it holds in the place of a number as that number."""
    match kind:
        case inspect.StructType() if isinstance(value, dict):
            known = {field.encode_name: field.type for field in kind.fields}
            items = cast("dict[str, Any]", value).items()
            return {
                name: coerced(item, known[name]) if name in known else item for name, item in items
            }
        case inspect.UnionType():
            for each in kind.types:
                value = coerced(value, each)
            return value
        case inspect.ListType() if isinstance(value, list):
            values, of = cast("list[Any]", value), kind.item_type
            if isinstance(of, inspect.IntType | inspect.FloatType):  # most are numbers already
                return [coerced(item, of) if type(item) in (str, bool) else item for item in values]
            return [coerced(item, of) for item in values]
        case inspect.IntType() | inspect.FloatType() if isinstance(value, bool):
            return int(value)
        case inspect.IntType() if isinstance(value, str):
            text = value.strip()
            if len(text) <= _LONGEST and (found := _INTEGER.fullmatch(text)):
                return int(found.group(1))
            return text
        case inspect.FloatType() if isinstance(value, str):
            text = value.strip()
            if text.isascii():
                with suppress(ValueError):
                    return float(text)
            return text
        case _:
            return value
