"""The room's modules form no circle, and its stores know nothing above them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import halteres.trajectories

ROOM = Path(halteres.trajectories.__file__).parent
NAME = "halteres.trajectories"
BENEATH_STORES = {"records", "schema"}


def modules() -> dict[str, ast.Module]:
    """Every module, by its dotted name below the room."""
    files = {
        ".".join(file.relative_to(ROOM).with_suffix("").parts): file for file in ROOM.rglob("*.py")
    }
    return {
        name: ast.parse(file.read_text())
        for name, file in files.items()
        if not name.endswith("__init__")
    }


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Modules of the room that a module names, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(NAME):
            base = node.module.removeprefix(NAME).removeprefix(".")
            names = {f"{base}.{alias.name}".removeprefix(".") for alias in node.names} | {base}
            yield from names & known


def test_no_module_imports_itself_by_way_of_others() -> None:
    trees = modules()
    graph = {name: set(imported(tree, set(trees))) for name, tree in trees.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_stores_import_no_more_of_the_room_than_what_they_remember() -> None:
    trees = modules()
    above = {
        f"{name}: {other}"
        for name, tree in trees.items()
        if name.startswith("stores.")
        for other in imported(tree, set(trees))
        if not other.startswith("stores.") and other not in BENEATH_STORES
    }
    assert not above
