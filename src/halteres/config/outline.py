"""The environment class of a Python file, read from the text alone: nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNREADABLE = (SyntaxError, ValueError, OSError, RecursionError, MemoryError)
"""What reading a file that is not Python may raise; the last two, where it is nested too deeply."""

ROOTS = frozenset({"BaseEnv", "SingleTurnEnv", "MultiTurnEnv"})
"""Classes that are no environments themselves, and from which environments derive."""

_BUILT_IN, _PACKAGE = "halteres.environments.", Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentClass:
    """The class that a file runs as its environment."""

    name: str
    line: int
    label: str | None  # the class attribute `name`, where it is a text in the source
    variants: tuple[str, ...] | None  # of a family; None: they cannot be read from the text
    summary: str  # first line of its docstring, else of the module's


@dataclass(frozen=True, slots=True)
class _Source:
    classes: dict[str, ast.ClassDef]
    values: dict[str, ast.expr]  # local name -> what was assigned to it
    imports: dict[str, tuple[str, str]]  # local name -> (module, with leading dots; name in it, "" for the module)
    cli_calls: list[str]  # names whose `.cli` is called
    summary: str


def read_environment_class(file: Path, *, afresh: bool = False) -> EnvironmentClass | None:
    """The class whose `cli` is called, else the last environment class that is no base of another; None without any.

    A file is parsed again where it has changed; `afresh` does so in any case.

    Raises:
        SyntaxError, ValueError: the file is not Python. OSError: it cannot be read. All that may be: UNREADABLE.
    """
    source = _read(file, afresh=afresh)
    names = _environment_classes(file, source, frozenset({file}))
    if not names:
        return None
    bases = {base for name in names for base in _bases(source.classes[name])}
    called = [name for name in source.cli_calls if name in names]
    found = source.classes[called[0] if called else [name for name in names if name not in bases][-1]]
    label = _attribute(found, "name")
    return EnvironmentClass(
        name=found.name,
        line=found.lineno,
        label=label.value if isinstance(label, ast.Constant) and isinstance(label.value, str) else None,
        variants=_variants(file, source, _attribute(found, "variants")),
        summary=_first_line(found) or source.summary,
    )


_sources: dict[Path, tuple[tuple[int, int], _Source]] = {}


def _read(file: Path, *, afresh: bool = False) -> _Source:
    stat = file.stat()
    key = stat.st_mtime_ns, stat.st_size
    known = _sources.get(file)
    if afresh or known is None or known[0] != key:
        known = _sources[file] = (key, _parse(ast.parse(file.read_bytes(), filename=str(file))))
    return known[1]


def _parse(tree: ast.Module) -> _Source:
    statements = list(_statements(tree.body))
    imports: dict[str, tuple[str, str]] = {}
    cli_calls: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imports |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            imports |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli":
            cli_calls.append(_dotted(node.func.value).rpartition(".")[2])
    return _Source(
        classes={node.name: node for node in statements if isinstance(node, ast.ClassDef)},
        values=dict(_assignments(statements)),
        imports=imports,
        cli_calls=cli_calls,
        summary=_first_line(tree),
    )


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements of the module, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(ast.iter_child_nodes(node))


def _assignments(statements: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement.value) for target in targets if isinstance(target, ast.Name))


def _attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    return next((value for target, value in _assignments(node.body) if target == name), None)


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").strip().partition("\n")[0]


def _bases(node: ast.ClassDef) -> list[str]:
    return [_dotted(base) for base in node.bases]


def _dotted(node: ast.expr | None) -> str:
    """`m.C` of `m.C` and `m.C[T]`; empty where it is no name."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def _environment_classes(file: Path, source: _Source, seen: frozenset[Path]) -> list[str]:
    """Classes that derive from a root: through others of the file, aliases, and files that it imports from."""

    def derives(name: str, through: frozenset[str]) -> bool:
        if name.rpartition(".")[2] in ROOTS:
            return True
        if name in source.classes and name not in through:
            return any(derives(base, through | {name}) for base in _bases(source.classes[name]))
        if (alias := _dotted(source.values.get(name))) and name not in through:
            return derives(alias, through | {name})
        origin, member = _origin(file, source, name)
        if member in ROOTS or origin is None or origin in seen:
            return member in ROOTS
        try:
            return member in _environment_classes(origin, _read(origin), seen | {origin})
        except UNREADABLE:
            return False

    return [name for name in source.classes if name not in ROOTS and derives(name, frozenset())]


def _variants(file: Path, source: _Source, value: ast.expr | None) -> tuple[str, ...] | None:
    """The texts of `variants = ("a", "b")`, `NAMES` or `tuple(module.NAMES)`; () without any, None if unreadable."""
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
                value = _read(origin).values.get(member) if origin else None
            except UNREADABLE:
                return None
    if not isinstance(value, ast.Tuple | ast.List | ast.Dict):
        return None
    items = value.keys if isinstance(value, ast.Dict) else value.elts
    texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return tuple(texts) if len(texts) == len(items) else None


def _origin(file: Path, source: _Source, name: str) -> tuple[Path | None, str]:
    """The file that a name was imported from, and its name there; None unless it is built in or lies beside."""
    if name in source.imports:
        module, member = source.imports[name]
    else:
        owner, _, member = name.rpartition(".")
        module, part = source.imports.get(owner, ("", ""))
        module = f"{module}.{part}".strip(".") if part else module
    parts = [part for part in module.split(".") if part]
    if not parts:
        return None, member
    up = max(1, len(module) - len(module.lstrip(".")))
    folders = [_PACKAGE] if module.startswith(_BUILT_IN) else file.parents[up - 1 : up + 1]
    files = (folder.joinpath(*parts).with_suffix(".py") for folder in folders)
    return next((found for found in files if found.is_file()), None), member
