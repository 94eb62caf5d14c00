"""One HTML file of the page's own modules; the browser opens one in tests/dashboard/test_page.py."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path

import pytest

from halteres import standalone_page as standalone
from halteres.standalone_page import STATIC, standalone_page

HOSTILE = "</script><script>alert(1)</script><!--"


def between(page: str, begin: str, end: str) -> str:
    return page.split(begin)[1].split(end)[0]


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_the_policy_names_the_one_script_and_the_one_style() -> None:
    page = standalone_page("dom.js", {}, title="x")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert page.count("<script>") == page.count("<style>") == 1
    script, style = between(page, "<script>", "</script>"), between(page, "<style>", "</style>")
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest(script)}'; style-src 'sha256-{digest(style)}'" in policy
    assert not re.search(r"\bsrc=|\bhref=|url\(|@import", page.replace(script, ""))


def test_nothing_of_the_data_or_the_title_is_markup() -> None:
    data = {"text": HOSTILE, "half": "\ud800", HOSTILE: [None]}
    page = standalone_page("dom.js", data, title=HOSTILE)
    assert page.count("</script>") == 2 and "<script>alert" not in page and "<!--" not in page
    held = between(page, 'id="data">', "</script>")
    assert json.loads(held) == data


def test_a_figure_that_is_not_finite_is_null_also_next_to_half_a_character() -> None:
    for text in ("whole", "\ud800"):
        page = standalone_page("dom.js", {"text": text, "figure": math.nan}, title="x")
        held = between(page, 'id="data">', "</script>")
        assert "NaN" not in held and json.loads(held)["figure"] is None


def test_modules_come_before_those_that_import_them_and_each_comes_once() -> None:
    page = standalone_page("chart.js", None, title="x")
    scopes = re.findall(r"^const (module_\w+) = \(\(\) =>", page, re.MULTILINE)
    assert scopes[-1] == "module_chart"
    assert len(set(scopes)) == len(scopes) and {"module_dom", "module_scale"} < set(scopes)


@pytest.mark.parametrize("name", sorted(file.name for file in STATIC.glob("*.js")))
def test_every_module_of_the_page_can_be_inlined(name: str) -> None:
    page = standalone_page(name, None, title="x")
    script = between(page, "<script>", "</script>")
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


@pytest.mark.parametrize(
    "text",
    ["export default 1;\n", 'import * as dom from "./dom.js";\n', "const end = '</script>';\n"],
)
def test_a_module_of_another_form_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("index.html", "x.js"):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(standalone, "STATIC", tmp_path)
    with pytest.raises(ValueError, match=r"x\.js"):
        standalone_page("x.js", None, title="x")
