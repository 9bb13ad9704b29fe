"""Response lengths for a simulation: those that a run had, or a lognormal of a mean and a sigma."""

from pathlib import Path

from grpo_mp.planner.job import AssumedLengths, PlannedJob, response_lengths
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.reading import check_path, parse_json, read_text

LONGEST = 10**8  # tokens of a response


def read_lengths(file: Path) -> tuple[int, ...]:
    """Read tokens of responses: one number a line, or lines of a run's samples/step_*.jsonl, which have `tokens`.

    Raises UserError where a line has none.
    """
    if not check_path(file).exists():
        raise UserError(f"--lengths {file}: there is no such file")
    lines = read_text(file).splitlines()
    lengths = tuple(_length(file, number, line) for number, line in enumerate(lines, 1) if line.strip())
    if not lengths:
        raise UserError(f"--lengths {file}: the file is empty")
    return lengths


def lognormal_lengths(job: PlannedJob, sigma: float) -> tuple[int, ...]:
    """Return a step's lengths with the job's mean, and `sigma` of their logarithm, cut off at the limit."""
    rollout = job.settings.rollout
    mean, limit = job.mean_response_tokens, rollout.max_response_tokens
    return response_lengths(
        AssumedLengths(job.settings.samples_per_step, job.prompt_tokens, mean, limit, log_std=sigma)
    )


def _length(file: Path, number: int, line: str) -> int:
    try:
        value = parse_json(line, "")
    except UserError:
        value = None
    length = value.get("tokens") if isinstance(value, dict) else value
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= LONGEST:
        raise UserError(f"--lengths {file}:{number}: {line:.60} is no number of tokens, nor a sample with `tokens`")
    return length
