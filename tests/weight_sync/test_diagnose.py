from grpo_mp.weight_sync.diagnose import describe_difference

SUMS = {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5"}


def test_what_a_second_push_mends_did_not_arrive() -> None:
    text = describe_difference(SUMS, SUMS | {"b": "9"}, SUMS | {"b": "9", "c": "8"})
    assert text == "a second push changed b: the first did not arrive whole"


def test_what_stays_overwritten_is_reached_by_no_push() -> None:
    assert describe_difference(SUMS, SUMS, SUMS | {"c": "9", "e": "9"}) == "no push reaches c, e"


def test_a_tensor_that_only_one_side_knows_counts() -> None:
    assert describe_difference({}, {"a": "1"}, {"a": "1"}).startswith("a second push changed a:")
    assert describe_difference(SUMS, SUMS, SUMS | {"f": "6"}) == "no push reaches f"


def test_many_names_are_counted() -> None:
    text = describe_difference(SUMS, SUMS, dict.fromkeys(SUMS, "0"))
    assert text == "no push reaches a, b, c and 2 more"


def test_no_difference_points_at_the_computation() -> None:
    assert "not in its weights" in describe_difference(SUMS, dict(SUMS), dict(SUMS))
