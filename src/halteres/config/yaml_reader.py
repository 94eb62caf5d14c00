"""YAML files that people write, read within bounds: a damaged or hostile one is refused, and harms nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from halteres.files import read_regular

MAX_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_NODES = 100_000
"""Values in one file, each as often as an alias repeats it: ten lines of aliases may stand for billions."""

NOT_YAML: Final = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What the library raises of a text; all but the first, where a tag or a date does not fit its value."""


def read_yaml(file: Path) -> Any:
    """What a YAML file holds; None of an empty one.

    Raises:
        OSError: there is no such file, or it is no regular one: to open a FIFO would wait for a writer.
        ValueError: it is not YAML, or beyond the bounds; the text says why, and where it can, at which line.
    """
    content = read_regular(file, MAX_BYTES)
    return parse_yaml(content.decode("utf-8-sig"))


def parse_yaml(text: str) -> Any:
    """What a text of YAML holds; None of an empty one. ValueError: as of `read_yaml`."""
    try:
        # The loader is the safe one: it makes plain values alone.
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Bounds().check(node, depth=1)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except NOT_YAML as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error


class _Bounds:
    """Counts the values under each node, those of an alias wherever it stands."""

    def __init__(self) -> None:
        self._num_nodes: dict[int, int] = {}  # by the node's identity
        self._open: set[int] = set()  # nodes that are being counted

    def check(self, node: yaml.Node, depth: int) -> int:
        """The number of values under a node, itself included. ValueError: it is beyond the bounds."""
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise ValueError(f"the value in line {line} contains itself")
        if depth > MAX_DEPTH:
            raise ValueError(f"line {line} is nested more than {MAX_DEPTH} deep")
        if id(node) in self._num_nodes:
            return self._num_nodes[id(node)]
        self._open.add(id(node))
        total = 1 + sum(self.check(child, depth + 1) for child in _children(node))
        self._open.remove(id(node))
        if total > MAX_NODES:
            raise ValueError(f"the value in line {line} has more than {MAX_NODES} values, those of aliases counted")
        if isinstance(node, yaml.ScalarNode) and any("\ud800" <= letter <= "\udfff" for letter in node.value):
            raise ValueError(f"the text in line {line} has half a character")
        self._num_nodes[id(node)] = total
        return total


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []
