"""Chat templates: a tokenizer folder's jinja2 text, rendered in a sandbox, with a bound on what it
may compute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any

from jinja2 import Template, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Const, Filter, For, Getattr, Getitem, Name, Node, Test
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_ROUNDS = 200_000
"""Of all loops of a chat template together; a chat of a thousand messages with tools needs a tenth
of it.
"""

_ROUNDS = "rounds of loops"  # no template can name a variable so


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One parsed template."""

    template: Template
    reads: frozenset[str]  # names of variables that it is given from outside
    asks_for_content: bool = False  # whether a message's content is null, or there at all

    def render(self, /, **variables: Any) -> str:
        """The text for these variables; raises whatever the template does."""
        return self.template.render({_ROUNDS: count()}, **variables)


def read_templates(source: Any) -> dict[str, ChatTemplate]:
    """Chat templates by name: most models have one text, `default`; some have several, `tool_use`
    among them.
    """
    if isinstance(source, list):
        source = {one["name"]: one["template"] for one in source}
    elif not isinstance(source, dict):
        source = {"default": source}
    return {name: _parsed(text) for name, text in source.items() if isinstance(text, str)}


def _parsed(text: str) -> ChatTemplate:
    tree = _sandbox().parse(text)
    reads = frozenset(find_undeclared_variables(tree))
    for loop in tree.find_all(For):
        loop.iter = Filter(loop.iter, _counted.__name__, [], [], None, None, lineno=loop.lineno)
    asks = any(
        test.name in ("none", "defined") and _is_content(test.node) for test in tree.find_all(Test)
    )
    return ChatTemplate(_sandbox().from_string(tree), reads, asks)


def _is_content(node: Node) -> bool:
    """Whether an expression is `message.content`, `message["content"]`, or a variable of that
    name.
    """
    match node:
        case Name(name="content") | Getattr(attr="content") | Getitem(arg=Const(value="content")):
            return True
        case _:
            return False


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what an assistant wrote: here its content
    alone counts.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own name and form

    def parse(self, parser: Parser) -> list[Node]:
        """The block's content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What a template loops over, until all its loops together have gone round often enough."""
    rounds: Iterator[int] = context[_ROUNDS]
    for item in items:
        if next(rounds) >= MOST_ROUNDS:
            raise TemplateError(f"its loops go round more than {MOST_ROUNDS} times")
        yield item


@lru_cache(maxsize=1)
def _sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().astimezone().strftime(form)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    filters: dict[str, Any] = {_counted.__name__: _counted, "tojson": to_json}
    environment.filters.update(filters)
    functions: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(functions)
    return environment
