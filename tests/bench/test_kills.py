"""The benches of kills and of a soak: their short form, and what they take for a failure."""

from pathlib import Path

import pytest

from tests.bench import kills, soak


@pytest.mark.nightly
def test_a_run_whose_processes_are_killed_says_what_an_undisturbed_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the bench goes on where it was stopped, and fails where a run says something else."""
    short = ["--steps", "3", "--schedule", "turns", "--folder", str(tmp_path / "bench")]
    kills.main([*short, "--kills", "1"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED: 1 of 1 kills")
    found = kills.Found.read(tmp_path / "bench" / kills.FOUND)
    assert found.kills.total() == 1
    kills.main([*short, "--kills", "1"])  # all are done
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASSED: 1 of 1 kills")


@pytest.mark.parametrize(
    "bad", [{"different": ["run 1: step 2: reward/mean"]}, {"left": ["an engine"]}, {"again": 61}], ids=str
)
def test_what_is_not_as_it_should_be_fails(bad: dict, capsys: pytest.CaptureFixture[str]) -> None:
    counts = kills.Counter({"rank 0": 2})
    kills.report(kills.Found(kills=counts, again=60), in_flight=30)
    with pytest.raises(SystemExit) as caught:
        kills.report(kills.Found(**{"kills": counts} | bad), in_flight=30)
    assert caught.value.code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAILED: 2 kills, 1 failures"


def test_a_soak_fails_where_something_grows_or_differs(capsys: pytest.CaptureFixture[str]) -> None:
    flat = [{"memory": 1e9 + 1e6 * (number % 3), "threads": 40.0} for number in range(12)]
    soak.report(soak.Soak(flat, kills=11, starts=6), 100, [])
    assert "PASSED: 11 kills in 100 steps" in capsys.readouterr().out
    leaking = [usage | {"threads": 40.0 + 2 * number} for number, usage in enumerate(flat)]
    for usages, different in ((leaking, []), (flat, ["step 7: reward/mean"])):
        with pytest.raises(SystemExit):
            soak.report(soak.Soak(usages, kills=11, starts=6), 100, different)
        assert capsys.readouterr().out.splitlines()[-1] == "FAILED: 1 failures"
