"""A server's figures in the text format of Prometheus (version 0.0.4).

A label never has values that somebody else chooses, for each value is a series for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name, with a figure per value of its label; without a label the value is ""."""

    name: str
    kind: Literal["counter", "gauge"]
    words: str
    values: Mapping[str, float]
    label: str = ""

    @classmethod
    def one(cls, name: str, kind: Literal["counter", "gauge"], words: str, figure: float) -> Self:
        """A metric without a label."""
        return cls(name, kind, words, {"": figure})


def text_of(metrics: Iterable[Metric], prefix: str) -> str:
    """All of them; `prefix` begins every name."""
    lines: list[str] = []
    for metric in metrics:
        name = prefix + metric.name
        lines += [f"# HELP {name} {metric.words}\n", f"# TYPE {name} {metric.kind}\n"]
        for value, figure in metric.values.items():
            escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            labels = f'{{{metric.label}="{escaped}"}}' if metric.label else ""
            lines.append(f"{name}{labels} {figure!r}\n")
    return "".join(lines)
