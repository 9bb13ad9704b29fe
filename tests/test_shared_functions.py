"""Small functions that many packages call."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.utils.errors import UserError, refuse_failures
from grpo_mp.utils.reading import json_object
from grpo_mp.utils.splitting import split_by_size


@given(st.lists(st.integers(0, 9)), st.integers(1, 20))
def test_parts_have_all_items_in_order_and_are_as_large_as_they_may_be(sizes: list[int], most: int) -> None:
    parts = [*split_by_size(sizes, lambda size: size, most)]
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= most or len(part) == 1) for part in parts)
    assert all(sum(part) + following[0] > most for part, following in pairwise(parts))


def test_failures_are_refused_with_their_place_and_sentences_of_users_stay() -> None:
    with pytest.raises(UserError, match=r"^reading x: ValueError: bad row$"), refuse_failures("reading x"):
        raise ValueError("bad\nrow")
    with pytest.raises(UserError, match=r"^set y$"), refuse_failures("reading x"):
        raise UserError("set y")
    with pytest.raises(KeyError), refuse_failures("reading x", (OSError,)):
        raise KeyError


@pytest.mark.parametrize("text", ["", "[1]", "1", "{", '{"a": 1} 2', b"\xff", "[" * 100_000])
def test_a_text_that_is_no_object_is_none(text: str | bytes) -> None:
    assert json_object(text) is None
    assert json_object(b'{"a": 1}') == json_object('{"a": 1}') == {"a": 1}
