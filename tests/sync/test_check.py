import math

import pytest

from grpo_mp.sync.check import TOLERANCE, WIDER_SETS, CheckReport, compare, fixed_sequences, pooled, trimmed_mean, worst


def test_mean_and_largest_difference_over_all_tokens() -> None:
    report = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
    assert report == CheckReport(mean=0.25, largest=0.5, tokens=3)
    assert report.passes(0.25)
    assert not report.passes(0.2499)


def test_pooled_is_the_report_on_all_tokens_at_once() -> None:
    engine, policy = [[-1.0, -2.0], [-3.0], [-4.0, -5.0, -6.0]], [[-1.5, -2.0], [-2.75], [-4.0, -5.0, -7.0]]
    apart = [compare([one], [other]) for one, other in zip(engine, policy, strict=True)]
    assert pooled(apart) == compare(engine, policy)


def test_one_token_at_a_routing_tie_passes_among_many_and_a_small_error_everywhere_does_not() -> None:
    tied = CheckReport(mean=0.53 / 500, largest=0.53, tokens=500)
    good = CheckReport(mean=4e-7, largest=2e-6, tokens=500)
    assert not tied.passes(TOLERANCE["float32"])
    assert trimmed_mean([tied] + [good] * (WIDER_SETS - 1)) <= TOLERANCE["float32"]
    assert trimmed_mean([CheckReport(1.1e-4, 1e-3, 500)] * WIDER_SETS) > TOLERANCE["float32"]


def test_ties_in_many_sets_pass_and_a_tensor_that_a_few_tokens_see_does_not() -> None:
    """As in a run that stopped for one: 0.762 nats among 8149 tokens are a mean of 1.02e-4."""
    tie = compare([[-1.0] * 254], [[-1.0] * 253 + [-1.762]])
    assert trimmed_mean([tie] * WIDER_SETS) == pytest.approx(0)
    wrong = compare([[-1.0] * 254], [[-1.0] * 249 + [-1.05] * 5])  # one expert of many
    assert trimmed_mean([wrong] * WIDER_SETS) == pytest.approx(4 * 0.05 / 253)
    assert trimmed_mean([wrong] * WIDER_SETS) > TOLERANCE["float32"]
    everywhere = compare([[-1.0] * 254], [[-1.0002] * 254])
    assert trimmed_mean([everywhere] * WIDER_SETS) > TOLERANCE["float32"]


def test_the_worst_of_several_engines() -> None:
    assert worst([CheckReport(0.1, 0.5, 7), CheckReport(0.2, 0.3, 7)]) == CheckReport(0.2, 0.5, 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_never_passes(bad: float) -> None:
    spoiled = compare([[-1.0, bad]], [[-1.0, -1.0]])
    assert not spoiled.passes(1e9)
    assert not compare([[bad]], [[bad]]).passes(1e9)
    assert not pooled([spoiled, CheckReport(0.0, 0.0, 1000)]).passes(1e9)
    assert not trimmed_mean([spoiled, CheckReport(0.0, 0.0, 1000)]) <= 1e9


@pytest.mark.parametrize("nothing", [[], [[]]])
def test_nothing_to_compare_is_refused(nothing: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="no token"):
        compare(nothing, nothing)


@pytest.mark.parametrize(
    ("engine", "policy"),
    [([[1.0]], [[1.0, 2.0]]), ([[1.0]], [[1.0], [2.0]]), ([[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]])],
)
def test_other_shapes_are_refused(engine: list[list[float]], policy: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="different numbers of tokens"):
        compare(engine, policy)


def test_sequences_are_real_prompts_that_fit_and_seeded_random_ones() -> None:
    prompts = [(1,), (1, 2), (3, 4, 5), tuple(range(30)), (6, 7)]
    found = fixed_sequences(100, 20, seed=3, prompts=prompts, count=4)
    assert found[:2] == ((1, 2), (3, 4, 5))
    assert [len(sequence) for sequence in found[2:]] == [20] * 4
    assert found == fixed_sequences(100, 20, seed=3, prompts=prompts, count=4)
    assert found != fixed_sequences(100, 20, seed=4, prompts=prompts, count=4)


@pytest.mark.parametrize(("longest", "length"), [(1, 2), (2, 2), (64, 64), (10_000, 64)])
def test_random_sequences_visit_the_vocabulary_at_a_bounded_length(longest: int, length: int) -> None:
    found = fixed_sequences(7, longest, seed=0, count=50)
    assert {len(sequence) for sequence in found} == {length}
    assert {token for sequence in found for token in sequence} == set(range(7))
