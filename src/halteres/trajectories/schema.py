"""What clients send, checked once: the requests of the trajectory API, and what the original takes for a number.

A refusal is 422 with `{"detail": [{"type", "loc", "msg"}]}`, as the original's framework words it. Truth values and
numbers written as text are numbers where the schema wants one; only bodies that the strict reader refused are coerced.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import msgspec
from msgspec import inspect

from halteres.config.control import LARGEST_BATCH
from halteres.errors import InvalidData

_INTEGER = re.compile(r"([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?")
_LONGEST = 4300
"""Digits of an integer; Python reads no longer ones."""

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]

Bounded = Annotated[int, msgspec.Meta(ge=0, le=2**31)]

Integer = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]

Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00]*$")]
"""Without NUL, which PostgreSQL has no place for."""

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern="^[ -~]*$")]
"""Of a group; all keys of a run are held in memory."""

Lease = Annotated[float, msgspec.Meta(ge=0.1, le=86400)]
"""Seconds."""

LONGEST_NAME = 4096
"""Characters of an environment's name."""

HEAVIEST = 1e12
"""A weight: times the length of a context it must stay a number."""

_MOST = 2**31

PlaceName = Literal["queued", "buffered", "out", "delivered", "set_aside", "archived"]
"""The names of `records.Place`, which imports this module."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What msgspec raises at bytes that are no JSON, or not of the shape asked for."""

LARGEST_REREAD = 1024 * 1024
"""Bytes of a body that is read a second time, value by value."""

_AT = re.compile(r" - at `\$([^`]*)`$")

_MISSING = re.compile(r"^Object missing required field `(\w+)`")


def coerced(value: Any, kind: inspect.Type) -> Any:
    """A plain value, with what it holds in the place of a number as that number."""
    match kind:
        case inspect.StructType() if isinstance(value, dict):
            return _with_fields(cast("dict[str, Any]", value), kind)
        case inspect.UnionType():
            for each in kind.types:
                value = coerced(value, each)
            return value
        case inspect.ListType() if isinstance(value, list):
            return _items(cast("list[Any]", value), kind.item_type)
        case inspect.IntType() | inspect.FloatType():
            return _number(value, kind)
        case _:
            return value


def _with_fields(value: dict[str, Any], kind: inspect.StructType) -> dict[str, Any]:
    known = {field.encode_name: field.type for field in kind.fields}
    return {name: coerced(item, known[name]) if name in known else item for name, item in value.items()}


def _items(values: list[Any], kind: inspect.Type) -> list[Any]:
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return [coerced(value, kind) for value in values]
    return [_number(value, kind) if type(value) in (str, bool) else value for value in values]


def _number(value: Any, kind: inspect.IntType | inspect.FloatType) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        return value
    text = value.strip()
    return _integer(text) if isinstance(kind, inspect.IntType) else _float(text)


def _integer(text: str) -> int | str:
    found = _INTEGER.fullmatch(text) if len(text) <= _LONGEST else None
    return int(found.group(1)) if found else text


def _float(text: str) -> float | str:
    try:
        return float(text) if text.isascii() else text
    except ValueError:
        return text


class Unprocessable(InvalidData):
    """The body does not fit the route's schema; `problems` is the reply's `detail`."""

    status = 422

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in problems))
        self.problems = problems

    def of_item(self, index: int) -> Unprocessable:
        """The same of one item of a body that is a list."""
        return Unprocessable([{**each, "loc": [*each["loc"][:1], index, *each["loc"][1:]]} for each in self.problems])


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
    """POST /register-env. An unmodified client dies of a refusal, so what cannot be used is brought within bounds."""

    max_token_length: int
    desired_name: str | None = None
    weight: float
    group_size: int  # sequences
    min_batch_allocation: float | None = None

    def __post_init__(self) -> None:
        """A weight that is no finite number is 1, an allocation none; a group has a sequence or more.

        With a group size below 1 the original's client drops every group but those with a size of their own, which
        are whole whatever their size: as they are beside a group size of 1.
        """
        share, name = self.min_batch_allocation, (self.desired_name or "").replace("\0", "")[:LONGEST_NAME]
        self._set("max_token_length", min(max(self.max_token_length, -_MOST), _MOST))
        self._set("desired_name", name.encode(errors="replace").decode() or None)  # half a surrogate pair becomes "?"
        self._set("weight", min(max(self.weight, -HEAVIEST), HEAVIEST) if math.isfinite(self.weight) else 1.0)
        self._set("group_size", min(max(self.group_size, 1), _MOST))
        self._set("min_batch_allocation", share if share is None or math.isfinite(share) else None)

    def _set(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)


class EnvReference(msgspec.Struct, frozen=True):
    """POST /disconnect-env, GET /status-env."""

    env_id: int
    asked_for: Integer | None = None  # ours, of /status-env: batches before one whose `asked_version` is to be told


class PostHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """POST /scored_data."""

    key: Key | None = msgspec.field(name="Idempotency-Key", default=None)


class BatchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """GET /batch: all optional, all ours."""

    policy_version: Bounded | None = None
    after: Integer | None = None  # id of the last batch the trainer holds: that acknowledges it
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0  # seconds to hold the reply until there is a batch
    lease: Lease | None = None  # the batch comes back unless it is acknowledged within; None: its reply delivers it

    @property
    def extended(self) -> bool:
        """The client is one of ours, and may be told more than the original tells."""
        return self.policy_version is not None or self.after is not None or self.lease is not None


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches/{id}/extend, as query or body."""

    lease: Lease


class BatchReference(msgspec.Struct, frozen=True, kw_only=True):
    """The batch that a path names."""

    batch_id: Integer


class GroupReference(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a path names."""

    group_id: Integer


class GroupsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/groups: all optional."""

    after: Integer = 0  # ids above this
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    place: tuple[PlaceName, ...] = ()  # may be repeated; none: all
    env_id: Integer | None = None
    newest: bool = False  # the last `limit` of them instead of the first; the order stays
    bodies: bool = False  # with their elements


def decode(body: bytes, kind: type[T]) -> T:
    """A JSON body as a value of `kind`.

    Raises:
        Unprocessable: it is no JSON, or does not fit.
    """
    try:
        return msgspec.json.decode(body, type=kind, strict=False)
    except UNREADABLE as error:
        return _reread(body, kind, error)


def _reread(body: bytes, kind: type[T], refused: Exception) -> T:
    """As the original reads it: with Python's NaN and Infinity, truth values and padded texts as numbers."""
    try:
        values = json.loads(body) if len(body) <= LARGEST_REREAD else None
    except (ValueError, RecursionError):
        raise refusal(refused, "body") from refused
    if values is None:
        raise refusal(refused, "body") from refused
    return convert(coerced(values, msgspec.inspect.type_info(kind)), kind, "body")


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
    at = _AT.search(text)
    path: list[str | int] = list(where)
    for name, index in re.findall(r"\.([\w-]+)|\[(\d*)\]", at.group(1) if at else ""):
        path.append(name or (int(index) if index else "*"))
    message = text[: at.start()] if at else text
    missing = _MISSING.match(message)
    if missing:
        path.append(missing.group(1))
    kind = "missing" if missing else "value_error"
    return Unprocessable([{"type": kind, "loc": path, "msg": "Field required" if missing else message}])
