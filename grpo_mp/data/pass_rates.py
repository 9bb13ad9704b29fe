"""Leave out prompts that are too easy or too hard, by how often answers to them were right."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from grpo_mp.config.data_sections import TrainSetConfig
from grpo_mp.data.rows import read_rows
from grpo_mp.utils.errors import UserError

PassRates = dict[str, float]  # by the prompt's text


def read_pass_rates(name: str) -> PassRates:
    """Read rows of `prompt` and either `is_correct`, a row a sample as `grpo-mp evaluate` writes, or `pass_rate`.

    A sample whose is_correct is null, which no term of the reward decided, does not count.
    Raises UserError for a row that has neither.
    """
    verdicts = defaultdict[str, list[float]](list)
    for row in read_rows(name):
        prompt, verdict = row.columns.get("prompt"), row.columns.get("pass_rate", row.columns.get("is_correct"))
        if verdict is None and "is_correct" in row.columns:
            continue
        if not isinstance(prompt, str) or not isinstance(verdict, bool | int | float) or not 0 <= verdict <= 1:
            raise UserError(f"{row.location}: expected a prompt with is_correct (true or false) or pass_rate (0 to 1)")
        verdicts[prompt].append(float(verdict))
    return {prompt: fmean(values) for prompt, values in verdicts.items()}


def within_pass_rates(texts: Iterable[str], file: str, train_set: TrainSetConfig) -> list[bool]:
    """Return for each prompt whether its pass rate is in the set's range, or the file lacks it.

    Raises UserError where the file is of other prompts, or none is left.
    """
    lowest, highest = train_set.min_pass_rate, train_set.max_pass_rate
    rates = read_pass_rates(file)
    measured = [rates.get(text) for text in texts]
    if not any(rate is not None for rate in measured):
        raise UserError(f"{file}: none of its prompts is in {train_set.path}: measure those")
    kept = [rate is None or lowest <= rate <= highest for rate in measured]
    if not any(kept):
        raise UserError(f"{train_set.path}: no prompt has a pass rate from {lowest:g} to {highest:g}: widen the range")
    return kept
