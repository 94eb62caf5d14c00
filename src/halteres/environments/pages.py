"""One static page for the groups of a `process` run.

Owns: the page; every text in it is escaped, model output above all.
Never: loads anything from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from halteres.environments.scored import ScoredDataGroup, action_tokens, prompt_tokens, rollouts_of, scores_of
from halteres.text import Tokenizer

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "pre{white-space:pre-wrap;background:#f5f5f3;padding:.6rem;border-radius:.3rem;margin:.3rem 0}"
    "details{border-bottom:1px solid #ddd;padding:.4rem 0}summary{cursor:pointer}"
    ".role{color:#777;font-size:.85em}.score{font-weight:600}"
)


def render_page(title: str, groups: Sequence[ScoredDataGroup], tokenizer: Tokenizer) -> str:
    """The whole page."""
    scores = [score for group in groups for score in scores_of(group)]
    mean = f"{sum(scores) / len(scores):.3f}" if scores else "–"
    heading = f"<h1>{escape(title)}</h1><p>{len(groups)} groups, mean score {mean}</p>"
    details = "".join(_group(number, group, tokenizer) for number, group in enumerate(groups, 1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{heading}{details}</body></html>\n"
    )


def _group(number: int, group: ScoredDataGroup, tokenizer: Tokenizer) -> str:
    scores = " ".join(f"{score:g}" for score in scores_of(group))
    rollouts = "".join(_rollout(group, rollout, tokenizer) for rollout in rollouts_of(group))
    return f"<details><summary>Group {number}: {escape(scores)}</summary>{rollouts}</details>"


def _rollout(group: ScoredDataGroup, rollout: Sequence[int], tokenizer: Tokenizer) -> str:
    messages = group.get("messages")
    texts = (_chat(messages[place]) if messages else _plain(group, place, tokenizer) for place in rollout)
    return f'<p class="score">score {group["scores"][rollout[0]]:g}</p>{"".join(texts)}'


def _chat(messages: Sequence[dict[str, Any]]) -> str:
    return "".join(_text(str(message.get("role", "")), str(message.get("content", ""))) for message in messages)


def _plain(group: ScoredDataGroup, place: int, tokenizer: Tokenizer) -> str:
    prompt = tokenizer.decode(prompt_tokens(group, place), skip_special_tokens=False)
    return _text("prompt", prompt) + _text("answer", tokenizer.decode(action_tokens(group, place)))


def _text(role: str, text: str) -> str:
    return f'<div class="role">{escape(role)}</div><pre>{escape(text)}</pre>'
