"""How large modules and functions are; the fence is far out, the table is the point.

`pytest tests/unit/test_sizes.py -s` prints it. When a function grows, look for the noun that is
missing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE = 700
MAX_FUNCTION = 80

MOST_CONDITIONS = {
    "agent": 6.0,
    "cli": 5.5,
    "clients": 18.5,
    "config": 5.0,
    "dashboard": 2.0,
    "engine": 12.0,
    "environments": 15.5,
    "groups": 1.0,
    "models": 23.0,
    "observe": 19.0,
    "rewards": 16.0,
    "rollouts": 28.0,
    "runs": 7.0,
    "service": 12.0,
    "training": 8.5,
    "trajectories": 10.5,
}
"""Conditional expressions (`a if b else c`) per 1,000 lines that are not blank, a room. The aim is
12; a figure here only ever falls.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """Lines of one named thing."""

    lines: int
    where: str


def files() -> list[Path]:
    return [
        file for file in sorted((ROOT / "src").rglob("*.py")) if not file.name.endswith("_pb2.py")
    ]


def module_sizes() -> list[Size]:
    return [
        Size(len(file.read_text().splitlines()), str(file.relative_to(ROOT))) for file in files()
    ]


def function_sizes() -> list[Size]:
    return [
        size
        for file in files()
        for size in _functions(ast.parse(file.read_text()), str(file.relative_to(ROOT)))
    ]


def _functions(node: ast.AST, where: str) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{where}:{child.name}" if named else where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Size((child.end_lineno or child.lineno) - child.lineno + 1, name)
        yield from _functions(child, name)


def table(kind: str, sizes: list[Size], limit: int) -> str:
    ranked = sorted(sizes, key=lambda size: -size.lines)
    head = (
        f"{kind}: {len(sizes)}, median {median(size.lines for size in sizes):.0f} lines, limit "
        f"{limit}"
    )
    return "\n".join([head, *(f"  {size.lines:5d}  {size.where}" for size in ranked[:5])])


@pytest.mark.parametrize(
    ("kind", "measured", "limit"),
    [("modules", module_sizes, MAX_MODULE), ("functions", function_sizes, MAX_FUNCTION)],
    ids=["modules", "functions"],
)
def test_nothing_outgrows_its_limit(
    kind: str, measured: Callable[[], list[Size]], limit: int
) -> None:
    sizes = measured()
    text = table(kind, sizes, limit)
    print(f"\n{text}")  # noqa: T201  the table is what this file is for
    assert not [size for size in sizes if size.lines > limit], text


def test_tests_are_at_least_half_as_long_as_the_source() -> None:
    """The aim is as long; this is the fence."""
    source = sum(size.lines for size in module_sizes())
    tests = sum(len(file.read_text().splitlines()) for file in (ROOT / "tests").rglob("*.py"))
    print(f"\nsource {source} lines, tests {tests} lines")  # noqa: T201
    assert tests >= source / 2


@pytest.mark.parametrize("room", MOST_CONDITIONS)
def test_a_room_has_no_more_conditional_expressions_than_before(room: str) -> None:
    """One thought per line: a choice is a statement."""
    lines = conditions = 0
    for file in files():
        if room in file.relative_to(ROOT / "src" / "halteres").parts[:1]:
            text = file.read_text()
            lines += sum(1 for line in text.splitlines() if line.strip())
            conditions += sum(isinstance(node, ast.IfExp) for node in ast.walk(ast.parse(text)))
    assert lines, room
    density = 1000 * conditions / lines
    print(f"\n{room:14} {density:5.1f} of {MOST_CONDITIONS[room]}")  # noqa: T201
    assert density <= MOST_CONDITIONS[room]
