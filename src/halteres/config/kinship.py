"""Which class of a file is its environment: it derives from a root, whatever lies between.

Owns: the roots; following bases through aliases, generics, files beside the one that is looked at, and the built-in
environments; what the variants of a family are called, also where a constant in another of those files says so.
Never: imports or runs a file, knows where environments are looked for.
"""

from __future__ import annotations

from pathlib import Path

from halteres.config.outline import UNREADABLE, Kind, Outline, read_outline

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
