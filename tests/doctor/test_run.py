"""What is found about runs that were written out: their engines' model, their time, who the others wait for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.cli.main import main
from grpo_mp.monitor.live_engines import EngineServer, EngineWeights, ask_weights, read_server
from grpo_mp.monitor.rules import find_warnings
from grpo_mp.monitor.run_findings import (
    RunFacts,
    check_end,
    check_engines,
    check_live,
    check_ranks,
    check_sync,
    check_times,
    diagnose_run,
    worked_seconds,
)
from grpo_mp.monitor.timeline import Event
from grpo_mp.rollout.engine_args import EngineSpec, engine_arguments
from grpo_mp.rollout.engine_load import EngineLoad
from grpo_mp.utils.findings import Finding, Level

SETTINGS: Mapping[str, Any] = {
    "run": {"steps": 9},
}


def line(step: int, mean: float | None, **more: float) -> dict[str, float | None]:
    values = {"step": step, "sync/check/logprob_abs_diff/mean": mean, "sync/check/tokens": 100}
    values["sync/check/limit"] = 0.05
    return values | {"sync/engines": 2, "sync/weight_version": step, "train/optimizer_step": step} | more


def of(level: Level, findings: Sequence[Finding]) -> list[str]:
    return [finding.sentence for finding in findings if finding.level is level]


def test_engines_that_had_the_policys_model() -> None:
    (finding,) = check_sync([line(1, 0.01), line(2, 0.02, **{"sync/check/tokens": 800})])
    assert finding.level is Level.OK
    assert finding.evidence == [
        "mean |logprob difference|: at most 0.02, 0.05 is allowed",
        "compared on more tokens, for a tie of two experts or more, at step 2",
    ]


def test_a_run_that_stopped_before_its_end() -> None:
    facts = RunFacts(Path("r"), SETTINGS, [line(4, 0.0)], goes_on=False, last_log_line="a  note")
    (finding,) = check_end(facts)
    assert (finding.level, finding.sentence) == (
        Level.WARNING,
        "the run stopped after step 4 of 9, and none of its processes is there",
    )
    assert finding.evidence == ["the log of rank 0 ends with: a note"]
    assert finding in diagnose_run(facts)
    assert not [*check_end(replace(facts, goes_on=True)), *check_end(replace(facts, metrics=[line(9, 0.0)]))]


@pytest.mark.parametrize(
    ("lines", "level", "sentence"),
    [
        ([line(1, 0.01), line(2, 0.2)], Level.ERROR, "after 1 of 2 weight syncs the engines' logprobs were not"),
        ([line(1, 0.01), line(2, 0.08)], Level.WARNING, "after 1 of 2 weight syncs the engines' logprobs were not"),
        ([line(1, None), line(2, 0.01)], Level.WARNING, "after 1 of 2 weight syncs the engines' logprobs were not"),
        (
            [line(1, 0.0), line(2, 0.0, **{"sync/engines": 1})],
            Level.WARNING,
            "1 engines take the weights, there were 2",
        ),
        ([line(2, 0.0, **{"sync/weight_version": 1})], Level.ERROR, "the engines serve the weights of update 1, the"),
        ([{"step": 1}], Level.OK, "no weight sync was checked"),
    ],
)
def test_engines_that_had_not(lines: list[dict[str, float | None]], level: Level, sentence: str) -> None:
    assert [text for text in of(level, [*check_sync(lines)]) if text.startswith(sentence)]


def test_each_check_is_judged_by_the_limit_that_the_run_had() -> None:
    wide, narrow = {"sync/check/limit": 0.3}, {"sync/check/limit": 0.001}
    assert not of(Level.ERROR, [*check_sync([line(1, 0.2, **wide)])])
    assert of(Level.ERROR, [*check_sync([line(1, 0.2, **wide), line(2, 0.01, **narrow)])])
    unknown = {name: value for name, value in line(1, 0.2).items() if name != "sync/check/limit"}
    assert "is not judged" in of(Level.WARNING, [*check_sync([unknown])])[0]


def test_live_engines_are_compared_with_each_other() -> None:
    one, other = EngineWeights(0, "7", {"a": "1", "b": "2"}), EngineWeights(1, "7", {"a": "1", "b": "2"})
    (finding,) = check_live([one, other])
    assert finding.sentence == "2 engines answer with the weights of one update, checksums of 2 tensors alike"
    (finding,) = check_live([one, EngineWeights(1, "7", {"a": "1", "b": "3"})])
    assert (finding.level, finding.evidence[0]) == (Level.ERROR, "engines 0 and 1: first b")
    (finding,) = check_live([one, EngineWeights(1, "8", {"a": "4", "b": "5"})])
    assert finding.sentence.startswith("engines are between two weight versions")
    (finding,) = check_live([one, EngineWeights(1, "7")])
    assert "without checksums, since they sleep or are idle: engine 1" in finding.evidence
    (finding,) = check_live([one, EngineWeights(1, "8", changed=True)])
    assert "without checksums, since a sync changed their weights meanwhile: engine 1" in finding.evidence
    assert "idle" not in str(finding.evidence)
    assert of(Level.WARNING, [*check_live([EngineWeights(1, failure="gone")])]) == [
        "engine 1 does not say what it holds: gone"
    ]


def test_an_engines_arguments_say_where_it_answers() -> None:
    spec = EngineSpec(3, 1, Path("model"), "float32", 64, cpu=True)
    server = read_server(engine_arguments(spec, 15000, "engine-3-abc", "secret"))
    assert server == EngineServer(3, "http://127.0.0.1:15000", "secret", "cpu")
    assert read_server(engine_arguments(spec, 15000, "judge", "secret")) is None
    assert ask_weights(EngineServer(3, "http://127.0.0.1:1", "", "cpu")).failure


def test_time_beside_the_plan() -> None:
    times = {"time/step_s": 10.0, "time/generate_s": 6.0, "time/train_s": 3.0, "time/idle_share": 0.6}
    lines = [line(step, 0.0, **times, **{"time/overhead_share": 0.2}) for step in range(30)]
    found = [*check_times(lines, {"generate": 2.0, "train": 3.0})]
    assert of(Level.OK, found) == ["a step takes 10.00 s, mean of the last 20; the slowest rank's"]
    shown = next(finding for finding in found if finding.level is Level.OK).evidence
    assert shown == ["generate     6.00 s   60%, planned 2.00 s", "train        3.00 s   30%, planned 3.00 s"]
    assert of(Level.WARNING, found) == [
        "generate takes 6.0 s a step, the plan says 2.0",
        "ranks wait for others in 60% of a step",
        "20% of a step are outside its phases",
    ]
    assert "planned" not in str([*check_times(lines, {})])


@pytest.mark.parametrize(
    ("times", "evidence", "advice"),
    [
        ({"time/score_s": 2.0, "time/save_wait_s": 0.5}, "most of it: time/score_s, 2.00 s", "reward functions faster"),
        ({"time/score_s": 0.5, "time/save_wait_s": 2.0}, "most of it: time/save_wait_s, 2.00 s", "save less often"),
        ({"time/mine_s": 2.0, "time/save_s": 9.0, "time/wait_s": 5.0}, "most of it: time/mine_s, 2.00 s", "trace.json"),
        ({"time/save_s": 9.0, "time/eval_s": 9.0, "time/move_s": 3.0}, None, "no time has a name there"),
    ],
    ids=str,
)
def test_time_outside_the_phases_is_named(times: dict[str, float], evidence: str | None, advice: str) -> None:
    """As of supervised fine-tuning, which has no rewards."""
    lines = [{"step": 1, "time/step_s": 10.0, "time/train_s": 7.5, "time/overhead_share": 0.25} | times]
    (finding,) = (one for one in check_times(lines, {}) if "outside" in one.sentence)
    assert [*finding.evidence] == ([evidence] if evidence else [])
    assert advice in finding.advice


def spans(*those: tuple[str, str, float]) -> list[Event]:
    return [{"ph": kind, "name": name, "ts": second * 1e6} for kind, name, second in those]


def trace(train_s: float, wait_s: float) -> list[Event]:
    """A step of TRAIN with a WAIT inside, between WAITs outside of any phase."""
    end = train_s + wait_s
    return spans(
        *[("E", "TRAIN", -1.0), ("B", "WAIT", 0.0), ("E", "WAIT", 0.0), ("B", "TRAIN", 0.0)],
        *[("B", "backward", 0.0), ("E", "backward", train_s), ("B", "WAIT", train_s), ("E", "WAIT", end)],
        *[("E", "TRAIN", end), ("B", "WAIT", end), ("E", "WAIT", 20.0), ("B", "TRAIN", 20.0)],
    )


def test_the_slowest_rank_is_the_one_that_does_not_wait() -> None:
    assert worked_seconds(trace(4.0, 6.0)) == {"TRAIN": 4.0}
    found = [*check_ranks({0: trace(4.0, 6.0), 1: trace(10.0, 0.0), 2: trace(5.0, 5.0)})]
    assert of(Level.WARNING, found) == ["in train all wait for rank 1: it works 10.00 s, the median rank 5.00 s"]
    assert not of(Level.WARNING, [*check_ranks({0: trace(9.0, 1.0), 1: trace(10.0, 0.0)})])
    assert of(Level.WARNING, [*check_ranks({0: trace(1.0, 1.0), 1: trace(1.45, 0.0)})])  # of two the median is no mean
    assert [*check_ranks({0: trace(4.0, 6.0)})] == []


def test_ranks_of_engines_are_not_compared_with_ranks_that_train() -> None:
    """In a sync a rank of either kind does what the other does not."""

    def sync(sync_s: float) -> list[Event]:
        return spans(("B", "SYNC", 30.0), ("E", "SYNC", 30.0 + sync_s))

    trainers = {rank: [*trace(4.0, 6.0), *spans(("E", "TRAIN", 25.0)), *sync(1.0)] for rank in (0, 1)}
    found = [*check_ranks(trainers | {2: sync(9.0), 3: sync(9.0)})]
    assert not of(Level.WARNING, found)
    assert of(Level.WARNING, [*check_ranks(trainers | {2: sync(9.0), 3: sync(1.0)})]) == [
        "in sync all wait for rank 2: it works 9.00 s, the median rank 1.00 s"
    ]


def loads(speed: float, busy: int) -> list[EngineLoad]:
    return [EngineLoad(s, "works", int(s < busy), 0, 0.1, speed if s < busy else 0.0) for s in range(40)]


def test_the_slowest_engine_and_one_that_has_nothing_to_do() -> None:
    found = [*check_engines({0: loads(100.0, 30), 1: loads(50.0, 30), 2: loads(100.0, 12)})]
    assert of(Level.WARNING, found) == [
        "engine 1 decodes 50 tokens/s, the median engine 100",
        "engines have nothing to do while others generate",
    ]
    assert found[1].evidence == ["engine 2: 60% of the time of the busiest"]
    assert not of(Level.WARNING, [*check_engines({0: loads(100.0, 30), 1: loads(90.0, 27)})])
    assert of(Level.WARNING, [*check_engines({0: loads(100.0, 30), 1: loads(55.0, 30)})]) == [
        "engine 1 decodes 55 tokens/s, the median engine 100"
    ]
    assert [*check_engines({0: loads(0.0, 0)}), *check_engines({})] == []


def test_few_polls_compare_no_engines() -> None:
    """Six short steps, polled every five seconds: one engine was seen four times, the other never."""
    (few,) = check_engines({0: loads(100.0, 4), 1: loads(50.0, 1)})
    assert (few.level, few.sentence) == (
        Level.OK,
        "engines were seen generating in 4 polls, fewer than the 30 that can be compared",
    )
    (alone,) = check_engines({0: loads(100.0, 30)})
    assert alone.sentence == "engine 0 generates, 0.0 requests are queued at an engine on average"


def test_a_run_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1, 0.5)) + "\n")
    (tmp_path / "plan.json").write_text('{"phases": {"train": {"seconds": 1.0}, "sync": {"seconds": null}}}')
    assert main(["doctor", "run", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("error: after 1 of 1 weight syncs the engines' logprobs were not the policy's")
    (warning,) = find_warnings([line(1, 0.5)])
    assert f"error: {warning.sentence}\n    {warning.meaning}\n    at step 1; the rule is from " in said
    assert f"what to do: {warning.action} ({warning.setting})\n" in said


@pytest.mark.parametrize(
    ("metrics", "rule", "status"),
    [
        ({"train/loss": None}, "not_finite", 1),
        ({"train/grad_norm": 1e5}, "gradient_exploded", 1),
        ({"train/skipped_updates": 1.0}, "skipped_updates", 0),
        ({"train/padding_ratio": 0.9}, "padding", 0),
        ({"train/padding_ratio": 0.1}, "", 0),
    ],
)
def test_the_weight_of_a_warning_decides_the_status(
    metrics: dict[str, float | None], rule: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS))
    lines = [line(step, 0.0) | (metrics if step < 10 else {}) for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert {found.rule for found in find_warnings(lines)} == {*([rule] if rule else [])}
    assert main(["doctor", "run", str(tmp_path)]) == status
    assert ("error: " in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(("file", "sentence"), [(None, "no run folder"), ("settings.yaml", "no step is in")])
def test_what_is_no_run(file: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if file:
        (tmp_path / file).write_text("run: {}\n")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "run", str(tmp_path)])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
