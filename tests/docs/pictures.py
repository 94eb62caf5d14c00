"""Make the pictures of README.md: the page of a quick start, in light and in dark.

`scripts/pictures` calls it. The page is photographed as visitors find it, in the browser that its
tests drive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dashboard.browser import browser, serving, visiting

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TRAINS_WITHIN_S = 900
# The curve is level by then; later steps, whose groups are all solved, only fill the head with remarks.
STEPS = 14
WIDTH, HEIGHT = 1100, 1000
MARGIN = 8
NUM_COLOURS = 128


def train(home: Path) -> str:
    """A quick start in an empty home.

    Returns:
        The run's id.

    Raises:
        subprocess.CalledProcessError: the run failed; its own words are on the terminal.
        subprocess.TimeoutExpired: it took longer than a quarter of an hour.
    """
    subprocess.run(
        [sys.executable, "-m", "halteres", "quickstart", "--steps", str(STEPS)],
        env={**os.environ, "HALTERES_HOME": str(home)},
        check=True,
        timeout=TRAINS_WITHIN_S,
    )
    (state,) = home.glob("runs/*/run.json")
    return state.parent.name


def photograph(chromium: Browser, url: str, run: str, scheme: Literal["light", "dark"]) -> None:
    """Write `page-SCHEME.png`: the run's page from its top to the end of its first chart."""
    size = {"width": WIDTH, "height": HEIGHT}
    with visiting(chromium, url, viewport=size, color_scheme=scheme) as visit:
        page = visit.enter(f"#/runs/{run}")
        chart = page.locator("main svg").first
        chart.wait_for()
        page.wait_for_load_state("networkidle")
        box = chart.bounding_box()
        assert box, "the chart is on the page"
        height = min(HEIGHT, box["y"] + box["height"] + MARGIN)
        file = PICTURES / f"page-{scheme}.png"
        page.screenshot(
            path=file,
            animations="disabled",
            clip={"x": 0, "y": 0, "width": WIDTH, "height": height},
        )
    shrink(file)


def shrink(file: Path) -> None:
    """Keep as many colours as a picture of text and lines needs: a third of the bytes."""
    from PIL import Image

    with Image.open(file) as picture:
        few = picture.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    few.save(file, optimize=True)


def main() -> None:
    """Train once, photograph twice."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="halteres-pictures-") as home:
        os.environ["HALTERES_HOME"] = home
        run = train(Path(home))
        with browser() as chromium, serving() as url:
            photograph(chromium, url, run, "light")
            photograph(chromium, url, run, "dark")


if __name__ == "__main__":
    main()
