"""Table of the held-out scores after each stage of a pipeline."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_mp.monitor.evaluation import EvalScore, read_scores
from grpo_mp.pipeline.stages import EVALUATE, StageJob
from grpo_mp.utils.files import write_atomically

Scores = Mapping[str, Mapping[str, EvalScore]]  # stage -> eval set -> score
TABLE = "scores.md"
HEADER = "| after | set | accuracy, % | pass@k, % | reward terms | answer, tokens | cut off, % | stage, s |"


def read_stage_scores(jobs: Sequence[StageJob]) -> dict[str, dict[str, EvalScore]]:
    """Return the available scores: stage -> eval set -> score, in the order of the jobs."""
    found = [job for job in jobs if job.command == EVALUATE and job.result.exists()]
    return {job.stage: read_scores(job.result) for job in found}


def score_table(scores: Scores, seconds: Mapping[str, float]) -> str:
    """Return a Markdown table with a row for each stage and eval set. `seconds`: duration of each stage."""
    lines = [HEADER, "|---" * HEADER.count(" |") + "|"]
    for stage, sets in scores.items():
        for name, score in sets.items():
            error = f" ± {100 * score.accuracy_error:.1f}" if score.accuracy_error is not None else ""
            accuracy = "" if score.accuracy is None else f"{100 * score.accuracy:.1f}{error}"
            k = max(score.pass_at, default=0)
            pass_at = f"{100 * score.pass_at[k].value:.1f} (k = {k})" if k else ""
            terms = ", ".join(f"{term} {value:.2f}" for term, value in score.reward_terms.items())
            took = f"{seconds[stage]:.0f}" if stage in seconds else ""
            cells = (stage, name, accuracy, pass_at, terms, f"{score.length:.1f}", f"{100 * score.truncated_ratio:.1f}")
            lines.append("| " + " | ".join([*cells, took]) + " |")
    return "\n".join(lines) + "\n"


def write_stage_scores(folder: Path, scores: Scores, seconds: Mapping[str, float]) -> None:
    """Write the table to the pipeline's folder and print it."""
    table = score_table(scores, seconds)
    write_atomically(folder / TABLE, table)
    print(table, end="", flush=True)
