"""The calls in an answer's text, as an agent reads them.

>>> calls_in('rl_stop_training("3fa9c1d2") then rl_start_training(changes={"seed":1})')
[Asked(name='rl_stop_training', first=('3fa9c1d2',), named={}), \
Asked(name='rl_start_training', first=(), named={'changes': {'seed': 1}})]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BEGINNING = re.compile(r"\brl_\w+\(")
_JSON_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that a text asks for."""

    name: str
    first: tuple[Any, ...]  # arguments without a name, in the tool's order
    named: Mapping[str, Any]


def calls_in(text: str) -> list[Asked]:
    """Every call that is written out in full, in order."""
    found = (_call_at(text, match.start()) for match in _BEGINNING.finditer(text))
    return [call for call in found if call is not None]


def _call_at(text: str, start: int) -> Asked | None:
    """The shortest text from here that is a call; a bracket within a string ends none."""
    for end in (match.end() for match in re.finditer(r"\)", text) if match.end() > start):
        try:
            tree = ast.parse(text[start:end], mode="eval").body
            return _asked(tree) if isinstance(tree, ast.Call) else None
        except SyntaxError:
            continue
        except ValueError:
            return None  # a word that stands for a value, or dots
    return None


def _asked(tree: ast.Call) -> Asked | None:
    if not isinstance(tree.func, ast.Name) or any(word.arg is None for word in tree.keywords):
        return None
    first = tuple(_value(node) for node in tree.args)
    named = {word.arg or "": _value(word.value) for word in tree.keywords}
    return Asked(tree.func.id, first, named)


class _AsPython(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _value(node: ast.expr) -> Any:
    """A JSON value. ValueError: it is none."""
    value = ast.literal_eval(_AsPython().visit(node))
    if value is ...:
        raise ValueError("dots stand for something")
    return value
