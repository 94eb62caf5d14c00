"""What a Python file says about environments, read from its text alone.

Owns: the nouns `Outline` and `Kind` (a class), reading them; one reading for as long as the file does not change.
Never: imports or runs the file, follows its imports (`discovery` does).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

UNREADABLE = (SyntaxError, ValueError, OSError, RecursionError, MemoryError)
"""What reading a file that is no Python may raise; the last two, where it is nested beyond measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class."""

    name: str
    bases: tuple[str, ...]  # dotted, as written, without what stands in brackets
    line: int
    label: str | None  # the class attribute `name`, where it is a text in the source
    variants: tuple[str, ...] | str | None  # the class attribute `variants`: its texts, or a constant's name, dotted
    summary: str  # first line of the docstring


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A file."""

    kinds: Mapping[str, Kind]
    aliases: Mapping[str, str]  # local name -> what was assigned to it, dotted
    constants: Mapping[str, tuple[str, ...]]  # local name -> the texts of the tuple or list, or the keys of the dict
    imports: Mapping[str, tuple[str, str]]  # local name -> (module, with leading dots; name in it, "" for the module)
    cli_calls: tuple[str, ...]  # names whose `.cli` is called
    summary: str


def read_outline(file: Path, *, afresh: bool = False) -> Outline:
    """The outline of a file.

    Raises:
        SyntaxError, ValueError: the file is no Python. OSError: it cannot be read. All that may be: UNREADABLE.
    """
    looked = file.stat()
    key = looked.st_mtime_ns, looked.st_size
    known = _read.get(file)
    if afresh or known is None or known[0] != key:
        known = _read[file] = (key, _outline(ast.parse(file.read_bytes(), filename=str(file))))
    return known[1]


_read: dict[Path, tuple[tuple[int, int], Outline]] = {}


def _outline(tree: ast.Module) -> Outline:
    statements = list(_statements(tree.body))
    kinds = [_kind(node) for node in statements if isinstance(node, ast.ClassDef)]
    return Outline(
        kinds={kind.name: kind for kind in kinds},
        aliases=dict(_aliases(statements)),
        constants=dict(_constants(statements)),
        imports=dict(_imports(tree)),
        cli_calls=tuple(_cli_calls(tree)),
        summary=_first_line(ast.get_docstring(tree)),
    )


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module, those under `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(
                child
                for field in ("body", "orelse", "finalbody")
                for child in getattr(node, field, ())  # which of them there are depends on the statement
            )
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _kind(node: ast.ClassDef) -> Kind:
    return Kind(
        name=node.name,
        bases=tuple(base for expression in node.bases if (base := _dotted(expression))),
        line=node.lineno,
        label=_label(node),
        variants=_variants(node),
        summary=_first_line(ast.get_docstring(node)),
    )


def _label(node: ast.ClassDef) -> str | None:
    value = _attribute(node, "name")
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _variants(node: ast.ClassDef) -> tuple[str, ...] | str | None:
    """Of `variants = ("a", "b")` the texts, of `variants = NAMES` and `tuple(m.NAMES)` the constant's name; () where
    there is no such attribute, None where it cannot be read without running the file."""
    value = _attribute(node, "variants")
    if value is None:
        return ()
    if isinstance(value, ast.Call) and _dotted(value.func) == "tuple" and len(value.args) == 1:
        value = value.args[0]
    return _dotted(value) if isinstance(value, ast.Name | ast.Attribute) else _texts(value)


def _attribute(node: ast.ClassDef, name: str) -> ast.expr | None:
    """What a class attribute is first set to."""
    for statement in node.body:
        named = any(isinstance(target, ast.Name) and target.id == name for target in _targets(statement))
        if named and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return statement.value
    return None


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _aliases(statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        meant = _dotted(value) if value is not None else None
        if meant:
            yield from ((target.id, meant) for target in _targets(statement) if isinstance(target, ast.Name))


def _constants(statements: list[ast.stmt]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        texts = _texts(value) if value is not None else None
        if texts is not None:
            yield from ((target.id, texts) for target in _targets(statement) if isinstance(target, ast.Name))


def _texts(node: ast.expr) -> tuple[str, ...] | None:
    """The texts of a tuple or list of texts, the keys of a dict that has texts for keys; None of anything else."""
    if not isinstance(node, ast.Tuple | ast.List | ast.Dict):
        return None
    items = node.keys if isinstance(node, ast.Dict) else node.elts
    texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return tuple(texts) if len(texts) == len(items) else None


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, (module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, (alias.name, "")) for alias in node.names)


def _dotted(node: ast.expr) -> str | None:
    """`m.C` of `m.C` and `m.C[T]`."""
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else node.attr
    return node.id if isinstance(node, ast.Name) else None


def _cli_calls(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cli":
            owner = _dotted(node.func.value)
            if owner:
                yield owner.rpartition(".")[2]


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


BUILT_IN, _PACKAGE = "halteres.environments", Path(__file__).resolve().parents[2]

ROOTS = frozenset({"BaseEnv", "SingleTurnEnv", "MultiTurnEnv"})
"""Classes that are no environments themselves, and from which environments derive."""


def environment_class(file: Path, outline: Outline) -> Kind | None:
    """The class whose `cli` is called; else the last that is no base of another."""
    derived = _derived(file, outline, frozenset({file}))
    if not derived:
        return None
    run = next((name for name in outline.cli_calls if name in derived), None)
    bases = {base for name in derived for base in outline.kinds[name].bases}
    leaves = [name for name in derived if name not in bases]
    return outline.kinds[run or leaves[-1]]


def variants_of(file: Path, outline: Outline, kind: Kind) -> tuple[str, ...] | None:
    """Names of a family's variants; () of a class that is no family, None where they cannot be read from the text."""
    if not isinstance(kind.variants, str):
        return kind.variants
    if kind.variants in outline.constants:
        return outline.constants[kind.variants]
    module, name = _imported(kind.variants, outline)
    source = _source(file, module)
    try:
        return read_outline(source).constants.get(name) if source else None
    except UNREADABLE:
        return None


def _derived(file: Path, outline: Outline, seen: frozenset[Path]) -> list[str]:
    """Classes that derive from a root, through others of the file and of files beside it too, in its order."""
    known: set[str] = set()
    growing = True
    while growing:
        more = {
            name
            for name, kind in outline.kinds.items()
            if name not in known and any(_is_environment(base, file, outline, known, seen) for base in kind.bases)
        }
        growing = bool(more)
        known |= more
    return [name for name in outline.kinds if name in known and name not in ROOTS]


def _is_environment(base: str, file: Path, outline: Outline, known: set[str], seen: frozenset[Path]) -> bool:
    """Whether a base is a root, or derives from one: by its name, an alias, or in the file it is imported from."""
    for _ in range(len(outline.aliases) + 1):  # an alias may stand for another; one may stand for itself
        if base in known or base.rpartition(".")[2] in ROOTS:
            return True
        base = outline.aliases.get(base, base)
    module, name = _imported(base, outline)
    if name in ROOTS:
        return True
    source = _source(file, module)
    if source is None or source in seen:
        return False
    try:
        theirs = read_outline(source)
    except UNREADABLE:
        return False
    return name in _derived(source, theirs, seen | {source})


def _imported(base: str, outline: Outline) -> tuple[str, str]:
    """The module that a base comes from, and its name there; ("", "") where it is not imported."""
    if base in outline.imports:
        return outline.imports[base]
    owner, _, name = base.rpartition(".")
    module, member = outline.imports.get(owner, ("", ""))
    return (f"{module}.{member}".strip(".") if member else module, name) if module else ("", "")


def _source(file: Path, module: str) -> Path | None:
    """The file of a module that can be followed."""
    if module.startswith(f"{BUILT_IN}."):
        built_in = _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
        return built_in if built_in.is_file() else None
    return _beside(file, module)


def _beside(file: Path, module: str) -> Path | None:
    """The file of a module that lies beside this file, or in a package around it."""
    parts = [part for part in module.split(".") if part]
    if not parts:
        return None
    up = max(1, len(module) - len(module.lstrip(".")))
    for folder in file.parents[up - 1 : up + 1]:
        beside = folder.joinpath(*parts).with_suffix(".py")
        if beside.is_file():
            return beside
    return None
