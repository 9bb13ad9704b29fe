"""The page in a real browser: Chromium of the distribution, without a window. CI has it, and skips nothing."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.report.build import build_report
from grpo_mp.monitor.report.contents import Chart, HeatMap, Picture
from grpo_mp.monitor.run_folder import read_runs
from tests.report.chromium import NEEDS_CHROMIUM, SHIFT, Browser
from tests.report.test_report import make_run

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
RUNS = (("first", 40), ("second", 30))
# What holds data: of a line or an area the group that has its run's class, of a map its picture.
TOOLS = """
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const isShown = (one) => one.checkVisibility() && one.getClientRects().length > 0;
const shown = (selector) => all(selector).filter(isShown).length;
const hasSize = (one) => one.getBBox().width + one.getBBox().height > 0;
const marks = (figure) => all("[role=img] g[class^=run]", figure).filter((one) => isShown(one) && hasSize(one)).length
  + all("[role=img] image", figure).filter((one) => isShown(one) && one.getAttribute("xlink:href").length > 100).length;
const charts = () => Object.fromEntries(all("figure").filter(isShown).map(
  (one) => [one.querySelector("h3").textContent, marks(one)]));
"""
FACTS = """({wide: document.documentElement.scrollWidth,
  small: all("figure [role=img] svg text").filter(isShown).filter((one) => {
    const box = one.getBoundingClientRect();  // of a turned letter, too
    return Math.max(box.width, box.height) < 9;
  }).map((one) => one.textContent),
  unlabelled: all("[role=img], [role=region], nav, input").filter(
    (one) => !one.getAttribute("aria-label") && !one.closest("label")).length})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [make_run(folder / name, steps) for name, steps in RUNS]
    assert main(["report", *map(str, runs), "--out", str(folder / "report.html")]) == 0
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium") / "profile") as browser:
        yield browser


@pytest.fixture
def browser(folder: Path, chromium: Browser) -> Iterator[Browser]:
    """It shows the page as it is at first. Its console must stay silent."""
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.open("about:blank")
    chromium.messages.clear()
    chromium.requests.clear()
    chromium.open((folder / "report.html").as_uri())
    chromium.evaluate(f"{TOOLS}; undefined")
    yield chromium
    assert not chromium.messages


def expected_marks(picture: Picture, run: int | None = None) -> int:
    """How many lines, bands, areas or bars are of a run, or of all."""
    if isinstance(picture, Chart):
        own = [one for one in picture.series if run in (None, one.run)]
        return sum(1 + bool(one.low) for one in own if not picture.stacked or any(one.values))
    if run not in (None, picture.run):
        return 0
    return 1 if isinstance(picture, HeatMap) else sum(bar.length > 0 for bars in picture.bars for bar in bars)


def test_every_line_of_every_chart_is_drawn(folder: Path, browser: Browser) -> None:
    """Also when one run is hidden; a chart of which no run is shown is hidden, too."""
    report = build_report(read_runs([folder / name for name, _ in RUNS]))
    pictures = {one.title: one for section in report.sections for one in section.charts}
    for hidden, run in (((), None), ((1,), 0), ((0,), 1), ((0, 1), -1)):
        for box in hidden:
            browser.evaluate(f"document.getElementById('show-run{box}').click()")
        expected = {title: expected_marks(picture, run) for title, picture in pictures.items()}
        assert browser.evaluate("charts()") == {title: count for title, count in expected.items() if count}
        for box in hidden:
            browser.evaluate(f"document.getElementById('show-run{box}').click()")
    assert len(pictures) > 30


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_a_phone_and_every_part_has_a_label(browser: Browser, width: int) -> None:
    browser.resize(width, 3000)
    found = browser.evaluate(FACTS)
    assert found["wide"] <= width
    assert (found["small"], found["unlabelled"]) == ([], 0)


def test_boxes_hide_sections_answers_and_tables_of_hidden_runs(browser: Browser) -> None:
    for box, what in (
        ("show-memory", ".section-memory"),
        ("show-right", "article.right"),
        ("show-kind2", "article.kind2"),
        ("show-run1", "article.run1, .of-1"),
    ):
        before = browser.evaluate(f"shown('{what}')")
        browser.evaluate(f"document.getElementById('{box}').click()")
        assert browser.evaluate(f"shown('{what}')") == 0 < before, box
        browser.evaluate(f"document.getElementById('{box}').click()")
        assert browser.evaluate(f"shown('{what}')") == before


def test_nothing_is_requested(folder: Path, browser: Browser, tmp_path: Path) -> None:
    asked = {address.partition(":")[0] for address in browser.requests}
    assert asked <= {"file", "data"}
    assert {address for address in browser.requests if address[:5] == "file:"} == {(folder / "report.html").as_uri()}
    asking = tmp_path / "asking.html"
    asking.write_text(
        '<!doctype html><title>x</title><link rel="icon" href="data:,"><img src="http://127.0.0.1:9/x.png">'
    )
    browser.open(asking.as_uri())
    assert "http://127.0.0.1:9/x.png" in browser.requests
    browser.messages.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_pictures_that_differ(browser: Browser, scheme: str) -> None:
    from PIL import Image

    browser.prefer(scheme)
    picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    with Image.open(io.BytesIO(picture)) as image:
        corner = image.convert("L").getpixel((2, 2))
        assert len(set(image.convert("L").resize((64, 80)).tobytes())) > 20
    assert (corner < 64) == (scheme == "dark")


# Of each text that is shown the contrast with what lies behind it, as WCAG 2 computes it; the least for each colours.
CONTRAST = """(() => {
  const parse = (color) => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a), 1];
  const light = (color) => color.slice(0, 3).map((one) => one / 255).map(
    (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4
  ).reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (one) => {
    const own = parse(getComputedStyle(one).backgroundColor);
    return own[3] === 1 ? own : over(own, one.parentElement ? behind(one.parentElement) : [255, 255, 255, 1]);
  };
  const found = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.nodeValue.trim() || !isShown(parent) || parent.closest("style")) continue;
    const style = getComputedStyle(parent), ground = behind(parent);
    let see = 1;
    for (let one = parent; one; one = one.parentElement) see *= Number(getComputedStyle(one).opacity);
    const [r, g, b, a] = parse(parent.closest("svg") ? style.fill : style.color);
    const levels = [light(over([r, g, b, a * see], ground)), light(ground)].sort((x, y) => y - x);
    const key = `${parent.nodeName} ${r} ${g} ${b} on ${ground.slice(0, 3).map(Math.round)}`;
    found[key] = Math.min(found[key] ?? 99, (levels[0] + 0.05) / (levels[1] + 0.05));
  }
  return found;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("coloring", ["nothing", "probability", "mismatch", "advantage"])
def test_every_text_has_contrast(browser: Browser, scheme: str, coloring: str) -> None:
    browser.prefer(scheme)
    browser.evaluate("all('details').forEach((one) => one.open = true)")
    browser.evaluate(f"document.getElementById('color-{coloring}').click()")
    found = browser.evaluate(CONTRAST)
    assert len(found) > 10
    assert any(name.startswith("text ") for name in found)  # of the drawings
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    grounds = {name.partition(" on ")[2] for name in found if name.startswith("SPAN")}
    assert len(grounds) == 1 if coloring == "nothing" else len(grounds) > 1


def test_every_control_is_reached_by_tab_and_shows_it(browser: Browser) -> None:
    browser.evaluate("document.querySelector('details.filters').open = true")
    # Of radio buttons Tab reaches the one that is checked.
    controls = "all('a[href], summary, input:not([type=radio]), input:checked, [tabindex=\"0\"]').filter(isShown)"
    count = browser.evaluate(f"window.controls = {controls}; controls.length")
    reached = []
    for _ in range(count):
        browser.press("Tab")
        place = "controls.indexOf(document.activeElement)"
        outline = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"
        reached.append(browser.evaluate(f"[{place}, {outline}]"))
    assert reached == [[place, True] for place in range(count)]
    assert count > 60
    browser.press("Tab", SHIFT)
    assert browser.evaluate("controls.indexOf(document.activeElement)") == count - 2


def test_every_kind_of_control_is_worked_by_keys(browser: Browser) -> None:
    def focus(selector: str) -> None:
        browser.evaluate(f"document.querySelector('{selector}').focus()")

    browser.press("Tab")
    browser.press("Enter")  # the link that skips what is before the contents
    assert browser.evaluate("location.hash") == "#main"
    focus('nav a[href="#lengths"]')
    browser.press("Enter")
    assert browser.evaluate("location.hash") == "#lengths"
    focus("details.filters summary")
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('details.filters').open")
    focus("#show-memory")
    browser.press(" ")
    assert browser.evaluate("shown('.section-memory')") == 0
    focus("#color-probability")
    browser.evaluate("all('article details').forEach((one) => one.open = true)")
    shade = "getComputedStyle(document.querySelector('.tokens .m4')).backgroundColor"
    before = browser.evaluate(shade)
    browser.press("ArrowRight")
    assert browser.evaluate("document.activeElement.id") == "color-mismatch"
    assert browser.evaluate("document.getElementById('color-mismatch').checked")
    assert browser.evaluate(shade) != before
    focus("#reward ~ .charts figure summary")
    browser.press("Enter")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.matches('.scroll')")
    browser.press("ArrowDown")
    browser.wait_for("document.activeElement.scrollTop > 0")


def test_the_page_has_no_script(folder: Path) -> None:
    assert not re.search(r"<script|script-src|connect-src", (folder / "report.html").read_text())
