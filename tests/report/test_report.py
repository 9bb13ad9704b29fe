"""A run folder is made by the run's own writers; the page is read back by Python's HTML parser and by Chromium."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from grpo_mp.cli.main import main
from grpo_mp.config.load import check_settings, dump_settings
from grpo_mp.monitor.curves import CURVES
from grpo_mp.monitor.report.charts import Chart
from grpo_mp.monitor.report.curves import POINTS, charts_of, downsample
from grpo_mp.monitor.report.page import build_report, render, scores_tables
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_folder import RunRecords, read_run
from grpo_mp.monitor.watch import curves
from grpo_mp.trainer.metrics import rollout_metrics
from grpo_mp.utils.errors import UserError
from tests.bench.picture import main_charts
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.trainer.test_metrics import INFOS

EVIL = "</pre><script>alert('$x')</script><img src=https://example.org/x>"


CHARTED = [
    pattern.replace("*", "x") for curves in CURVES.values() for one in curves for pattern in one.metrics.values()
]


def metrics(step: int) -> dict[str, float | None]:
    """Every metric that is on a chart."""
    return {
        **dict.fromkeys(CHARTED, 0.3 + step / 7000),
        **{name: 0.0 for name in CHARTED if name.startswith("rollout/solve_rate/")},
        "rollout/solve_rate/to_50": 0.75,
        "rollout/solve_rate/all": 0.25,
        "step": step,
        "reward/mean": 9.0 if step == 77 else step / 1000,
        "reward/group_std": 0.25,
        "train/entropy": None if step == 2 else 1 / step + 0.2,
        "train/expert_load/max_over_mean": 1.0,
        "time/step_s": 4.0,
        "time/generate_s": 600.0 if step == 502 else 3.0,
        "time/train_s": 1.0,
        "time/idle_share": 0.0,
        "time/overhead_share": 0.125,
        "memory/train/host_bytes": 2.5 * 2.0**30,
        "memory/train/peak_device_bytes": 3 * 2.0**30,
    }


def sample(step: int, group: int, index: int, **columns: object) -> dict[str, object]:
    return (
        {"prompt": EVIL, "expected": "4", "response": f"{EVIL} {step} {group} {index}", "reward": index + group / 2}
        | {"is_correct": index == 1 or group == 1, "truncated": False, "tokens": 7 + index}
        | {"prompt_index": group, "group_id": group, "index": index}
        | columns
    )


def write_lines(file: Path, lines: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_run(folder: Path, steps: int, **settings: object) -> Path:
    """Write a run folder of so many steps: two groups of two samples each, and an evaluation at either end."""
    for name in ("samples", "eval"):
        (folder / name).mkdir(parents=True)
    (folder / "settings.yaml").write_text(dump_settings(check_settings(MINIMAL_SETTINGS | settings, "test")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics(step)) + "\n" for step in range(1, steps + 1)))
    for step in range(1, steps + 1):
        lines = [sample(step, 0, 0), sample(step, 0, 1), sample(step, 1, 0), sample(step, 1, 1)]
        write_lines(folder / "samples" / f"step_{step:06d}.jsonl", lines)
    for step, value in ((0, 0.25), (steps, 0.75)):
        score = {"accuracy": value, "reward": 1.0, "length": 9.0, "accuracy_error": 0.01, "truncated_ratio": 0.0}
        score |= {"problems": 8, "samples": 2, "maj_at": {}, "pass_at": {1: {"value": value, "error": 0.01}}}
        (folder / "eval" / f"step_{step:06d}.json").write_text(json.dumps({"step": step, "sets": {"held_out": score}}))
        write_lines(folder / "samples" / f"eval_{step:06d}.jsonl", [sample(step, 7, 0, set="held_out")])
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
    inside = ("#", "data:,", "data:image/png;base64,")
    assert not [address for address in parsed.addresses if not address.startswith(inside)]
    assert not re.search(r"@import|url\((?!#)", page)
    assert not {"script", "img", "iframe"} & {*parsed.tags}
    assert {address[1:] for address in parsed.addresses if address[:1] == "#"} <= {*re.findall(r'id="([^"]+)"', page)}


def test_sections_hold_what_the_records_say(long_run: Path) -> None:
    sections = {section.key: section for section in build_report(read_run(long_run)).sections}
    reward = sections["reward"].charts[0].series[0]
    assert reward.x[0] == 1
    assert reward.x[-1] == 1000
    assert max(reward.values) == 9.0  # the spike at step 77 survives
    assert reward.low[0] == pytest.approx(0.001 - 0.25)
    memory = next(chart for chart in sections["memory"].charts if chart.title == "Device memory, peak")
    assert isinstance(memory, Chart)
    train = next(series for series in memory.series if series.name == "train")
    assert train.values[0] == 3.0
    assert ("train", "1 s (25.0%)") in sections["time"].tables[0].rows
    rows = sections["scores"].tables[0].rows
    assert rows[0] == ("held_out", "avg@2", "25.0% ± 1.0", "75.0% ± 1.0", "+50.0 points")


def test_answers_are_the_best_worst_longest_and_the_same_question(long_run: Path) -> None:
    answers = build_report(read_run(long_run)).sections[-1].answers
    last = {one.why: one for one in answers if one.step == 1000}
    assert [last[why].response.split()[-2:] for why in ("best", "worst")] == [["1", "1"], ["0", "0"]]
    assert "8 tokens" in last["longest"].facts
    assert [one.step for one in answers if one.why == "same question"] == [0, 1000]  # of the evaluations


def test_episodes_show_their_turns_and_failures_are_counted_by_kind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    messages = [
        {"role": "assistant", "content": f"look {EVIL}", "tool_calls": [call]},
        {"role": "tool", "name": "bash", "content": "one.py"},
        {"role": "assistant", "content": "done", "of": ""},
        {"role": "user", "content": "checked?", "of": "second"},
        {"role": "assistant", "content": "yes", "of": "second"},
    ]
    error = "prompt {}, sample 0, turn {}: it raised KeyError: 'no such row'"
    lines = [
        sample(1, 0, 1, state="completed", messages=messages, error=""),
        *(sample(1, n, 0, state="error", messages=[], error=error.format(n, n)) for n in (1, 2)),
    ]
    write_lines(run / "samples" / "step_000001.jsonl", lines)
    section = build_report(read_run(run)).sections[-1]
    best = next(answer for answer in section.answers if answer.why == "best")
    assert [(turn.role, turn.text) for turn in best.turns] == [
        ("policy, trained on", f"look {EVIL}\nbash({{'command': 'ls'}})"),
        ("bash, given", "one.py"),
        ("policy, trained on", "done"),
        ("second: user, given", "checked?"),
        ("second: policy, trained on", "yes"),
    ]
    assert best.facts.startswith("completed, reward 1")
    assert section.tables[0].rows == (("it raised KeyError: 'no such row'", "2"),)
    page = Page(render(build_report(read_run(run))))
    assert "bash, given" in page.labels
    assert "script" not in page.tags


def test_the_page_begins_with_a_verdict(long_run: Path) -> None:
    report = build_report(read_run(long_run))
    assert report.verdict == f"1000 of 3 steps; {len(report.warnings)} warnings; held_out 25.0% → 75.0%"
    page = render(report)
    assert page.index(report.verdict) < page.index("What was run")


def test_secrets_stay_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    settings["reward"]["judge"] = {"api_key": "hush-hush"}
    (run / "settings.yaml").write_text(yaml.safe_dump(settings))
    assert "hush-hush" not in render(build_report(read_run(run)))


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "rew')
    assert [line["step"] for line in read_run(run).metrics] == [1, 2, 3]


@pytest.mark.parametrize(
    ("file", "sentence"), [("settings.yaml", "no run folder"), ("metrics.jsonl", "no step is in metrics.jsonl yet")]
)
def test_a_folder_that_is_no_run_or_has_no_step_is_refused(tmp_path: Path, file: str, sentence: str) -> None:
    run = make_run(tmp_path / "run", 1)
    (run / file).unlink()
    with pytest.raises(UserError, match=sentence):
        read_run(run)


def test_warnings_come_in_order_of_weight_with_meaning_setting_and_source(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 12)
    sick = {"train/loss": None, "rollout/truncated_ratio": 0.9, "mismatch/token_mult_prob_error": 1.2}
    write_lines(run / "metrics.jsonl", [metrics(step) | sick for step in range(1, 13)])  # type: ignore[list-item]
    report = build_report(read_run(run))
    weights = [one.weight for one in report.warnings]
    assert weights == sorted(weights, reverse=True)
    assert len({98, 80, 61} & {*weights}) == 3
    page = render(report)
    for text in ("90% of the answers are cut off", "DAPO, arXiv 2503.14476", "(rollout.max_response_tokens)"):
        assert text in page
    opened = re.findall(r'<li class="warning"><details open>', page)
    assert len(opened) == 3 < len(weights)  # curves are not far below


def test_the_picture_of_the_readme_is_drawn_by_the_report(tmp_path: Path) -> None:
    """Its titles are those of the command that README names, of the quickstart's eval set."""
    root = Path(__file__).parents[2]
    picture = root / re.findall(r"--out (\S+\.svg)", (root / "README.md").read_text())[0]
    assert f"]({picture.relative_to(root)})" in (root / "README.md").read_text()
    texts = {text.strip() for text in ElementTree.parse(picture).getroot().itertext()}
    drawn = {chart.title for chart in main_charts(read_run(make_run(tmp_path / "run", 13)))}
    drawn.remove("Supervised loss")  # this made-up run has it, too
    assert {title.replace("held_out", "arithmetic") for title in drawn} <= texts
    assert picture.stat().st_size < 200_000


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_values_that_are_too_large_to_draw_are_gaps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    far = [
        metrics(step) | {"reward/mean": sign * 1e308, "time/step_s": 1e308} for step, sign in enumerate((1, -1, 1), 1)
    ]
    write_lines(run / "metrics.jsonl", [*far, {**metrics(4), "reward/mean": 10**400}, metrics(5)])  # type: ignore[list-item]
    assert main(["report", str(run)]) == 0
    near = [metrics(step) | {"reward/mean": (-1) ** step * 1e300, "time/train_s": 1e300} for step in range(1, 5)]
    write_lines(run / "metrics.jsonl", near)  # type: ignore[arg-type]
    assert main(["report", str(run)]) == 0


def test_downsampling_keeps_ends_extremes_and_gaps() -> None:
    values = [float(index % 97) for index in range(5000)]
    values[1234] = -50.0
    values[4321] = 500.0
    values[2500] = math.nan
    other = [0.0] * 5000
    other[777] = 1.0
    kept = downsample([values, other], POINTS)
    assert len(kept) <= POINTS
    assert kept == sorted({*kept})
    assert {0, 777, 1234, 2500, 4321, 4999} <= {*kept}
    assert downsample([values[:POINTS]], POINTS) == list(range(POINTS))


def supervised(step: int) -> dict[str, float]:
    """Held-out rows of two sets are scored every second step."""
    line = {"step": float(step), "sft/loss": 2.0 - 0.1 * step}
    return line | ({"eval/sums/loss": 1.5, "eval/code/loss": 2.5} if step % 2 == 0 else {})


def make_supervised(folder: Path) -> RunRecords:
    folder.mkdir()
    (folder / "settings.yaml").write_text(dump_settings(check_settings(MINIMAL_SETTINGS, "test")))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(supervised(step)) + "\n" for step in range(1, 7)))
    return read_run(folder)


def test_each_set_of_held_out_rows_has_a_line(tmp_path: Path) -> None:
    run = make_supervised(tmp_path / "run")
    (loss,) = (chart for chart in charts_of("policy", run) if chart.title == "Supervised loss")
    assert {line.name: line.values[-1] for line in loss.series} == {
        "train": 1.4,
        "held out sums": 1.5,
        "held out code": 2.5,
    }


def test_the_live_view_shows_the_losses_of_a_supervised_run_and_of_a_critic() -> None:
    lines: list[Any] = [supervised(step) | {"critic/explained_variance": 0.4} for step in range(1, 7)]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(curves(lines))
    for words in ("loss", "loss sums", "loss code", "explained", "1.400", "40%"):
        assert words in shown.get()


def test_one_evaluation_has_no_change(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", 4))
    (table,) = scores_tables(run)
    assert table.rows[0] == ("held_out", "avg@2", "25.0% ± 1.0", "75.0% ± 1.0", "+50.0 points")
    first = RunRecords("run", {}, run.metrics, {0: run.scores[0]}, {})
    (table,) = scores_tables(first)
    assert table.rows[0][2:] == ("", "25.0% ± 1.0", "")


def test_a_healthy_run_without_groups_has_no_warning() -> None:
    alone = [info for info in INFOS if info.index == 0]
    metrics = rollout_metrics(alone, weight_version=4)
    assert not {"reward/group_std", "reward/zero_std_ratio"} & metrics.keys()
    assert {"reward/group_std", "reward/zero_std_ratio"} <= rollout_metrics(INFOS, weight_version=4).keys()
    equal = {"reward/group_std": 0.0, "reward/zero_std_ratio": 1.0}
    steps = [{"step": float(step)} | equal for step in range(1, 11)]
    assert {found.rule for found in find_warnings(steps)} == {"no_signal", "zero_variance"}
    assert find_warnings([line | {"critic/value_loss": 0.2} for line in steps]) == ()


def test_entropy_that_collapses_is_found_where_nothing_says_what_is_right() -> None:
    falling = [{"step": float(step), "train/entropy": 0.5 if step <= 20 else 0.02} for step in range(1, 41)]
    assert [found.rule for found in find_warnings(falling)] == ["entropy_collapse"]
    solved = [line | {"rollout/accuracy": 0.9} for line in falling]
    assert find_warnings(solved) == ()


def test_a_judge_of_another_scale_is_no_form() -> None:
    steps = [{"step": float(step), "reward/term/judge": 4.2, "rollout/accuracy": 0.02} for step in range(1, 21)]
    assert find_warnings(steps) == ()
    assert [one.rule for one in find_warnings([line | {"reward/term/boxed": 0.9} for line in steps])] == [
        "format_without_answer"
    ]
