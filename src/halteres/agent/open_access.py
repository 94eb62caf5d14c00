"""What a caller without the token may set, start and spend; every user of the machine is one.

Owns: the refusals of such a caller, and how much it may have under way at once.
Never: judges a text before it is read as its setting reads it.
Guarantees: what a refused call names was neither run, opened nor asked. A draft is checked whole,
also what was set with the token. A text is judged as its setting's type reads it, also where a list
or an object came as YAML.

Everything here is said of a caller without the token: ask `Caller.is_open` first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel

from halteres.agent.tool import Busy, TokenNeeded
from halteres.config import environ
from halteres.config.discovery import is_path
from halteres.config.edits import ANYTHING, Edit, SettingSchema
from halteres.config.files import NOTHING_GIVEN, Sources
from halteres.config.gem_ids import family_of
from halteres.config.program import describe, program_of
from halteres.config.reach import REACHES, Reach
from halteres.config.settings import ENV_WIRING, SECTIONS, RunSettings, Settings, wiring_of
from halteres.documents import DocumentError, TooLarge, parse_yaml
from halteres.environments.config import BaseEnvConfig
from halteres.models import known_folder, model_folder, names_of
from halteres.runs.planning.models import models_home
from halteres.runs.reading.named_weights import CONFIG

USED_AS_YOU: Final = "What it names would be run, read, written or asked as this server's user"


def check_environment(environment: str) -> None:
    """Refuse an environment by its file, which would be run. Raises TokenNeeded."""
    if is_path(environment):
        what = "Without the token an environment is chosen by its name, not by its file."
        raise TokenNeeded.of(what, USED_AS_YOU, field="environment")


def check_models(models: Iterable[str]) -> None:
    """Refuse a model, or weights, by a folder. Raises TokenNeeded."""
    for name in models:
        if not name.startswith("tinker://") and names_a_folder(name):
            raise TokenNeeded.of(
                "Without the token a model is named, or a run, or tinker:// weights: not a folder.",
                USED_AS_YOU,
                field="models",
            )


def check_keys(variables: Iterable[str]) -> None:
    """Refuse what would be given secrets of the operator's, by the names of their variables.

    Raises:
        TokenNeeded: one of them is set.
    """
    spent = [name for name in variables if environ.is_set(name)]
    if spent:
        why = f"Others are asked with this server's {' and '.join(spent)}"
        raise TokenNeeded.of("Without the token nothing is started that spends a key.", why)


def check_gateway() -> None:
    """Refuse gateway sessions, whose rewards are trained on. Raises TokenNeeded."""
    why = "A session samples with the run's key, and its reward is what the run is trained on"
    raise TokenNeeded.of("Without the token no gateway session is opened or ended.", why)


def check_file() -> None:
    """Refuse a training on a file, which would be read. Raises TokenNeeded."""
    what = "Without the token nothing is trained on a file."
    raise TokenNeeded.of(what, USED_AS_YOU, field="data")


def check_number(things: str, number: int, most: int) -> None:
    """Refuse one more where there are as many as such callers may have. Raises Busy."""
    if number >= most:
        raise Busy(
            f"Without the token {most} {things} at once are the limit.",
            f"There are {number}.",
            "Wait for one to end; with the token, in HALTERES_HOME/token, there is no limit",
        )


def check_changes(environment: str, changes: Mapping[str, Any]) -> None:
    """Refuse settings as they were given, before the environment is asked about them.

    Raises:
        TokenNeeded: one of them reaches beyond the run.
    """
    check_environment(environment)
    given = [
        _Given(name, Edit(name=name, value=None).key, value) for name, value in changes.items()
    ]
    _check_own(given)
    _check_environments(given, RunSettings(environment=environment))


def check_settings(settings: Settings, sources: Sources = NOTHING_GIVEN) -> None:
    """Refuse settings as a run would have them; what the environment or the operator's policy sets
    may be anything. Raises TokenNeeded."""
    sections = settings.model_dump(mode="json")
    keys = {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }
    given = [_Given(key, key, value) for key, value in keys.items() if sources.get(key) != "policy"]
    # Ours first: one of them is the Python that the environment is asked by.
    _check_own(given)
    _check_environments(given, settings.run)


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting and its value."""

    name: str  # as the caller wrote it
    key: str  # section.field
    value: Any

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def field(self) -> str:
        return self.key.partition(".")[2]

    def check(self, schema: Mapping[str, Any], default: Any) -> None:
        """Refuse a value that reaches beyond the run; the default may. Raises TokenNeeded."""
        if self.value == default:
            return
        try:
            texts = texts_of(schema, self.field, self.value)
            found = next((text for text in texts if _wants_token(text)), None)
        except TooLargeToCheck:
            raise TokenNeeded.of(
                f"'{self.name}' cannot be set without the token.",
                "Its value is too large to be checked",
            ) from None
        if found is not None:
            place = f"{self.section}.{found.place}"
            at = ""
            if place not in (self.key, self.name):
                at = f" ({place})"
            raise TokenNeeded.of(
                f"'{self.name}'{at} cannot be set without the token.", USED_AS_YOU, field=self.name
            )


def _check_own(given: Sequence[_Given]) -> None:
    """Check the settings that are ours. What a run fills in itself is refused to all, elsewhere."""
    defaults = Settings()
    for one in given:
        model = SECTIONS.get(one.section)
        if model is not None and one.field not in wiring_of(model):
            one.check(_schema_of(model), getattr(getattr(defaults, one.section), one.field, None))


def _check_environments(given: Sequence[_Given], run: RunSettings) -> None:
    """Check the environment's settings by what it says of them when it is asked about none."""
    theirs = [one for one in given if one.section == "env" and one.field not in ENV_WIRING]
    if not theirs:
        return
    described = describe(program_of(run), {})
    schema = _with_common_fields(described.schema)
    for one in theirs:
        one.check(schema, described.config.get(one.field))


@cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _with_common_fields(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an environment's settings, with the fields that every environment has as we
    declare them: a class of atroposlib's, or an older one, declares no reach."""
    ours = _schema_of(BaseEnvConfig)
    return {
        "properties": {**schema.get("properties", {}), **ours["properties"]},
        "$defs": {**schema.get("$defs", {}), **ours.get("$defs", {})},
    }


def names_a_folder(name: str) -> bool:
    """Whether it names a folder that is neither a built-in model nor one of the store: also one
    with a model, or an adapter, below the server's working directory."""
    if looks_elsewhere(name):
        return not (name.startswith("/") and names_of(Path(name), models_home()))
    if known_folder(name, models_home()) is not None:
        return False
    has_weights = (Path(name) / CONFIG).is_file() or ("/" in name and Path(name).is_dir())
    return has_weights or model_folder(name, models_home()) is not None


_KINDS: Final[tuple[Any, ...]] = get_args(Reach)

MOST_PARTS, MOST_CHARACTERS = 10_000, 20_000
"""Parts of one value, and characters of a text that is read as YAML, whose aliases make little text
into much."""


class TooLargeToCheck(ValueError):
    """A value with more parts than are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text of a value."""

    place: str  # of the setting, with what leads to the text: rewards.0.function
    text: str
    reach: Reach | None  # None: its setting declares none


def texts_of(schema: Mapping[str, Any], name: str, value: Any) -> Iterator[Text]:
    """Every text in the value of a setting.

    Args:
        schema: JSON Schema of the object that has the setting; one without it declares nothing.
        name: of the setting.
        value: as it was given, or as it holds.

    Raises:
        TooLargeToCheck: the value has too many parts.
    """
    field = schema.get("properties", {}).get(name, {})
    return _Walk().texts(SettingSchema.of(field, schema.get("$defs", {})), value, name, None)


class _Walk:
    """A value beside the schema that describes it."""

    def __init__(self) -> None:
        self._parts = 0

    def texts(
        self, schema: SettingSchema, value: Any, place: str, reach: Reach | None
    ) -> Iterator[Text]:
        """The texts in a value; a part that declares no reach has that of its setting. What several
        alternatives declare is yielded for each of them.
        """
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise TooLargeToCheck
        reach = _declared_by(schema) or reach
        if isinstance(value, str):
            yield from self._text(schema, value, place, reach)
        elif isinstance(value, bool) and reach is not None and "string" in schema.types:
            # a word that YAML takes for a truth value: on, off
            yield Text(place=place, text=str(value), reach=reach)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                fields = schema.fields(key)
                if reach is None and not any(field.parts[0] for field in fields):
                    yield Text(place=place, text=str(key), reach=None)
                for field in fields or [ANYTHING]:
                    yield from self.texts(field, item, f"{place}.{key}", reach)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                for one in schema.items(number) or [ANYTHING]:
                    yield from self.texts(one, item, f"{place}.{number}", reach)

    def _text(
        self, schema: SettingSchema, value: str, place: str, reach: Reach | None
    ) -> Iterator[Text]:
        is_fixed = any(
            value in part.get("enum", ()) or value == part.get("const") for part in schema.parts
        )
        if reach is None and is_fixed:
            return
        takes_texts = "string" in schema.types
        # A list or an object may come as YAML; a class that declares nothing may read any text so.
        if takes_texts or reach:
            yield Text(place=place, text=value, reach=reach)
        if takes_texts and reach:
            return
        for parsed in (_parsed(value), _typed(schema, value)):
            if not isinstance(parsed, str):
                yield from self.texts(schema, parsed, place, reach)
            elif not (takes_texts or reach):
                yield Text(place=place, text=value, reach=reach)


def _typed(schema: SettingSchema, text: str) -> Any:
    """The text as a setting of these types takes it: `[~]` is a list of one text there."""
    try:
        return schema.value_of(text)
    except TooLarge as error:
        raise TooLargeToCheck from error
    except DocumentError:
        return text


def _declared_by(schema: SettingSchema) -> Reach | None:
    for part in schema.parts:
        if part.get(REACHES) in _KINDS:
            return part[REACHES]
    return None


def _parsed(text: str) -> Any:
    """The text as YAML, as settings are read; itself where it is not YAML, and then no setting is
    made of it.
    """
    if len(text) > MOST_CHARACTERS:
        raise TooLargeToCheck
    try:
        return parse_yaml(text)
    except TooLarge as error:
        raise TooLargeToCheck from error
    except DocumentError:
        return text


_SEPARATORS: Final = re.compile(r"""[\s,;=|()\[\]{}<>"'`]+""")
"""Between the words of a text, and between the items of a list that is written as one."""

_PATH: Final = re.compile(r"/|~|(?i:file:)|\.[\w/]|\.$")
"""How a path that leads elsewhere begins, or one of a hidden file; not ".*", a pattern."""

_PATH_WITHIN: Final = re.compile(r"/\w|~[\w/]|(?i:file:)|\.{1,2}/")
"""How one begins that stands behind other words; not "/" and "~" alone."""

_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|.*\.py(:\w*)?")
"""MODULE:FUNCTION, or a file of Python."""


def looks_elsewhere(text: str) -> bool:
    """Whether a text, or a word of it, looks like an address, or like a path that leads elsewhere
    than below a folder of ours.

    >>> [looks_elsewhere(one) for one in ("openai/gsm8k", "and/or", "x, /etc/passwd", "http://x")]
    [False, False, True, True]
    """
    return _PATH.match(text) is not None or any(
        _PATH_WITHIN.match(word) or "://" in word or ".." in word.split("/")
        for word in _words(text)
    )


def looks_outward(text: str) -> bool:
    """Whether it looks elsewhere, or a word of it like a function's name or a program's file.

    >>> [looks_outward(one) for one in ("openai/gsm8k", "os:abort", "rewards.py")]
    [False, True, True]
    """
    return looks_elsewhere(text) or any(_CODE.fullmatch(word) for word in _words(text))


def names_a_module(id: str) -> bool:
    """Whether an id names the module that registers it, as Gymnasium's do, and is none of GEM's,
    which are written alike.

    >>> [names_a_module(one) for one in ("Taxi-v3", "game:Wordle-v0", "mine:Wordle-v0")]
    [False, False, True]
    """
    return looks_elsewhere(id) or (":" in id and family_of(id) is None)


def _words(text: str) -> list[str]:
    return [word for word in _SEPARATORS.split(text) if word]


def _always(_: str) -> bool:
    return True


_JUDGES: Final[Mapping[Reach | None, Callable[[str], bool]]] = {
    "code": _always,
    "path": _always,
    "address": _always,
    "key": _always,
    "environment": is_path,
    "model": names_a_folder,
    "id": names_a_module,
    "name": looks_outward,
    "nothing": lambda _: False,
    None: looks_outward,
}


def _wants_token(found: Text) -> bool:
    return bool(found.text.strip()) and _JUDGES[found.reach](found.text)
