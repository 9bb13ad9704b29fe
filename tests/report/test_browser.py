"""The page in a real browser: Chromium of the distribution, without a window.

Nothing is skipped in CI, which installs it. A second page, which shows the first in a frame as wide as a phone, drives
its filters by clicks and writes what it sees into its own title.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_mp.cli.main import main
from tests.report.test_report import make_run

CHROMIUM = shutil.which("chromium")
EXPECTED = "GRPO_MP_TEST_BROWSER" in os.environ
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr")
OWN = "not an origin"  # who asks, where it is the browser
DRIVER = """<!doctype html><html lang="en"><title>no result</title>
<iframe id="page" style="width: WIDTHpx; height: 3000px; border: 0" src="report.html"></iframe><script>
onload = () => {
  const page = document.getElementById("page").contentDocument, found = {};
  const all = (selector) => [...page.querySelectorAll(selector)];
  const visible = (selector) => all(selector).filter((one) => one.getClientRects().length).length;
  const counts = () => ({figures: visible("figure"), paths: visible("figure svg path"), second: visible(".run1"),
    right: visible("article.right"), memory: visible(".section-memory")});
  const toggle = (id) => page.getElementById(id).click();
  page.querySelector("details.filters").open = true;
  found.all = counts();
  found.empty = all("figure [role=img] svg").filter((one) => !one.querySelector("path, image")).length;
  found.wide = page.documentElement.scrollWidth;
  const size = (box) => Math.max(box.width, box.height);  // of a turned letter, too
  found.small = all("figure [role=img] svg text").filter(
    (one) => one.getClientRects().length && size(one.getBoundingClientRect()) < 9).map((one) => one.textContent);
  toggle("show-run1"); found.without_run = counts(); toggle("show-run1");
  toggle("show-memory"); found.without_memory = counts(); toggle("show-memory");
  toggle("show-right"); found.without_right = counts(); toggle("show-right");
  page.querySelectorAll("article details").forEach((one) => one.open = true);
  const shade = () => page.defaultView.getComputedStyle(page.querySelector(".tokens .m4")).backgroundColor;
  toggle("color-nothing"); const before = shade(); toggle("color-mismatch"); found.shaded = shade() !== before;
  found.unlabelled = all("[role=img], [role=region], nav, input").filter(
    (one) => !one.getAttribute("aria-label") && !one.closest("label")).length;
  document.title = JSON.stringify(found);
};
</script></html>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM and not EXPECTED, reason="no chromium: `apt-get install chromium`"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [make_run(folder / name, steps) for name, steps in (("first", 40), ("second", 30))]
    assert main(["report", *map(str, runs), "--out", str(folder / "report.html")]) == 0
    return folder


def browse(page: Path, profile: Path, *flags: str) -> str:
    """Open a page; return its text. Fails where the console got a message of it."""
    assert CHROMIUM, "CI installs chromium"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    messages = [line for line in shown.stderr.splitlines() if "CONSOLE" in line and "127.0.0.1:9" not in line]
    assert not messages
    return shown.stdout


@pytest.mark.parametrize("width", [390, 1280])
def test_charts_are_drawn_and_filters_work(folder: Path, tmp_path: Path, width: int) -> None:
    driver = folder / "driver.html"
    driver.write_text(DRIVER.replace("WIDTH", str(width)))
    text = browse(driver, tmp_path, "--allow-file-access-from-files", "--window-size=1400,3000", "--dump-dom")
    found = json.loads(text[text.index("<title>") + 7 : text.index("</title>")])
    everything = found["all"]
    assert everything["figures"] > 30
    assert (found["empty"], found["small"], found["unlabelled"], found["shaded"]) == (0, [], 0, True)
    assert found["wide"] <= width
    assert found["without_run"]["second"] == 0 < everything["second"]
    assert 0 < found["without_run"]["paths"] < everything["paths"]
    assert found["without_memory"]["memory"] == 0 < everything["memory"]
    assert found["without_right"]["right"] == 0 < everything["right"]


def requested(page: Path, folder: Path) -> set[str]:
    """Every address that a page asks for, by Chromium's own log of its network; not what the browser itself does."""
    log = folder / "net.json"
    browse(page, folder / "profile", f"--log-net-log={log}", "--dump-dom")
    events = [event["params"] for event in json.loads(log.read_text())["events"] if "params" in event]
    return {one["url"] for one in events if one.get("initiator", OWN) != OWN and "url" in one}


def test_nothing_is_requested(folder: Path, tmp_path: Path) -> None:
    asking = tmp_path / "asking.html"
    asking.write_text(
        '<!doctype html><title>x</title><link rel="icon" href="data:,"><img src="http://127.0.0.1:9/x.png">'
    )
    (tmp_path / "asking").mkdir()
    assert requested(asking, tmp_path / "asking") == {"http://127.0.0.1:9/x.png"}
    assert requested(folder / "report.html", tmp_path) == set()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_pictures_that_differ(folder: Path, tmp_path: Path, scheme: str) -> None:
    from PIL import Image

    picture = tmp_path / "page.png"
    flags = ("--force-dark-mode",) if scheme == "dark" else ()
    browse(folder / "report.html", tmp_path / "profile", *flags, "--window-size=1280,1600", f"--screenshot={picture}")
    with Image.open(picture) as image:
        corner = image.convert("L").getpixel((2, 2))
        assert len(set(image.convert("L").resize((64, 80)).tobytes())) > 20
    assert (corner < 64) == (scheme == "dark")
