"""Which tests prove which requirements, read from the sources: no test file is imported for it.

Owns: finding `@proves("id")` before tests and `proves=("id",)` in the steps of the SDK program.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def proofs() -> dict[str, list[str]]:
    """For every id that a test names: where, as "service/test_order.py::test_...", in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(TESTS.rglob("*.py")):
        text = file.read_text()
        if "proves" not in text:
            continue
        for one, where in _named(ast.parse(text)):
            found[one].append(f"{file.relative_to(TESTS)}::{where}")
    return dict(found)


def _named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and _name(decorator.func) == "proves":
                    yield from ((one, node.name) for one in _texts(decorator.args))
        elif isinstance(node, ast.Call) and _name(node.func) == "Step":
            step = "".join(_texts(node.args[:1]))
            for keyword in node.keywords:
                if keyword.arg == "proves" and isinstance(keyword.value, ast.Tuple):
                    yield from ((one, step) for one in _texts(keyword.value.elts))


def _name(node: ast.expr) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _texts(nodes: list[ast.expr]) -> list[str]:
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
