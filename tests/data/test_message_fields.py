"""Which fields keep an answer from being learned, which say something to be rendered, and where thinking goes."""

from typing import Any

import pytest

from grpo_mp.data.template import as_template_reads, is_learned, thinking_texts
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message
from tools.tiny.models import make_tokenizer

ANSWER: Message = {"role": "assistant", "content": "Seven."}


@pytest.mark.parametrize(
    ("fields", "learned"),
    [
        ({}, True),
        ({"name": "Mia", "timestamp": 1}, True),
        ({"weight": 1}, True),
        ({"weight": 0}, False),
        ({"train": False}, False),
        ({"loss_mask": 0}, False),
        ({"step_loss_mask": 0}, False),
        ({"weight": 1, "train": False}, False),
        ({"pretrained": "x", "blossom": "y"}, True),
    ],
)
def test_switches_of_the_loss(fields: dict[str, Any], learned: bool) -> None:
    assert is_learned(ANSWER | fields) is learned


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("weight", 0.5, "weight of an answer must be true or false, or 1 or 0, not '0.5'"),
        ("loss_mask", [0, 1], "loss_mask of an answer must be"),
    ],
)
def test_switches_that_cannot_be_read_are_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        is_learned(ANSWER | {field: value})


def test_thinking_is_said_beside_the_content() -> None:
    assert thinking_texts(ANSWER | {"thinking": "hm", "plan": "one", "weight": 0, "reasoning": None}) == [
        ("thinking", "hm")
    ]


def test_thinking_is_given_in_the_field_that_templates_write() -> None:
    tokenizer = make_tokenizer([])
    ask: Message = {"role": "user", "content": "How many?"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        thinks = {**ANSWER, name: "hm"}
        assert as_template_reads([ask, thinks], tokenizer) == [ask, {**ANSWER, "reasoning_content": "hm"}]
    both = {**ANSWER, "reasoning": "other", "reasoning_content": "hm"}
    assert as_template_reads([both], tokenizer) == [both]
    of_user: Message = {"role": "user", "content": "?", "thinking": "hm"}
    assert as_template_reads([of_user], tokenizer) == [of_user]
