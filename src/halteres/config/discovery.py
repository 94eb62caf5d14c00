"""Which environments there are, read from source text; their names; the sentence for a file that is broken.

Nothing is run: a folder of files that somebody else wrote can be listed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halteres.config import environ
from halteres.config.gem_ids import stands_for
from halteres.config.outline import UNREADABLE, environment_class, read_outline, variants_of
from halteres.errors import HalteresError, InvalidConfig, NotFound, boundary, nearest, unknown

_WITH_VARIANT = re.compile(r"(.*\.py|[^/:]*):([^/:]*)")


def split_name(name: str) -> tuple[str, str]:
    """The environment's name or file, and the variant; an empty one where none is named.

    >>> split_name("game:Hangman-v0"), split_name("/home/me/a:b/games.py")
    (('game', 'Hangman-v0'), ('/home/me/a:b/games.py', ''))
    """
    found = _WITH_VARIANT.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def joined_name(environment: str, variant: str) -> str:
    """The name of a variant; the environment's own where there is none."""
    return f"{environment}:{variant}" if variant else environment


def is_path(name: str) -> bool:
    """Whether it names a file rather than an environment."""
    environment, _ = split_name(name)
    return environment.endswith(".py") or "/" in environment


def reference(asked: str, name: str, file: str) -> str:
    """How settings refer to the environment `name` in `file`, which was asked for as `asked`: by its name where they
    said that, else by its file; with its variant either way."""
    environment, variant = split_name(name)
    return name if split_name(asked)[0] == environment else joined_name(file, variant)


def in_file_name(name: str) -> str:
    """The name as a part of a file's name, which no colon belongs into.

    >>> in_file_name("game:Hangman-v0")
    'game_Hangman-v0'
    """
    return name.replace(":", "_")


BUILTIN_FOLDER = Path(__file__).resolve().parents[1] / "environments"
"""Environments that come with the package. Read as text, like any other."""

ENTRY_POINTS = "halteres.environments"
"""Group of entry points by which other packages name modules that hold environments."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")

_VARIANTS = (
    "its `variants` must be names of letters, digits, '.', '_' and '-': a tuple in the class, or in a constant (or the"
    " keys of a dict) of this file or of one beside it."
)


class EnvironmentBroken(InvalidConfig):
    """A file that holds no usable environment."""

    code = "environment_broken"


class EnvironmentNotFound(NotFound):
    """No environment of this name, or no such file."""

    code = "environment_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFile:
    """One environment, or a family of them."""

    name: str  # a family's own where it was discovered; `find_environment` adds the variant
    class_name: str
    file_path: str  # absolute
    description: str
    variants: tuple[str, ...] = ()  # of a family; the first is the default

    @property
    def members(self) -> tuple[str, ...]:
        """Names of a family's environments: `game:Hangman-v0`."""
        family, _ = split_name(self.name)
        return tuple(joined_name(family, variant) for variant in self.variants)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """A file that cannot be read as Python, or names its environment badly; or an entry point that leads nowhere."""

    file_path: str  # absolute; of an entry point: what it names
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All environments by name, and the files that are none by mistake."""

    environments: tuple[EnvironmentFile, ...]
    broken: tuple[BrokenFile, ...]


def discover(folders: Sequence[Path] = (), *, afresh: bool = False) -> Discovery:
    """Look through these folders and their own folders, then those of HALTERES_ENVIRONMENTS and HALTERES_HOME, what
    other packages offer, and the built-in ones. Names that begin with `_` are passed over.

    The first file of a name has it; a later one is called `file.Class`. Files are read again where they have changed;
    `afresh` reads all.
    """
    found: dict[str, EnvironmentFile] = {}
    broken: dict[str, BrokenFile] = {}
    for place in _places(folders):
        try:
            environment = place if isinstance(place, BrokenFile) else read_environment(place, afresh=afresh)
        except EnvironmentBroken as error:
            environment = BrokenFile(file_path=str(place), why=error.why)
        if isinstance(environment, BrokenFile):
            broken[environment.file_path] = environment
        elif environment is not None and environment.file_path not in {one.file_path for one in found.values()}:
            named = _named_apart(environment, found)
            found[named.name] = named
    return Discovery(environments=tuple(found[name] for name in sorted(found)), broken=tuple(broken.values()))


def find_environment(name_or_path: str, folders: Sequence[Path] = ()) -> EnvironmentFile:
    """The environment of this name, or the one in this file; the name of its file will do, without `.py`. Of a family
    it is one variant, the first where none is named.

    Raises:
        EnvironmentNotFound: no such name, file or variant; the nearest name is offered.
        InvalidConfig: it is an id of GEM's in whose place something else is used.
        EnvironmentBroken: the file cannot be used; the text says why and where.
    """
    base, _ = split_name(name_or_path)
    if is_path(base):
        return _variant(_in_file(Path(base).expanduser().absolute()), name_or_path)
    found = discover(folders)
    named = {Path(one.file_path).stem: one for one in reversed(found.environments)}
    named |= {one.name: one for one in found.environments}
    if base in named:
        return _variant(named[base], name_or_path)
    for file in found.broken:
        if Path(file.file_path).stem == base:
            raise _broken(Path(file.file_path), file.why)
    raise stands_for(name_or_path) or _unknown(name_or_path, [one.name for one in found.environments], found)


def read_environment(file: Path, *, afresh: bool = False) -> EnvironmentFile | None:
    """The environment in a file, or None where it defines none.

    Raises:
        EnvironmentBroken: the file is no Python, or the environment's name cannot be used.
    """
    try:
        outline = read_outline(file, afresh=afresh)
    except SyntaxError as error:
        raise _broken(file, f"line {error.lineno}: {error.msg}.", error.lineno) from error
    except UNREADABLE as error:
        raise _broken(file, f"{type(error).__name__}: {error}.") from error
    kind = environment_class(file, outline)
    if kind is None:
        return None
    name = kind.label or file.stem
    if not _NAME.fullmatch(name):
        why = f"line {kind.line}: its name '{name}' may hold letters, digits, '.', '_' and '-' alone."
        raise _broken(file, why, kind.line)
    variants = variants_of(file, outline, kind)
    if variants is None or not all(map(_NAME.fullmatch, variants)):
        raise _broken(file, f"line {kind.line}: {_VARIANTS}", kind.line)
    return EnvironmentFile(
        name=name,
        class_name=kind.name,
        file_path=str(file.absolute()),
        description=kind.summary or outline.summary or f"Environment from {file.name}",
        variants=variants,
    )


def _variant(found: EnvironmentFile, asked: str) -> EnvironmentFile:
    """What is asked for by a name or file that leads to this environment: of a family one variant."""
    base, variant = split_name(asked)
    if asked != base and variant not in found.variants:
        instead = stands_for(asked) if BUILTIN_FOLDER in Path(found.file_path).parents else None
        raise instead or _unknown(asked, [joined_name(base, one) for one in found.variants] or [base])
    return replace(found, name=joined_name(found.name, variant or next(iter(found.variants), "")))


def _unknown(asked: str, names: Sequence[str], beside: Discovery | None = None) -> HalteresError:
    """The error for a name that is not among these; where none of them is like it, variants of families may be."""
    members = [member for one in beside.environments for member in one.members] if beside else []
    known = members if nearest(asked, names) is None and nearest(asked, members) else names
    return unknown(EnvironmentNotFound, "environment", asked, known, "List them with: halteres env list")


def _named_apart(environment: EnvironmentFile, taken: dict[str, EnvironmentFile]) -> EnvironmentFile:
    """With its name, or another that nobody has yet."""
    file = Path(environment.file_path)
    apart = f"{file.stem}.{environment.class_name}"
    for name in (environment.name, apart, f"{file.parent.name}.{apart}"):
        if name not in taken and _NAME.fullmatch(name):
            return replace(environment, name=name)
    return replace(environment, name=f"{environment.name}.{len(taken)}")


def _places(folders: Sequence[Path]) -> Iterator[Path | BrokenFile]:
    for folder in (*folders, *environ.environment_folders()):
        yield from _files(folder)
    yield from _offered()
    yield from _files(BUILTIN_FOLDER)


def _files(folder: Path) -> Iterator[Path]:
    """Python files of a folder, then those of its folders."""
    for file in (*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))):
        if not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts):
            yield file.absolute()


def _offered() -> Iterator[Path | BrokenFile]:
    """Files of the modules that other packages name by entry points, found without importing them."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            with boundary(EnvironmentBroken, f"Finding {point.value}"):
                file = _module_file(point.module)
        except EnvironmentBroken as error:
            yield BrokenFile(file_path=point.value, why=error.what)
            continue
        yield file or BrokenFile(file_path=point.value, why=f"There is no module {point.module}.")


def _module_file(module: str) -> Path | None:
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)  # of a module that is not below another: this imports nothing
    if spec is None:
        return None
    if not below:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        for file in (Path(folder, *below).with_suffix(".py"), Path(folder, *below, "__init__.py")):
            if file.is_file():
                return file
    return None


def _in_file(file: Path) -> EnvironmentFile:
    if not file.is_file():
        raise EnvironmentNotFound(
            f"There is no environment file {file}.", next="Give the path of a Python file, or a name."
        )
    # A class derived from somebody's own base cannot be recognised from the text; the file's `describe` will tell.
    return read_environment(file) or EnvironmentFile(
        name=file.stem, class_name="", file_path=str(file), description=f"Environment from {file.name}"
    )


def _broken(file: Path, why: str, line: int | None = None) -> EnvironmentBroken:
    return EnvironmentBroken(
        f"The environment file {file} is broken.", why, "Mend the file.", file=str(file), line=line
    )


TRACEBACK_LINES = 8

LINK = "https://errors.pydantic.dev"
"""pydantic ends its errors with a line that leads there, and says nothing."""


def broken(file: Path, interpreter: str, why: str, err: str = "") -> EnvironmentBroken:
    """The error for a file that could not be run, or said nothing usable; `err` is what it wrote to stderr."""
    line = _line_of(file, err)
    where = f"{file}:{line}" if line else str(file)
    return EnvironmentBroken(
        f"The environment file {where} is broken.",
        why,
        f"Run `{interpreter} {file} describe` to see the whole message.",
        file=str(file),
        line=line,
        traceback=_tail(err) if "Traceback" in err else None,
    )


def _line_of(file: Path, err: str) -> int | None:
    """The line of the file that a traceback, or a sentence of `describe`, names last."""
    name = re.escape(str(file))
    found = re.findall(rf'File "{name}", line (\d+)|{name}:(\d+)', err)
    return int(found[-1][0] or found[-1][1]) if found else None


def _tail(err: str) -> list[str]:
    return [line.rstrip() for line in err.splitlines() if line.strip() and LINK not in line][-TRACEBACK_LINES:]


def last_line(text: str) -> str:
    """What it said in the end."""
    lines = _tail(text)
    return lines[-1].strip().removeprefix("error: ")[:600] if lines else "it said nothing."
