"""Which environments there are, read from source text.

Owns: what counts as an environment file, its name and description, why a file cannot be used.
Never: imports or runs what it finds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from halteres.errors import InvalidConfig, NotFound, unknown

BUILTIN_FOLDER = Path(__file__).resolve().parents[1] / "environments"
"""Environments that come with the package. Read as text, like any other."""

ROOTS = frozenset({"BaseEnv", "SingleTurnEnv"})
"""Classes that are no environments themselves, and from which environments derive."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


class EnvironmentBroken(InvalidConfig):
    """A file that holds no usable environment."""

    code = "environment_broken"


class EnvironmentNotFound(NotFound):
    """No environment of this name, or no such file."""

    code = "environment_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFile:
    """One environment."""

    name: str
    class_name: str
    file_path: str  # absolute
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """A file in a folder of environments that cannot be read as Python, or names its environment badly."""

    file_path: str  # absolute
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All environments by name, and the files that are none by mistake."""

    environments: tuple[EnvironmentFile, ...]
    broken: tuple[BrokenFile, ...]


def discover(folders: Sequence[Path] = ()) -> Discovery:
    """Look through these folders, then the built-in one; the first file of a name counts. `_*.py` is passed over."""
    found: dict[str, EnvironmentFile] = {}
    broken: list[BrokenFile] = []
    for file in _files(folders):
        try:
            environment = read_environment(file)
        except EnvironmentBroken as error:
            broken.append(BrokenFile(file_path=str(file), why=error.why))
            continue
        if environment is not None:
            found.setdefault(environment.name, environment)
    return Discovery(environments=tuple(found[name] for name in sorted(found)), broken=tuple(broken))


def find_environment(name_or_path: str, folders: Sequence[Path] = ()) -> EnvironmentFile:
    """The environment of this name, or the one in this file.

    Raises:
        EnvironmentNotFound: no such name or file; the nearest name is offered.
        EnvironmentBroken: the file cannot be used; the text says why and where.
    """
    if name_or_path.endswith(".py") or "/" in name_or_path:
        return _in_file(Path(name_or_path).expanduser().absolute())
    found = discover(folders)
    for environment in found.environments:
        if environment.name == name_or_path:
            return environment
    for file in found.broken:
        if Path(file.file_path).stem == name_or_path:
            raise _broken(Path(file.file_path), file.why)
    names = [environment.name for environment in found.environments]
    raise unknown(EnvironmentNotFound, "environment", name_or_path, names, "List them with: halteres env list")


def read_environment(file: Path) -> EnvironmentFile | None:
    """The environment in a file, or None where it defines none.

    Raises:
        EnvironmentBroken: the file is no Python, or the environment's name cannot be used.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise _broken(file, f"line {error.lineno}: {error.msg}.") from error
    except (OSError, ValueError) as error:
        raise _broken(file, f"{type(error).__name__}: {error}.") from error
    kind = _environment_class(tree)
    if kind is None:
        return None
    name = _constant_name(kind) or file.stem
    if not _NAME.fullmatch(name):
        raise _broken(file, f"line {kind.lineno}: its name '{name}' may hold letters, digits, '.', '_' and '-' alone.")
    description = (ast.get_docstring(kind) or ast.get_docstring(tree) or "").strip().partition("\n")[0]
    return EnvironmentFile(
        name=name,
        class_name=kind.name,
        file_path=str(file.absolute()),
        description=description or f"Environment from {file.name}",
    )


def _files(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in (*folders, BUILTIN_FOLDER):
        yield from (file for file in sorted(folder.glob("*.py")) if not file.name.startswith("_"))


def _in_file(file: Path) -> EnvironmentFile:
    if not file.is_file():
        raise EnvironmentNotFound(
            f"There is no environment file {file}.", next="Give the path of a Python file, or a name."
        )
    # A class derived from somebody's own base cannot be recognised from the text; the file's `describe` will tell.
    return read_environment(file) or EnvironmentFile(
        name=file.stem, class_name="", file_path=str(file), description=f"Environment from {file.name}"
    )


def _broken(file: Path, why: str) -> EnvironmentBroken:
    return EnvironmentBroken(f"The environment file {file} is broken.", why, "Mend the file.", file=str(file))


def _environment_class(tree: ast.Module) -> ast.ClassDef | None:
    """The class whose `cli` is called; else the last that is no base of another."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    derived = _derived(classes, ROOTS | _aliases(tree))
    if not derived:
        return None
    run = next((name for name in _cli_calls(tree) if name in derived), None)
    bases = {base for name in derived for base in _bases(classes[name])}
    leaves = [name for name in derived if name not in bases]
    return classes[run or leaves[-1]]


def _derived(classes: dict[str, ast.ClassDef], roots: frozenset[str]) -> list[str]:
    """Classes that derive from a root, through others of the file too, in the order of the file."""
    known = set(roots)
    growing = True
    while growing:
        more = {name for name, node in classes.items() if name not in known and known.intersection(_bases(node))}
        growing = bool(more)
        known |= more
    return [name for name in classes if name in known and name not in ROOTS]


def _aliases(tree: ast.Module) -> frozenset[str]:
    """Other names that imports and plain assignments give to a root: `import … as Env`, `Env = BaseEnv`."""
    imported = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in ROOTS and alias.asname
    }
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _last_name(node.value) in ROOTS | imported
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return frozenset(imported | assigned)


def _bases(node: ast.ClassDef) -> set[str]:
    return {name for base in node.bases if (name := _last_name(base)) is not None}


def _last_name(node: ast.expr) -> str | None:
    """`C` of `C`, `module.C` and `C[T]`."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _cli_calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli":
            name = _last_name(node.func.value)
            if name is not None:
                yield name


def _constant_name(kind: ast.ClassDef) -> str | None:
    """The value of the class attribute `name`, where it is a text in the source."""
    for node in kind.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        named = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
        if named and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            return node.value.value if isinstance(node.value.value, str) else None
    return None
