import math

import pytest

from grpo_mp.sync.check import CheckReport, compare, fixed_sequences


def test_mean_and_largest_difference_over_all_tokens() -> None:
    report = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.75]])
    assert report == CheckReport(mean=0.25, largest=0.5, typical=0.25)
    assert report.passes(0.25)
    assert not report.passes(0.2499)


def test_one_sequence_behind_a_routing_tie_is_no_wrong_weight_but_half_of_them_are() -> None:
    policy = [[-1.0, -1.0]] * 8
    tied = compare([[-1.0, -9.0]] + [[-1.0, -1.0]] * 7, policy)
    assert tied.mean == 0.5
    assert tied.passes(1e-4)
    assert not compare([[-1.0, -1.001]] * 4 + [[-1.0, -1.0]] * 4, policy).passes(1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_never_passes(bad: float) -> None:
    assert not compare([[-1.0, bad]], [[-1.0, -1.0]]).passes(1e9)
    assert not compare([[bad]], [[bad]]).passes(1e9)


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
