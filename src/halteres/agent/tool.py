"""What a tool is: one typed function, its caller, its answer, and the arguments that several tools
share.

Every transport derives what it needs from the function's signature:

    @tool(title="Stop a run", hints=Hints(destructive=True, idempotent=True))
    def rl_stop_training(caller: Caller, run_id: RunId = None, mode: Literal["now", "after_step"] =
        "now") -> Stopped: \"\"\"Stop a run. Safe to repeat: a stopped run answers with its final
        state.\"\"\"
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PrivateAttr,
    ValidationInfo,
    create_model,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, core_schema

from halteres.agent.answer_text import LONGEST
from halteres.config import environ
from halteres.config.settings import OneLine
from halteres.errors import NotReady, UserError
from halteres.next_step import Advice, NextStep, as_call, written
from halteres.runs.directory import RunAmbiguous, RunDirectory, RunNotFound, find_run, known_runs
from halteres.runs.reading.alerts import Alert

P = ParamSpec("P")
T = TypeVar("T")


MOST_WAIT_S = 3600.0  # whatever a caller asks for


class Unset:
    """The default of an argument for which null is a value too."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a client may conclude before it calls (MCP's tool annotations); all four are always
    sent.
    """

    read_only: bool = False
    idempotent: bool = False
    destructive: bool = False
    open_world: bool = False


READS = Hints(read_only=True, idempotent=True)


Sentence = Annotated[
    Advice,
    GetPydanticSchema(
        lambda *_: core_schema.any_schema(
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda advice, info: written(advice, info.context or as_call), info_arg=True
            )
        ),
        lambda *_: {"type": "string"},
    ),
]
"""A text of an answer whose calls are values: each transport writes them in its own way
(`Caller.write`).
"""


class Facts(BaseModel):
    """A part of an answer. Only fields that were given are sent; there may be more than the
    declared ones.
    """

    model_config = ConfigDict(extra="allow")


class Result(Facts):
    """A tool's answer. `next` is one line: the call, or the calls, that make sense now."""

    longest: ClassVar[int] = LONGEST  # characters; what is beyond is cut
    # fields with a secret that the tool made for its caller: it is in the answer as it is
    handed_over: ClassVar[tuple[str, ...]] = ()

    next: Sentence
    _images: tuple[Path, ...] = PrivateAttr(default=())

    def showing(self, *images: Path) -> Any:
        """The same answer with PNG files to look at; transports that cannot show one give its
        path.
        """
        self._images = images
        return self

    @property
    def images(self) -> tuple[Path, ...]:
        """PNG files that belong to the answer."""
        return self._images


class Arguments(BaseModel):
    """Base of every tool's argument model: types are strict, and unknown names and long texts are
    refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=500)


class LongArguments(Arguments):
    """Base for a tool that takes prompts; each of its other texts has a limit of its own."""

    model_config = ConfigDict(str_max_length=32_000)


# calls of one tool that run at once for all callers without the token together
OPEN_CALLS: Final = 2


class Busy(NotReady):
    """More calls at once than a caller may hold; nothing was begun."""

    code = "busy"


class TokenNeeded(UserError):
    """More than a caller without the token may ask for."""

    code, status = "unauthorized", 401

    @classmethod
    def of(cls, what: str, why: str, **details: Any) -> TokenNeeded:
        """The error with the words that all such refusals share, and how to send the token."""
        # An address with a login in it would be struck out of the answer.
        how = (
            "Send the token, which is in HALTERES_HOME/token: as the header `Authorization: Bearer "
            "TOKEN`, or as the password in the address of RL_API_URL."
        )
        return cls(what, f"{why}, and every user of this machine can ask here.", how, **details)


class OpenThreads:
    """The threads of callers without the token: their waiting calls hold up neither the server nor
    other tools.
    """

    def __init__(self) -> None:
        self._places = defaultdict[str, threading.Semaphore](
            lambda: threading.Semaphore(OPEN_CALLS)
        )
        # threads are made at need; the bound is `OPEN_CALLS`
        self._pool = ThreadPoolExecutor(64, "open call")

    async def run(self, tool: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run the function in a thread. Raises Busy where as many calls of this tool run
        already.
        """
        places = self._places[tool]
        if not places.acquire(blocking=False):
            raise Busy(
                f"{OPEN_CALLS} calls of {tool} run already for callers without the token.",
                "More are not begun.",
                "call it again in some seconds; with the token, which is in HALTERES_HOME/token, "
                "it runs at once",
            )
        work = self._pool.submit(function, *arguments)
        # The place is free when the thread is done, not when its call is given up.
        work.add_done_callback(lambda _: places.release())
        return await asyncio.wrap_future(work)


class ShownAlerts:
    """Which alerts one client was shown whole: of every run and rule the last raising."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[int, int]] = {}

    def has(self, run_id: str, alert: Alert) -> bool:
        """Whether this raising of the alert was shown."""
        return self._last.get((run_id, alert.rule)) == (alert.step, alert.times)

    def add(self, run_id: str, alert: Alert) -> None:
        """It has been shown."""
        self._last[run_id, alert.rule] = (alert.step, alert.times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls a tool."""

    draft: str = "default"  # handle of the draft it works on, unless the call names one
    open_threads: OpenThreads | None = None  # of a caller without the token
    write: Callable[[NextStep], str] = as_call  # how its answers name a call
    # of one client's connection; None: the transport cannot tell one client from another
    shown_alerts: ShownAlerts | None = None
    # seconds that a call of this client may wait; None: it is no client that is known by name
    host_wait_s: float | None = None
    # whether nothing stands between the call and its caller that limits how long it takes
    has_no_host: bool = False
    # whether answers are as long as they are: the page reads them, and no model does
    takes_all: bool = False

    @classmethod
    def own(
        cls, write: Callable[[NextStep], str] = as_call, *, has_no_host: bool = False
    ) -> Caller:
        """A caller from within this process, on the draft of HALTERES_SESSION or the default
        one.
        """
        draft = environ.agent_session() or "default"
        return cls(draft=draft, write=write, has_no_host=has_no_host)

    @property
    def is_open(self) -> bool:
        """Whether it came without the token (`open_access` says what it may)."""
        return self.open_threads is not None

    @property
    def longest_wait_s(self) -> float:
        """How long a call that is proposed waits at most, in seconds: what is set for this process
        goes first.
        """
        return environ.longest_wait_s(self.host_wait_s or environ.USUAL_WAIT_S)

    @property
    def most_wait_s(self) -> float:
        """How long a call that is made may wait, in seconds. On the command line there is no host
        that would break it off.
        """
        if self.has_no_host:
            return environ.longest_wait_s(MOST_WAIT_S)
        return self.longest_wait_s

    async def in_thread(self, tool: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run what reads files or asks an environment, off the event loop."""
        if self.open_threads is None:
            return await asyncio.to_thread(function, *arguments)
        return await self.open_threads.run(tool, function, *arguments)


class _Schema(GenerateJsonSchema):
    """Leaves out a default that JSON has no word for (UNSET)."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}


@cache
def schema_of(arguments: type[Arguments]) -> dict[str, Any]:
    """JSON Schema of a tool's argument model."""
    return arguments.model_json_schema(schema_generator=_Schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(Generic[P]):
    """One tool, as every transport sees it."""

    name: str
    title: str
    description: str  # for a model: what it does, when to use it; the function's docstring
    hints: Hints
    arguments: type[Arguments]
    result: type[Result]
    # answers a Result, or an awaitable of one where it waits
    function: Callable[Concatenate[Caller, P], Any]

    def input_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        schema = schema_of(self.arguments)
        fields = {name: _brief(field) for name, field in schema.get("properties", {}).items()}
        required = schema.get("required", [])
        return {
            "type": "object",
            "properties": fields,
            "required": required,
            "additionalProperties": False,
        }

    def output_schema(self) -> dict[str, Any]:
        """JSON Schema of a success: the keys that are always there. An error is exempt from it."""
        schema = self.result.model_json_schema(schema_generator=_Schema)
        fields = {
            name: {k: v for k, v in field.items() if k != "title"}
            for name, field in schema["properties"].items()
        }
        shared = {name: schema[name] for name in ("$defs", "required") if name in schema}
        return {"type": "object", "properties": fields, **shared, "additionalProperties": True}


def _brief(field: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without its title, and without null where it stands for "not given": that
    doubles the length.
    """
    facts = {
        name: value
        for name, value in field.items()
        if name != "title" and (name, value) != ("default", None)
    }
    options = [option for option in facts.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1 and "default" in field:
        facts.pop("anyOf")
        return {**options[0], **facts}
    return facts


def tool(
    *, title: str, hints: Hints, arguments: type[Arguments] = Arguments
) -> Callable[[Callable[Concatenate[Caller, P], Any]], Tool[P]]:
    """Make a tool of a function whose first parameter is the caller; its argument model is derived
    from `arguments`.
    """

    def make(function: Callable[Concatenate[Caller, P], Any]) -> Tool[P]:
        types = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        fields: dict[str, Any] = {
            parameter.name: (
                types[parameter.name],
                ... if parameter.default is inspect.Parameter.empty else parameter.default,
            )
            for parameter in parameters
        }
        return Tool(
            name=function.__name__,
            title=title,
            description=inspect.getdoc(function) or "",
            hints=hints,
            arguments=create_model(f"{function.__name__}_arguments", __base__=arguments, **fields),
            result=types["return"],
            function=function,
        )

    return make


def _check_lengths(names: list[str] | None) -> list[str] | None:
    if any(len(name) > 100 for name in names or ()):
        raise PydanticCustomError(
            "name_too_long", "a name has {most} characters at most", {"most": 100}
        )
    return names


ShortNames = AfterValidator(_check_lengths)


RunName = Annotated[
    OneLine | None,
    Field(description="readable name of the run", max_length=80),
]

RunId = Annotated[
    str | None,
    Field(description="run id (a unique beginning will do) or name; default: the only active run"),
]
RunIds = Annotated[
    list[str] | None,
    ShortNames,
    Field(min_length=1, max_length=8, description="several runs, instead of run_id"),
]
Draft = Annotated[
    str | None, Field(description="handle of a draft, from an earlier answer; default: your own")
]
Changes = Annotated[
    dict[str, Any] | None,
    Field(
        description=(
            'settings to change, all or none: {"total_steps": 60, "learning_rate": 0.001, '
            '"stop_when": 0.9}'
        )
    ),
]


class CutShort(float):
    """Seconds of a wait that was to be longer than the caller's host lets a call take."""


def wait_cut(wait_s: float) -> str:
    """What an answer says of a wait that went by without what was waited for: where the host's
    limit made it shorter than it was asked for; else nothing.
    """
    if not isinstance(wait_s, CutShort):
        return ""
    return f"your host lets a call wait {wait_s:g} s at most: call again to wait on"


def _within_limit(wait_s: float, info: ValidationInfo[Caller | None]) -> float:
    limit_s = (info.context or Caller()).most_wait_s
    if wait_s > limit_s:
        return CutShort(limit_s)
    return wait_s


WaitSeconds = Annotated[
    float,
    Field(
        ge=0,
        le=MOST_WAIT_S,
        description="seconds to wait; 0 answers at once; your host's limit, mostly 50, holds",
    ),
    # The agent's client would break off a longer call.
    AfterValidator(_within_limit),
]


def chosen_run(run_id: str | None) -> RunDirectory:
    """The run of this id (or unique beginning of one, or name); without one, the only active run.

    Raises:
        RunNotFound: no such run, or none is active; `did_you_mean`, `active_runs`.
        RunAmbiguous: several fit, or several are active; `active_runs`.
    """
    if run_id:
        return find_run(run_id)
    runs = known_runs()
    active = [run for run in runs if not run.ended]
    if len(active) == 1:
        return RunDirectory(active[0].path)
    shown = [
        f"{run.run_id} ({run.facts.environment}, {run.facts.status})"
        for run in (active or runs)[:8]
    ]
    listed = ", ".join(shown) + (", ..." if len(active or runs) > 8 else "")
    if active:
        raise RunAmbiguous(
            f"{len(active)} runs are active: {listed}.",
            "Say which one by run_id.",
            active_runs=[run.run_id for run in active],
        )
    raise RunNotFound(
        "No run is active, and no run_id was given.",
        f"The newest are {listed}." if runs else "There are no runs yet.",
        "" if runs else NextStep("rl_list_environments"),
        did_you_mean=runs[0].run_id if runs else None,
        active_runs=[],
    )
