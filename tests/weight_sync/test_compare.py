import math

import pytest

from grpo_mp.weight_sync.compare import (
    LEAST_LIMIT,
    MAX_ROUTING_TIES,
    RECHECK_SETS,
    CheckReport,
    compare,
    comparison_sequences,
    pool_reports,
    trimmed_mean,
)


def test_mean_and_largest_difference_over_all_tokens() -> None:
    report = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
    assert report == CheckReport(mean=0.25, largest=0.5, tokens=3)
    assert report.passes(0.25)
    assert not report.passes(0.2499)


def test_pool_reports_equals_one_report_on_all_tokens() -> None:
    engine = [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]]
    policy = [[-1.5, -2.0], [-2.75], [-4.0, -5.0, -7.0]]
    reports = [compare([left], [right]) for left, right in zip(engine, policy, strict=True)]
    assert pool_reports(reports) == compare(engine, policy)


def test_a_few_ties_pass_and_a_wrong_tensor_that_few_tokens_see_does_not() -> None:
    """Use the case of a run that stopped wrongly: 0.762 nats among 8149 tokens are a mean of 1.02e-4."""
    tie = compare([[-1.0] * 254], [[-1.0] * 253 + [-1.762]])
    equal = compare([[-1.0] * 254], [[-1.0] * 254])
    ties = [tie] * MAX_ROUTING_TIES
    assert trimmed_mean([*ties, *[equal] * (RECHECK_SETS - len(ties))]) == pytest.approx(0)
    rarely_chosen_expert = compare([[-1.0] * 254], [[-1.0] * 253 + [-1.05]])  # seen by one token of each set
    assert trimmed_mean([rarely_chosen_expert] * RECHECK_SETS) == pytest.approx(5 * 0.05 / (254 * 8 - 3))
    assert trimmed_mean([rarely_chosen_expert] * RECHECK_SETS) > LEAST_LIMIT
    everywhere = compare([[-1.0] * 254], [[-1.0002] * 254])
    assert trimmed_mean([everywhere] * RECHECK_SETS) > LEAST_LIMIT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    report = compare([[-1.0, bad]], [[-1.0, -1.0]])
    assert not report.passes(1e9)
    assert not compare([[bad]], [[bad]]).passes(1e9)
    assert not pool_reports([report, CheckReport(0.0, 0.0, 1000)]).passes(1e9)


def test_the_first_set_has_the_first_prompts() -> None:
    prompts = [tuple(range(start, start + 100)) for start in range(0, 1000, 100)]
    assert comparison_sequences(prompts, 400) == tuple(prompts[:4])
    assert comparison_sequences(prompts, 70) == tuple(prompt[:70] for prompt in prompts[:4])


def test_other_sets_are_other_texts_of_the_same_prompts() -> None:
    prompts = [tuple(range(start, start + 30)) for start in range(0, 60, 30)]
    sets = [comparison_sequences(prompts, 50, number) for number in range(RECHECK_SETS)]
    assert len(set(sets)) == RECHECK_SETS
    assert sets == [comparison_sequences(prompts, 50, number) for number in range(RECHECK_SETS)]
    for texts in sets[1:]:
        assert all(len(text) >= 2 and text in {prompt[-len(text) :] for prompt in prompts} for text in texts)
