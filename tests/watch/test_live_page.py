"""The page of a run that goes on, in a real browser: what it was told to show stays as new steps come."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.chromium import NEEDS_CHROMIUM, Browser
from tests.report.test_report import make_run, metrics, sample, write_lines

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]
STEPS = 20
FIRST_REWARD = "document.querySelector('#reward ~ .charts figure table tbody tr:last-child th').textContent"
STATE = """(() => {
  const table = document.querySelector("#reward ~ .charts figure .scroll");
  return {focused: document.activeElement.id, memory: document.getElementById("show-memory").checked,
    hidden: getComputedStyle(document.querySelector("section.section-memory")).display,
    colour: document.querySelector("[name=color]:checked").id, open: table.closest("details").open,
    filters: document.querySelector("details.filters").open, inner: table.scrollTop, outer: Math.round(scrollY),
    selected: String(getSelection())};
})()"""
ARRANGE = """(() => {
  document.querySelector("details.filters").open = true;
  document.getElementById("show-memory").click();
  document.getElementById("color-advantage").click();
  const table = document.querySelector("#reward ~ .charts figure .scroll");
  table.closest("details").open = true;
  table.scrollTop = 120;
  getSelection().selectAllChildren(document.getElementById("lengths"));
  document.getElementById("show-policy").focus({preventScroll: true});
  scrollTo({top: 700, behavior: "instant"});
})()"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", STEPS)


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "grpo_mp", "watch", str(run), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def add_step(run: Path, step: int) -> None:
    write_lines(run / "samples" / f"step_{step:06d}.jsonl", [sample(step, 0, 0), sample(step, 0, 1)])
    sick = {"mismatch/token_mult_prob_error": 1.2}  # a warning, once there are enough: above all that is shown
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps(metrics(step) | sick) + "\n")


def test_what_the_reader_has_set_stays_as_steps_come(run: Path, address: str, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(address)
        browser.evaluate(ARRANGE)
        before = browser.evaluate(STATE)
        shown = {"focused": "show-policy", "memory": False, "hidden": "none", "colour": "color-advantage"}
        shown |= {"open": True, "filters": True, "inner": 120, "outer": 700, "selected": "Lengths"}
        assert before == shown
        warnings = browser.evaluate("document.querySelectorAll('.warning').length")
        browser.evaluate("window.same = true")
        for step in range(STEPS + 1, STEPS + 9):
            add_step(run, step)
        browser.wait_for(f"{FIRST_REWARD} === '{STEPS + 8}'")
        assert browser.evaluate("window.same")  # the page was not loaded anew
        assert browser.evaluate("document.querySelectorAll('.warning').length") == warnings + 1
        browser.evaluate("new Promise((done) => setTimeout(done, 16000))")  # without a script it is loaded by then
        assert browser.evaluate("window.same")
        after = browser.evaluate(STATE)
        # What is above has grown: the browser keeps what is read where it is.
        assert after.pop("outer") >= before.pop("outer")
        assert after == before
        assert browser.evaluate("document.querySelectorAll('figure [role=img] svg path').length") > 100
        assert not browser.messages


def test_a_page_that_waits_for_the_first_step_becomes_the_report(run: Path, tmp_path: Path) -> None:
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("")
    command = [sys.executable, "-m", "grpo_mp", "watch", str(run), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        with Browser(tmp_path / "profile") as browser:
            browser.open(process.stdout.readline().strip())
            assert "no step is in metrics.jsonl yet" in browser.evaluate("document.body.textContent")
            (run / "metrics.jsonl").write_text(lines)
            browser.wait_for("document.querySelectorAll('figure').length > 30")
            assert browser.evaluate("document.querySelector('[role=alert]')") is None
            assert browser.evaluate("getComputedStyle(document.body).maxWidth") == "1344px"  # its style is taken
            os.kill(process.pid, signal.SIGKILL)
            browser.wait_for("document.querySelector('[role=alert]')?.textContent.includes('does not answer')")
    finally:
        process.kill()
        process.wait()
