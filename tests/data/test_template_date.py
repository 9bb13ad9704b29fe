"""Templates that write the present day write that of the run, wherever they are rendered."""

from collections.abc import Iterator
from datetime import date

import pytest

from grpo_mp.data.chat_data import Chat, ChatEncoder
from grpo_mp.data.template import ChatRenderer, set_template_date, template_date
from grpo_mp.utils.types import Message
from tests.episodes.test_chat import make_renderer, published

ASK: Message = {"role": "user", "content": "1+2?"}
ANSWER: Message = {"role": "assistant", "content": "3"}
DATED = "{{ strftime_now('%d %b %Y') }} "


@pytest.fixture
def first_of_may() -> Iterator[None]:
    today = template_date()
    set_template_date(date(2024, 5, 1))
    yield
    set_template_date(today)


@pytest.mark.usefixtures("first_of_may")
def test_prompts_and_later_turns_have_the_date_of_the_run() -> None:
    renderer = make_renderer("llama3_2", tools=False)
    assert "Today Date: 01 May 2024" in renderer.tokenizer.decode(renderer.prompt([ASK]))


@pytest.mark.usefixtures("first_of_may")
def test_chats_to_learn_from_have_the_date_of_the_run() -> None:
    tokenizer = make_renderer("qwen2_5", tools=False).tokenizer
    tokenizer.chat_template = DATED + published("qwen2_5_training")
    text = ChatEncoder(tokenizer, "assistant", frozenset([1])).render(Chat((ASK, ANSWER))).text
    assert text.startswith("01 May 2024")
    assert ChatRenderer(tokenizer).render([ASK], asks=True).startswith("01 May 2024")
