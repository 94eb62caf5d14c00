"""Which environments there are, and what they are called, read from the text of files: none is
imported or run.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halteres.config import environ
from halteres.config.gem_ids import stands_for
from halteres.errors import HalteresError, InvalidConfig, NotFound, boundary, nearest, unknown

BUILTIN_FOLDER = Path(__file__).resolve().parents[1] / "environments"
"""Environments that come with the package. Read as text, like any other."""

ENTRY_POINTS = "halteres.environments"
"""Group of entry points by which other packages name modules that hold environments."""

_UNREADABLE = (SyntaxError, ValueError, OSError, RecursionError, MemoryError)
"""What reading a file that is not Python may raise; the last two, where it is nested too deeply."""

_ROOTS = frozenset({"BaseEnv", "SingleTurnEnv", "EpisodeEnv", "MultiTurnEnv"})
"""Classes that are no environments themselves, and from which environments derive."""

_BUILT_IN, _PACKAGE = "halteres.environments.", Path(__file__).resolve().parents[2]

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_WITH_VARIANT = re.compile(r"(.*\.py|[^/:]*):([^/:]*)")


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
    """A file that cannot be read as Python, or names its environment badly; or an entry point that
    leads nowhere.
    """

    file_path: str  # absolute; of an entry point: what it names
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All environments by name, and the files that are none by mistake."""

    environments: tuple[EnvironmentFile, ...]
    broken: tuple[BrokenFile, ...]


def split_name(name: str) -> tuple[str, str]:
    """The environment's name or file, and the variant; an empty one where none is named.

    >>> split_name("game:Hangman-v0"), split_name("/home/me/a:b/games.py")
    (('game', 'Hangman-v0'), ('/home/me/a:b/games.py', ''))
    """
    found = _WITH_VARIANT.fullmatch(name)
    if found:
        return (found[1], found[2])
    return (name, "")


def joined_name(environment: str, variant: str) -> str:
    """The name of a variant; the environment's own where there is none."""
    if variant:
        return f"{environment}:{variant}"
    return environment


def is_path(name: str) -> bool:
    """Whether it names a file rather than an environment."""
    environment, _ = split_name(name)
    return environment.endswith(".py") or "/" in environment


def reference(given: str, name: str, file: str) -> str:
    """How settings refer to the environment `name` in `file`, with its variant: by its name if that
    was given, else by its file.
    """
    environment, variant = split_name(name)
    if split_name(given)[0] == environment:
        return name
    return joined_name(file, variant)


def in_file_name(name: str) -> str:
    """The name as one part of a path, without a colon, that leads nowhere else.

    >>> in_file_name("game:Hangman-v0"), in_file_name("../mine"), in_file_name("..")
    ('game_Hangman-v0', '.._mine', '_')
    """
    part = re.sub(r"[:/\\]", "_", name)
    if part.strip("."):
        return part
    return "_"


def discover(folders: Sequence[Path] = (), *, afresh: bool = False) -> Discovery:
    """Look through these folders and their own folders, then those of HALTERES_ENVIRONMENTS and
    HALTERES_HOME, what other packages offer, and the built-in ones. Names that begin with `_` are
    passed over.

    The first file of a name has it; a later one is called `file.Class`. Files are read again where
    they have changed; `afresh` reads all.
    """
    found: dict[str, EnvironmentFile] = {}
    broken: dict[str, BrokenFile] = {}
    for place in _places(folders):
        try:
            if isinstance(place, BrokenFile):
                environment = place
            else:
                environment = read_environment(place, afresh=afresh)
        except EnvironmentBroken as error:
            environment = BrokenFile(file_path=str(place), why=error.why)
        if isinstance(environment, BrokenFile):
            broken[environment.file_path] = environment
        elif environment is not None and environment.file_path not in {
            one.file_path for one in found.values()
        }:
            file = Path(environment.file_path)
            apart = f"{file.stem}.{environment.class_name}"
            names = (
                environment.name,
                apart,
                f"{file.parent.name}.{apart}",
                f"{environment.name}.{len(found)}",
            )
            name = next(name for name in names if name not in found and _NAME.fullmatch(name))
            found[name] = replace(environment, name=name)
    return Discovery(
        environments=tuple(found[name] for name in sorted(found)), broken=tuple(broken.values())
    )


def find_environment(name_or_path: str, folders: Sequence[Path] = ()) -> EnvironmentFile:
    """The environment of this name, or the one in this file; the name of its file will do, without
    `.py`. Of a family it is one variant, the first where none is named.

    Raises:
        EnvironmentNotFound: no such name, file or variant; the nearest name is offered.
        InvalidConfig: it is an id of GEM's in whose place something else is used.
        EnvironmentBroken: the file cannot be used; the text says why and where.
    """
    base, variant = split_name(name_or_path)
    listed = None
    if not is_path(base):
        listed = discover(folders)
    if listed is None:
        file = Path(base).expanduser().absolute()
        if not file.is_file():
            hint = "Give the path of a Python file, or a name."
            raise EnvironmentNotFound(f"There is no environment file {file}.", next=hint)
        # A class derived from somebody's own base cannot be recognised from the text; the file's
        # `describe` will tell.
        environment = read_environment(file) or EnvironmentFile(
            name=file.stem,
            class_name="",
            file_path=str(file),
            description=f"Environment from {file.name}",
        )
    else:
        by_stem = {Path(one.file_path).stem: one for one in reversed(listed.environments)}
        environment = (by_stem | {one.name: one for one in listed.environments}).get(base)
    if environment is not None:
        if name_or_path != base and variant not in environment.variants:
            built_in = BUILTIN_FOLDER in Path(environment.file_path).parents
            members = [joined_name(base, one) for one in environment.variants] or [base]
            raise (stands_for(name_or_path) if built_in else None) or _unknown(
                name_or_path, members
            )
        variant = variant or next(iter(environment.variants), "")
        return replace(environment, name=joined_name(environment.name, variant))
    if listed:
        broken, environments = (listed.broken, listed.environments)
    else:
        broken, environments = ((), ())
    for file in broken:
        if Path(file.file_path).stem == base:
            raise _broken(Path(file.file_path), file.why)
    names = [one.name for one in environments]
    members = [member for one in environments for member in one.members]
    # Where no name is like the one that was asked for, a variant of a family may be.
    known = names
    if nearest(name_or_path, names) is None and nearest(name_or_path, members):
        known = members
    raise stands_for(name_or_path) or _unknown(name_or_path, known)


def read_environment(file: Path, *, afresh: bool = False) -> EnvironmentFile | None:
    """The environment in a file, or None where it defines none: the class whose `cli` is called,
    else the last one that is no base of another. A file is parsed again where it has changed;
    `afresh` does so in any case.

    Raises:
        EnvironmentBroken: the file is no Python, or the environment's name cannot be used.
    """
    try:
        source = _read(file, afresh=afresh)
        names = _environment_classes(file, source, frozenset({file}))
    except SyntaxError as error:
        raise _broken(file, f"line {error.lineno}: {error.msg}.", error.lineno) from error
    except _UNREADABLE as error:
        raise _broken(file, f"{type(error).__name__}: {error}.") from error
    if not names:
        return None
    bases = {base for name in names for base in _bases(source.classes[name])}
    called = [name for name in source.cli_calls if name in names]
    found = source.classes[
        called[0] if called else [name for name in names if name not in bases][-1]
    ]
    label = _attribute(found, "name")
    if isinstance(label, ast.Constant) and isinstance(label.value, str):
        name = label.value
    else:
        name = file.stem
    if not _NAME.fullmatch(name):
        why = f"its name '{name}' may hold letters, digits, '.', '_' and '-' alone."
        raise _broken(file, f"line {found.lineno}: {why}", found.lineno)
    variants = _variants(file, source, _attribute(found, "variants"))
    if variants is None or not all(map(_NAME.fullmatch, variants)):
        why = (
            "its `variants` must be names of letters, digits, '.', '_' and '-': a tuple in the "
            "class, or in a constant "
            "(or the keys of a dict) of this file or of one beside it."
        )
        raise _broken(file, f"line {found.lineno}: {why}", found.lineno)
    return EnvironmentFile(
        name=name,
        class_name=found.name,
        file_path=str(file.absolute()),
        description=_first_paragraph(found) or source.summary or f"Environment from {file.name}",
        variants=variants,
    )


def _unknown(name: str, known: Sequence[str]) -> HalteresError:
    return unknown(
        EnvironmentNotFound, "environment", name, known, "List them with: halteres env list"
    )


def _broken(file: Path, why: str, line: int | None = None) -> EnvironmentBroken:
    what = f"The environment file {file} is broken."
    return EnvironmentBroken(what, why, "Mend the file.", file=str(file), line=line)


def _places(folders: Sequence[Path]) -> Iterator[Path | BrokenFile]:
    def files(folder: Path) -> Iterator[Path]:
        for file in (*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))):
            if not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts):
                yield file.absolute()

    for folder in (*folders, *environ.environment_folders()):
        yield from files(folder)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            with boundary(EnvironmentBroken, f"Finding {point.value}"):
                file = _module_file(point.module)
        except EnvironmentBroken as error:
            yield BrokenFile(file_path=point.value, why=error.what)
        else:
            yield file or BrokenFile(
                file_path=point.value, why=f"There is no module {point.module}."
            )
    yield from files(BUILTIN_FOLDER)


def _module_file(module: str) -> Path | None:
    top, *below = module.split(".")
    # of a module that is not below another: this imports nothing
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not below:
        if spec.origin:
            return Path(spec.origin)
        return None
    places = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class _Source:
    classes: dict[str, ast.ClassDef]
    values: dict[str, ast.expr]  # local name -> what was assigned to it
    # local name -> (module, with leading dots; name in it, "" for the module)
    imports: dict[str, tuple[str, str]]
    cli_calls: list[str]  # names whose `.cli` is called
    summary: str


_sources: dict[Path, tuple[tuple[int, int], _Source]] = {}


def _read(file: Path, *, afresh: bool = False) -> _Source:
    stat = file.stat()
    key = stat.st_mtime_ns, stat.st_size
    known = _sources.get(file)
    if known is not None and known[0] == key and not afresh:
        return known[1]
    tree = ast.parse(file.read_bytes(), filename=str(file))
    statements = list(_statements(tree.body))
    imports: dict[str, tuple[str, str]] = {}
    cli_calls: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imports |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "cli"
        ):
            cli_calls.append(_dotted(node.func.value).rpartition(".")[2])
    classes = {node.name: node for node in statements if isinstance(node, ast.ClassDef)}
    source = _Source(
        classes, dict(_assignments(statements)), imports, cli_calls, _first_paragraph(tree)
    )
    _sources[file] = (key, source)
    return source


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of the module, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(node))


def _assignments(statements: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            if isinstance(statement, ast.Assign):
                targets = statement.targets
            else:
                targets = [statement.target]
            yield from (
                (target.id, statement.value) for target in targets if isinstance(target, ast.Name)
            )


def _attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    return next((value for target, value in _assignments(node.body) if target == name), None)


def _first_paragraph(node: ast.Module | ast.ClassDef) -> str:
    """Of the docstring, as one line."""
    return " ".join((ast.get_docstring(node) or "").strip().partition("\n\n")[0].split())


def _bases(node: ast.ClassDef) -> list[str]:
    return [_dotted(base) for base in node.bases]


def _dotted(node: ast.expr | None) -> str:
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _environment_classes(file: Path, source: _Source, seen: frozenset[Path]) -> list[str]:
    """Classes that derive from a root: through others of the file, aliases, and files that it
    imports from.
    """

    def derives(name: str, through: frozenset[str]) -> bool:
        if name.rpartition(".")[2] in _ROOTS:
            return True
        if name in source.classes and name not in through:
            return any(derives(base, through | {name}) for base in _bases(source.classes[name]))
        if (alias := _dotted(source.values.get(name))) and name not in through:
            return derives(alias, through | {name})
        origin, member = _origin(file, source, name)
        if member in _ROOTS or origin is None or origin in seen:
            return member in _ROOTS
        try:
            return member in _environment_classes(origin, _read(origin), seen | {origin})
        except _UNREADABLE:
            return False

    return [name for name in source.classes if name not in _ROOTS and derives(name, frozenset())]


def _variants(file: Path, source: _Source, value: ast.expr | None) -> tuple[str, ...] | None:
    """The texts of `variants = ("a", "b")`, `NAMES` or `tuple(module.NAMES)`; () without any, None
    if unreadable.
    """
    if value is None:
        return ()
    if isinstance(value, ast.Call) and _dotted(value.func) == "tuple" and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, ast.Name | ast.Attribute):
        name = _dotted(value)
        value = source.values.get(name)
        if value is None:
            origin, member = _origin(file, source, name)
            try:
                value = None
                if origin:
                    value = _read(origin).values.get(member)
            except _UNREADABLE:
                return None
    if not isinstance(value, ast.Tuple | ast.List | ast.Dict):
        return None
    if isinstance(value, ast.Dict):
        items = value.keys
    else:
        items = value.elts
    texts = [
        item.value
        for item in items
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    ]
    if len(texts) == len(items):
        return tuple(texts)
    return None


def _origin(file: Path, source: _Source, name: str) -> tuple[Path | None, str]:
    """The file that a name was imported from, and its name there; None unless it is built in or
    lies beside.
    """
    if name in source.imports:
        module, member = source.imports[name]
    else:
        owner, _, member = name.rpartition(".")
        module, part = source.imports.get(owner, ("", ""))
        if part:
            module = f"{module}.{part}".strip(".")
    parts = [part for part in module.split(".") if part]
    if not parts:
        return None, member
    up = max(1, len(module) - len(module.lstrip(".")))
    if module.startswith(_BUILT_IN):
        folders = [_PACKAGE]
    else:
        folders = file.parents[up - 1 : up + 1]
    files = (folder.joinpath(*parts).with_suffix(".py") for folder in folders)
    return next((found for found in files if found.is_file()), None), member
