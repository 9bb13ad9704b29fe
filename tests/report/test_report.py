"""A run folder is made by the run's own writers; the page is read back by Python's HTML parser and by Chromium."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from grpo_mp.cli.main import main
from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.errors import UserError
from grpo_mp.report.answers import CHARACTERS, group_rates, shortened, solve_bin
from grpo_mp.report.build import build_report
from grpo_mp.report.curves import POINTS, downsample
from grpo_mp.report.overview import settings_tables
from grpo_mp.report.page import render
from grpo_mp.report.records import SAMPLE_FILES, read_run, read_runs
from tests.minimal_settings import MINIMAL_SETTINGS

EVIL = "</pre><script>alert('$x')</script><img src=https://example.org/x>"
CHROMIUM = shutil.which("chromium")


def metrics(step: int) -> dict[str, float | None]:
    return {
        "step": step,
        "reward/mean": 9.0 if step == 77 else step / 1000,
        "reward/group_std": 0.25,
        "reward/term/answer": 0.5,
        "train/entropy": None if step == 2 else 1 / step,
        "time/step_s": 4.0,
        "time/generate_s": 3.0,
        "time/train_s": 1.0,
        "memory/train/peak_device_bytes": 3 * 2.0**30,
    }


def make_run(folder: Path, steps: int, **settings: object) -> Path:
    """Write a run folder of so many steps: two groups of two samples each, the same question at every step."""
    for name in ("samples", "eval"):
        (folder / name).mkdir(parents=True)
    (folder / "settings.yaml").write_text(dump_settings(check_settings(MINIMAL_SETTINGS | settings, "test")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(1, steps + 1):
        lines = [
            {"prompt": EVIL, "expected": "4", "response": f"{EVIL} {step} {group} {index}", "reward": index + group / 2}
            | {"is_correct": index == 1 or group == 1, "truncated": False, "tokens": 7 + index}
            | {"prompt_index": group, "group_id": group, "index": index}
            for group in (0, 1)
            for index in (0, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text(text)
    for step, value in ((0, 0.25), (steps, 0.75)):
        score = {"accuracy": value, "reward": 1.0, "length": 9.0, "accuracy_error": 0.01, "truncated_ratio": 0.0}
        score |= {"problems": 8, "samples": 2, "maj_at": {}, "pass_at": {1: {"value": value, "error": 0.01}}}
        (folder / "eval" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "sets": {"held_out": score}}))
    return folder


class Page(HTMLParser):
    """Addresses, tags, and texts by tag of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.labels: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "long", 1000)


@pytest.fixture(scope="module")
def page(long_run: Path) -> str:
    assert main(["report", str(long_run)]) == 0
    return (long_run / "report.html").read_text()


def test_the_page_of_a_long_run_asks_for_nothing_and_is_small(page: str) -> None:
    parsed = Page(page)
    assert len(page.encode()) < 5e6
    assert all(address.startswith(("#", "data:,")) for address in parsed.addresses)
    assert not re.search(r"@import|url\((?!#)", page)
    assert not {"script", "img", "iframe"} & {*parsed.tags}
    assert {address[1:] for address in parsed.addresses if address[:1] == "#"} <= {*re.findall(r'id="([^"]+)"', page)}


def test_text_of_the_model_is_text(page: str) -> None:
    assert EVIL + " 1000 1 1" in Page(page).texts


def test_every_chart_has_words_and_numbers(page: str) -> None:
    parsed = Page(page)
    assert parsed.tags.count("svg") == parsed.tags.count("figure") == page.count('role="img"') >= 6
    assert parsed.texts.count("Numbers") == parsed.tags.count("figure")
    assert "Entropy, nats, by step: entropy from 1 to 0.001" in parsed.labels


def test_sections_hold_what_the_records_say(long_run: Path) -> None:
    sections = {section.key: section for section in build_report(read_runs([long_run])).sections}
    reward = sections["reward"].charts[0].series[0]
    assert reward.x[0] == 1
    assert reward.x[-1] == 1000
    assert max(reward.values) == 9.0  # the spike at step 77 survives
    assert reward.low[0] == pytest.approx(0.001 - 0.25)
    entropy = next(chart for chart in sections["policy"].charts if chart.title == "Entropy").series[0]
    assert 2 not in entropy.x
    assert sections["memory"].charts[0].series[0].values[0] == 3.0
    assert ("generate", "3 s (75.0%)") in sections["time"].tables[0].rows
    rows = sections["scores"].tables[0].rows
    assert rows[0] == ("long", "held_out", "accuracy", "25.0% ± 1.0", "75.0% ± 1.0", "+50.0 points")
    rates = {series.name: series.values[0] for series in sections["reward"].charts[-1].series}
    assert rates == {"none": 0, "up to a third": 0, "up to two thirds": 0.5, "more": 0, "all": 0.5}


def test_answers_are_the_best_worst_longest_and_the_same_question(long_run: Path) -> None:
    answers = build_report(read_runs([long_run])).sections[-1].answers
    last = {one.why: one for one in answers if one.step == 1000}
    assert [last[why].response.split()[-2:] for why in ("best", "worst")] == [["1", "1"], ["0", "0"]]
    assert last["longest"].facts.startswith("reward 1, right, 8 tokens")
    assert len({one.step for one in answers if one.why == "same question"}) == SAMPLE_FILES


def test_settings_stand_beside_those_of_the_preset(tmp_path: Path) -> None:
    algorithm = {"preset": "dapo", "clip": {"high": 0.5}}
    table = settings_tables([read_run(make_run(tmp_path / "run", 1, algorithm=algorithm), "run")])[0]
    assert table.columns == ("setting", "dapo", "run")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["algorithm.clip.high"] == ("0.28", "0.5")
    assert rows["run.steps"] == ("(no default)", "3")
    assert "algorithm.clip.low" not in rows


def test_secrets_stay_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    settings["reward"]["judge"] = {"api_key": "hush-hush"}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert "hush-hush" not in render(build_report(read_runs([run])))


def test_runs_stand_side_by_side(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps) for name, steps in (("a", 2), ("b$<i>", 3))]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "both.html")]) == 0
    parsed = Page((tmp_path / "both.html").read_text())
    assert {"a mean", "b$<i> mean"} <= {*parsed.texts}
    assert "i" not in parsed.tags


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "rew')
    assert [line["step"] for line in read_run(run, "run").metrics] == [1, 2, 3]


def damage(run: Path, kind: str) -> None:
    if kind == "no settings":
        (run / "settings.yaml").unlink()
    elif kind == "no step":
        (run / "metrics.jsonl").write_text("")
    else:
        text = {"torn": '{"step": 1, "re\n{"step": 2}\n', "no step number": '{"reward/mean": 1}\n'}
        text |= {"text": '{"step": 1, "reward/mean": "a"}\n', "list": "[1]\n"}
        (run / "metrics.jsonl").write_text(text[kind])


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("no settings", "no run folder"),
        ("no step", "no step is in metrics.jsonl yet"),
        ("torn", r"metrics.jsonl:1: not valid JSON"),
        ("no step number", r"metrics.jsonl:1: no metrics of a step"),
        ("text", r"metrics.jsonl:1: no metrics of a step"),
        ("list", "a line is no JSON object"),
    ],
)
def test_what_is_no_run_is_a_sentence(tmp_path: Path, kind: str, sentence: str) -> None:
    run = make_run(tmp_path / "run", 1)
    damage(run, kind)
    with pytest.raises(UserError, match=sentence) as error:
        read_runs([run])
    assert "\n" not in str(error.value)


def test_downsampling_keeps_ends_and_extremes() -> None:
    values = [float(index % 97) for index in range(5000)]
    values[1234], values[4321] = -50.0, 500.0
    kept = downsample(values, POINTS)
    assert len(kept) <= POINTS
    assert kept == sorted({*kept})
    assert {0, 1234, 4321, 4999} <= {*kept}
    assert downsample(values[:POINTS], POINTS) == list(range(POINTS))


def test_solve_rates_of_groups() -> None:
    lines = [{"group_id": group, "is_correct": right} for group, right in ((1, True), (1, False), (2, None), (3, True))]
    assert group_rates(lines) == [0.5, 1.0]
    assert [solve_bin(right / 8) for right in range(9)] == [0, 1, 1, 2, 2, 2, 3, 3, 4]


def test_long_texts_are_cut_in_the_middle() -> None:
    text = shortened("a" * CHARACTERS + "b" * CHARACTERS)
    assert (text[0], text[-1]) == ("a", "b")
    assert f"[... {CHARACTERS:,} characters ...]" in text
    assert shortened("a\ud800") == "a?"


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium: `apt-get install chromium`")
def test_a_browser_shows_it_without_an_error(long_run: Path, page: str, tmp_path: Path) -> None:
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--enable-logging=stderr", "--window-size=390,844", "--dump-dom", (long_run / "report.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    assert Page(shown.stdout).tags.count("svg") == Page(page).tags.count("svg")
    assert EVIL + " 1000 1 1" in Page(shown.stdout).texts
