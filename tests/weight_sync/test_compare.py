import math

import pytest

from grpo_mp.weight_sync.compare import (
    MAX_ROUTING_TIES,
    RECHECK_SETS,
    TOLERANCE,
    CheckReport,
    compare,
    comparison_sequences,
    describe_difference,
    pool_reports,
    trimmed_mean,
    worst_report,
)

CHECKSUMS = {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"}


def test_mean_and_largest_difference_over_all_tokens() -> None:
    report = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
    assert report == CheckReport(mean=0.25, largest=0.5, tokens=3)
    assert report.passes(0.25)
    assert not report.passes(0.2499)


def test_pool_reports_equals_one_report_on_all_tokens() -> None:
    engine, policy = [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]], [[-1.5, -2.0], [-2.75], [-4.0, -5.0, -7.0]]
    reports = [compare([left], [right]) for left, right in zip(engine, policy, strict=True)]
    assert pool_reports(reports) == compare(engine, policy)


def test_one_routing_tie_passes_and_a_small_error_everywhere_fails() -> None:
    tied = CheckReport(mean=0.53 / 500, largest=0.53, tokens=500)
    good = CheckReport(mean=4e-7, largest=2e-6, tokens=500)
    assert not tied.passes(TOLERANCE["float32"])
    assert trimmed_mean([tied] + [good] * (RECHECK_SETS - 1)) <= TOLERANCE["float32"]
    assert trimmed_mean([CheckReport(1.1e-4, 1e-3, 500)] * RECHECK_SETS) > TOLERANCE["float32"]


def test_a_few_ties_pass_and_a_wrong_tensor_that_few_tokens_see_does_not() -> None:
    """Use the case of a run that stopped wrongly: 0.762 nats among 8149 tokens are a mean of 1.02e-4."""
    tie, equal = compare([[-1.0] * 254], [[-1.0] * 253 + [-1.762]]), compare([[-1.0] * 254], [[-1.0] * 254])
    ties = [tie] * MAX_ROUTING_TIES
    assert trimmed_mean([*ties, *[equal] * (RECHECK_SETS - len(ties))]) == pytest.approx(0)
    rarely_chosen_expert = compare([[-1.0] * 254], [[-1.0] * 253 + [-1.05]])  # seen by one token of each set
    assert trimmed_mean([rarely_chosen_expert] * RECHECK_SETS) == pytest.approx(29 * 0.05 / (254 * 32 - 3))
    assert trimmed_mean([rarely_chosen_expert] * RECHECK_SETS) > TOLERANCE["float32"]
    everywhere = compare([[-1.0] * 254], [[-1.0002] * 254])
    assert trimmed_mean([everywhere] * RECHECK_SETS) > TOLERANCE["float32"]


def test_worst_report_of_several_engines() -> None:
    assert worst_report([CheckReport(0.1, 0.5, 7), CheckReport(0.2, 0.3, 7)]) == CheckReport(0.2, 0.5, 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    report = compare([[-1.0, bad]], [[-1.0, -1.0]])
    assert not report.passes(1e9)
    assert not compare([[bad]], [[bad]]).passes(1e9)
    assert not pool_reports([report, CheckReport(0.0, 0.0, 1000)]).passes(1e9)


@pytest.mark.parametrize("empty", [[], [[]]])
def test_no_token_is_an_error(empty: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="no token"):
        compare(empty, empty)


@pytest.mark.parametrize(
    ("engine", "policy"),
    [([[1.0]], [[1.0, 2.0]]), ([[1.0]], [[1.0], [2.0]]), ([[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]])],
)
def test_different_shapes_are_an_error(engine: list[list[float]], policy: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="different numbers of tokens"):
        compare(engine, policy)


def test_sequences_are_fitting_prompts_and_seeded_random_tokens() -> None:
    prompts = [(1,), (1, 2), (3, 4, 5), tuple(range(30)), (6, 7)]
    sequences = comparison_sequences(100, 20, seed=3, prompts=prompts, count=4)
    assert sequences[:2] == ((1, 2), (3, 4, 5))
    assert [len(sequence) for sequence in sequences[2:]] == [20] * 4
    assert sequences == comparison_sequences(100, 20, seed=3, prompts=prompts, count=4)
    assert sequences != comparison_sequences(100, 20, seed=4, prompts=prompts, count=4)


@pytest.mark.parametrize(("longest", "length"), [(1, 2), (2, 2), (64, 64), (10_000, 64)])
def test_random_sequences_cover_the_vocabulary_at_a_bounded_length(longest: int, length: int) -> None:
    sequences = comparison_sequences(7, longest, seed=0, count=50)
    assert {len(sequence) for sequence in sequences} == {length}
    assert {token for sequence in sequences for token in sequence} == set(range(7))


def test_tensor_changed_by_second_sync_did_not_arrive() -> None:
    text = describe_difference(CHECKSUMS, CHECKSUMS | {"b": "9"}, CHECKSUMS | {"b": "9", "c": "8"})
    assert text == "a second sync changed b: the first sync was incomplete"


def test_tensor_still_overwritten_is_reached_by_no_sync() -> None:
    assert describe_difference(CHECKSUMS, CHECKSUMS, CHECKSUMS | {"c": "9", "e": "9"}) == "no sync updates c, e"


def test_tensor_missing_on_one_side_counts() -> None:
    assert describe_difference({}, {"a": "1"}, {"a": "1"}).startswith("a second sync changed a:")
    assert describe_difference(CHECKSUMS, CHECKSUMS, CHECKSUMS | {"f": "6"}) == "no sync updates f"


def test_more_than_three_names_are_counted() -> None:
    text = describe_difference(CHECKSUMS, CHECKSUMS, dict.fromkeys(CHECKSUMS, "0"))
    assert text == "no sync updates a, b, c and 2 more"


def test_no_difference_blames_the_computation() -> None:
    assert "its weights are right" in describe_difference(CHECKSUMS, dict(CHECKSUMS), dict(CHECKSUMS))
