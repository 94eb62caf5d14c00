"""An evaluation as a table, JSON, a picture, and one page that needs nothing else, in which every
text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halteres.observe.canvas import PALE, Canvas
from halteres.rewards.evaluation import Evaluation, Judged, as_text
from halteres.rewards.metrics import PairFigures, Share

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("pairs", "n", "accuracy", "95 % interval", "half credit", "mean margin", "tie rate")

_BLUE, _ORANGE = "#1b6ca8", "#e08a1e"

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}.warning{color:#a8321b}"
    "pre{white-space:pre-wrap;background:#f5f5f3;padding:.6rem;border-radius:.3rem;margin:.3rem 0}"
    "details{border-bottom:1px solid #ddd;padding:.4rem "
    "0}summary{cursor:pointer}.role{color:#777;font-size:.85em}"
)


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """Every figure; of the mistakes their rows. What is no number is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            return None
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return value

    found: dict[str, Any] = finite(asdict(replace(evaluation, mistakes=())))
    found["warnings"] = list(evaluation.warnings)
    found["mistakes"] = [
        {"row": pair.scored.comparison.row, "kind": pair.scored.comparison.kind, "lead": pair.lead}
        for pair in evaluation.mistakes
    ]
    return found


def as_table(evaluation: Evaluation) -> Table:
    """Pairs overall and by kind, for a terminal."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*COLUMNS, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for row in _pair_rows(evaluation):
        table.add_row(*row)
    return table


def facts(evaluation: Evaluation) -> list[tuple[str, str]]:
    """What stands beside the table: name and value."""
    length, calibration, at = evaluation.length, evaluation.calibration, evaluation.quantiles
    found = {
        "calibration error": (
            f"{calibration.error:.3f} at temperature {calibration.temperature:.3g}"
        ),
        "Brier score": f"{calibration.brier_score:.3f}",
        "score and length": (
            f"{_number(length.spearman)}, within a prompt {_number(length.spearman_within)}"
        ),
        "chosen is shorter": _share(length.chosen_shorter),
        "chosen is longer": _share(length.chosen_longer),
        "scores": f"median {at['0.5']:.3g}, from {at['0']:.3g} to {at['1']:.3g}",
    }
    if groups := evaluation.groups:
        by_chance = f"by chance {groups.random_best_of_n:.1%}"
        found["best of N"] = f"{groups.best_of_n:.1%} of {groups.num_groups}, {by_chance}"
        found["Kendall's tau"] = _number(groups.kendall_tau)
    if judge := evaluation.judge:
        found["judge"] = (
            f"{judge.calls} calls, {judge.tokens} tokens, {judge.cached} from the cache"
        )
        lost = (
            f"{judge.failed} failed, {judge.unreadable} unreadable, {judge.over_budget} over budget"
        )
        found["judge's answers"] = f"{lost}; {judge.written} written verdicts"
        if judge.position_consistency is not None:
            found["same in both orders"] = _share(judge.position_consistency)
    if benchmark := evaluation.benchmark:
        found["RewardBench 2"] = f"{benchmark.overall:.1%}"
        found |= {f"  {subset}": f"{score:.1%}" for subset, score in benchmark.by_subset.items()}
    for probe in evaluation.probes:
        shift = f"mean shift {probe.mean_shift:+.2g}, scale x {_number(probe.scale_ratio)}"
        found[f"probe '{probe.name}'"] = f"differs by up to {probe.largest_difference:.2g}, {shift}"
    return list(found.items())


def draw(evaluation: Evaluation, file: Path) -> None:
    """Write a PNG: accuracy by kind, reliability, leads."""
    canvas = Canvas(
        f"{Path(evaluation.scorer).name} on {evaluation.source}", columns=3, shared=False
    )
    kinds, calibration, leads = canvas.panels
    figures = _by_name(evaluation)
    names = list(figures)[::-1]
    shares = [figures[name].accuracy for name in names]
    around = [
        [share.value - share.low for share in shares],
        [share.high - share.value for share in shares],
    ]
    kinds.errorbar(
        [share.value for share in shares],
        range(len(names)),
        xerr=around,
        fmt="o",
        color=_BLUE,
        capsize=3,
    )
    kinds.axvline(0.5, color=PALE, linestyle="--", linewidth=1)
    kinds.set_yticks(range(len(names)), names, parse_math=False)
    kinds.set_ylim(-0.6, len(names) - 0.4)
    kinds.set_xlim(-0.03, 1.03)
    kinds.set_xlabel("accuracy, 95 %")
    bins = [each for each in evaluation.calibration.bins if each.count]
    calibration.plot([0.5, 1], [0.5, 1], color=PALE, linestyle="--", linewidth=1)
    calibration.plot(
        [each.confidence for each in bins],
        [each.accuracy for each in bins],
        color=_BLUE,
        marker="o",
    )
    calibration.set_xlabel("confidence")
    calibration.set_ylabel("share that is right")
    calibration.set_ylim(-0.03, 1.03)
    leads.hist(evaluation.leads, bins=min(40, max(8, len(evaluation.leads) // 8)), color=_BLUE)
    leads.axvline(0, color=_ORANGE)
    leads.set_xlabel("lead of the chosen side")
    leads.set_ylabel("pairs")
    for axes in canvas.panels:
        axes.spines[["top", "right"]].set_visible(False)
    canvas.save(file)


def page(evaluation: Evaluation) -> str:
    """One HTML file with table, picture and the worst mistakes; nothing is loaded or run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "picture.png"
        draw(evaluation, file)
        picture = base64.b64encode(file.read_bytes()).decode()
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    title = f"{evaluation.scorer} on {evaluation.source}"
    warnings = "".join(
        f'<p class="warning">{escape(warning)}</p>' for warning in evaluation.warnings
    )
    mistakes = "".join(map(_mistake_html, evaluation.mistakes))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"{warnings}{_html_table(COLUMNS, _pair_rows(evaluation))}"
        f'<img alt="accuracy by kind, reliability, leads" src="data:image/png;base64,{picture}">'
        f"{_html_table(('', ''), facts(evaluation))}"
        f"<h2>Worst mistakes</h2>{mistakes or '<p>None.</p>'}</body></html>\n"
    )


def _by_name(evaluation: Evaluation) -> dict[str, PairFigures]:
    objectives = {f"objective {name}": figures for name, figures in evaluation.by_objective.items()}
    return {"all": evaluation.overall, **evaluation.by_kind, **objectives}


def _pair_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    """A share that might be a coin's is marked."""
    rows: list[tuple[str, ...]] = []

    def cells(share: Share, mark: str = "") -> tuple[str, str, str]:
        return str(share.count), f"{share.value:.1%}{mark}", f"{share.low:.1%} to {share.high:.1%}"

    for name, one in _by_name(evaluation).items():
        mark = ""
        if one.accuracy.holds_half:
            mark = " *"
        beside = (f"{one.half_credit:.1%}", f"{one.mean_margin:.3g}", f"{one.tie_rate:.1%}")
        rows.append((name, *cells(one.accuracy, mark), *beside))
    if evaluation.first_wrong_step is not None:
        rows.append(("first wrong step", *cells(evaluation.first_wrong_step), "–", "–", "–"))
    return rows


def _mistake_html(judged: Judged) -> str:
    comparison = judged.scored.comparison
    texts = [comparison.completions[place] for place in judged.places]
    if len(texts) == 1:
        roles = [f"the last step is {'right' if comparison.labels[judged.places[0]] else 'wrong'}"]
    else:
        roles = ["preferred", "scored higher"]
    parts = [
        *([("prompt", comparison.prompt)] if comparison.prompt else []),
        *zip(roles, texts, strict=True),
    ]
    body = "".join(
        f'<div class="role">{role}</div><pre>{escape(as_text(text))}</pre>' for role, text in parts
    )
    kind = ""
    if comparison.kind:
        kind = f", {escape(comparison.kind)}"
    return (
        f"<details><summary>Row {comparison.row}{kind}: lead "
        f"{judged.lead:.3g}</summary>{body}</details>"
    )


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _share(share: Share) -> str:
    if share.count:
        return f"{share.value:.1%} of {share.count}"
    return "no pairs"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}"
