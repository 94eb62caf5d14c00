"""The site of these pages, built by Sphinx: `make docs`.

The sources are the Markdown files as they lie in the repository, so that a link works in the same
way there and on the site. docs/README.md is the first page, and its tables are the table of
contents: a page gets its place, its caption and its line in llms.txt from its row.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = (
    "A complete, self-hosted stack for reinforcement-learning post-training of language models."
)

project = "Halteres"
author = "the Halteres authors"
copyright = author

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "recipes/*/README.md"]
# Sphinx walks through whatever is not named here.
exclude_patterns = [
    ".*",
    "build",
    "data",
    "dev",
    "dist",
    "docs/site",
    "scripts",
    "src",
    "tests",
    "wheelhouse",
    "benchmarks/[!R]*",
]

# Headings get the anchors that a forge gives them.
myst_heading_anchors = 4
# A link that leads nowhere is an error; links to the web are not tried.
nitpicky = True
# JSON on the pages is shortened by `…`, which no lexer reads.
suppress_warnings = ["misc.highlighting_failure"]
# What is typed stays as it is typed: no typographic dashes in `--set`.
smartquotes = False

html_theme = "furo"
html_title = "Halteres"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Prompts and outputs are not part of what a reader copies.
copybutton_prompt_text = "$ "


@dataclass(frozen=True, slots=True)
class Entry:
    """A page in the tables of docs/README.md."""

    section: str
    docname: str  # the file without its suffix, from the repository's root
    about: str


def entries() -> Iterator[Entry]:
    """Every page of the site in the order of the tables, then those of "Know more"."""
    section = ""
    for line in (ROOT / f"{root_doc}.md").read_text(encoding="utf-8").splitlines():
        heading = re.match(r"## (.+)", line)
        if heading:
            section = heading[1]
        row = re.match(r"\| \[[^]]+\]\(([^)#]+)\.md\) \| (.+) \|$", line)
        if row:
            yield Entry(section, _docname(row[1]), row[2])
        elif not line.startswith("|") and section:
            for target in re.findall(r"\]\(([^)#]+)\.md\)", line):
                yield Entry(section, _docname(target), "")


def _docname(target: str) -> str:
    """The page that a link of docs/README.md leads to."""
    path = (ROOT / "docs" / target).resolve()
    return path.relative_to(ROOT).as_posix()


def add_contents(app: Any, docname: str, source: list[str]) -> None:
    """Give the first page the tables of contents that Sphinx reads the order from."""
    if docname != root_doc:
        return
    sections: dict[str, list[str]] = {}
    for entry in entries():
        sections.setdefault(entry.section, []).append(f"/{entry.docname}")
    for section, docnames in sections.items():
        lines = "\n".join(docnames)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{lines}\n```\n"


def write_for_programs(app: Any, failed: Exception | None) -> None:
    """Put each page's Markdown next to its HTML, and write llms.txt and llms-full.txt.

    Source of the format: https://llmstxt.org
    """
    if failed is not None or app.builder.format != "html":
        return
    out = Path(app.outdir)
    for docname in app.env.found_docs:
        target = out / f"{docname}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / f"{docname}.md", target)
    lines = [f"# {project}", "", f"> {SUMMARY}"]
    texts: list[str] = []
    section = ""
    for entry in entries():
        if entry.section != section:
            section = entry.section
            lines += ["", f"## {section}", ""]
        title = app.env.titles[entry.docname].astext()
        about = ""
        if entry.about:
            about = f": {entry.about}"
        lines.append(f"- [{title}]({entry.docname}.md){about}")
        text = (ROOT / f"{entry.docname}.md").read_text(encoding="utf-8")
        texts.append(f"<!-- {entry.docname}.md -->\n\n{text.strip()}\n")
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "llms-full.txt").write_text("\n".join(texts), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Connect both to Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", write_for_programs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
