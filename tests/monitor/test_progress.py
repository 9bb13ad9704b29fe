"""The progress output as text: one line per step in a log, a live line on a terminal, the closing tables."""

import io
from pathlib import Path

from rich.console import Console

from grpo_mp.monitor.evaluation import Estimate, EvalScore
from grpo_mp.monitor.progress import Progress

SCALARS = {
    "reward/mean": 0.8125,
    "speed/generate_tokens_per_s": 5120.4,
    "time/step_s": 3.0,
    "time/generate_s": 1.5,
    "time/train_s": 1.25,
}


def log_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=60)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run_two_steps(console: Console, rank: int = 0) -> None:
    with Progress(Path("runs/x"), steps=12, done=10, rank=rank, console=console) as progress:
        progress.note("engine 0 is up")
        for step in (11, 12):
            with progress.phase("GENERATE"):
                pass
            progress.step(step, SCALARS, accuracy=0.5)


def test_log_has_one_short_line_per_step() -> None:
    console = log_console()
    run_two_steps(console)
    assert output(console).splitlines() == [
        "engine 0 is up",
        "step 11/12  reward 0.812  accuracy 50.0%  5120 tokens/s  3.0 s (generate 1.5, train 1.2)  0 s left",
        "step 12/12  reward 0.812  accuracy 50.0%  5120 tokens/s  3.0 s (generate 1.5, train 1.2)  0 s left",
    ]


def test_terminal_shows_the_phase_and_keeps_the_step_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    run_two_steps(console)
    assert "GENERATE  the engines write answers" in output(console)
    assert output(console).count("generate 1.5, train 1.2") == 2


def test_several_samples_have_a_row_for_each_k() -> None:
    def make_score(accuracy: float, pass_at_2: float, maj_at_2: float) -> EvalScore:
        return EvalScore(
            accuracy,
            0.6,
            21.0,
            accuracy_error=0.021,
            samples=2,
            pass_at={1: Estimate(accuracy, 0.021), 2: Estimate(pass_at_2, 0.03)},
            maj_at={1: Estimate(accuracy, 0.021), 2: Estimate(maj_at_2)},
        )

    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with Progress(Path("runs/x"), steps=2, console=console) as progress:
        progress.print_eval(2, {"a": make_score(0.5, 0.75, 0.625)})
        progress.finish({"a": make_score(0.25, 0.8, 0.25)}, {"a": make_score(0.5, 0.75, 0.625)})
        progress.print_scores("model", {"a": make_score(0.5, 0.75, 0.625), "unjudged": EvalScore(None, 0.5, 4.0)})
    text = output(console)
    assert "eval after step 2: a 50.0% right (avg@2), pass@2 75.0%, maj@2 62.5%, reward 0.600, 21 tokens" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows[:6] == [
        ["a", "avg@2", "25.0% ± 2.1", "50.0% ± 2.1", "+25.0 points"],
        ["", "pass@1", "25.0% ± 2.1", "50.0% ± 2.1", "+25.0 points"],
        ["", "pass@2", "80.0% ± 3.0", "75.0% ± 3.0", "-5.0 points"],
        ["", "maj@1", "25.0% ± 2.1", "50.0% ± 2.1", "+25.0 points"],
        ["", "maj@2", "25.0%", "62.5%", "+37.5 points"],
        ["", "reward", "0.600", "0.600", "+0.000"],
    ]
    assert ["a", "avg@2", "50.0% ± 2.1"] in rows
    assert ["unjudged", "reward", "0.500"] in rows
