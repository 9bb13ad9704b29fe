"""What is learned of a chat, over the chat templates of the supported families: marked, or shown by prompts."""

from typing import get_args

import numpy as np
import pytest

from grpo_mp.data.chat_data import Chat, ChatEncoder, LearnedTokens, LossOn
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message
from tests.episodes.test_chat import (
    ANSWER,
    ASK,
    CALLING,
    DEEPSEEK,
    ENDS,
    MORE,
    RESULT,
    TOOL,
    call_of,
    make_renderer,
    published,
)

LATER: Message = {"role": "assistant", "content": "Eight, and that is all."}
TWO_TURNS = (ASK, ANSWER, MORE, LATER)
# What is learned of two turns, by the published templates. Where one writes no end, the token that follows is learned.
CHATML = ["Seven.<|im_end|>\n", "Eight, and that is all.<|im_end|>\n"]
EOT = ["Seven.<|eot_id|>", "Eight, and that is all.<|eot_id|>"]
LEARNED = {
    "qwen2_5": CHATML,
    "qwen3_instruct_2507": CHATML,
    "deepseek_r1": [f"Seven.{DEEPSEEK}", f"Eight, and that is all.{DEEPSEEK}"],
    "deepseek_r1_0528": [f"Seven.{DEEPSEEK}", f"Eight, and that is all.{DEEPSEEK}"],
    "deepseek_v2": [f" Seven.{DEEPSEEK}", f" Eight, and that is all.{DEEPSEEK}"],
    "glm4moe": ["\n<think></think>\nSeven.<|user|>", "\n<think></think>\nEight, and that is all.<|user|>"],
    "llama3": EOT,
    "llama3_1": EOT,
    "llama3_2": EOT,
    "kimi_k2": ["Seven.<|im_end|>", "Eight, and that is all.<|im_end|>"],
    "mixtral": [" Seven.</s>", " Eight, and that is all.</s>"],
}
# These write a turn otherwise once another follows, or ask for an answer that begins otherwise than a finished one.
CHANGING = {
    "qwen3": r"'<think>\\n\\n</think>.*' became 'Seven\..* marks, or set sft.loss_on=last",
    "qwen3_thinking_2507": r"up to message 2: '<think>\\n' became 'Seven\..* marks, or set sft.loss_on=last",
    "deepseek_v3_1": r"up to message 2: 'think>' became '/think>Seven\.",
    "deepseekv3": r"up to message 2: '<think>\\n' became 'Seven\.",
    "deepseek_r1_distill": r"up to message 2: '<think>\\n' became 'Seven\.",
}
MARKED = [
    "qwen2_5_training",
    "qwen3_training",
    "qwen3_instruct_2507_training",
    "deepseekv3_training",
    "deepseek_r1_distill_training",
    "glm4moe_training",
    "llama3_training",
]


def make_encoder(name: str, loss_on: LossOn = "assistant", template: str = "") -> ChatEncoder:
    tokenizer = make_renderer(name, tools=False).tokenizer
    tokenizer.chat_template = template or tokenizer.chat_template
    stops = [tokenizer.convert_tokens_to_ids(end) for end in ENDS[name] if end]
    return ChatEncoder(tokenizer, loss_on, frozenset(stops))


def encode(encoder: ChatEncoder, chat: Chat) -> LearnedTokens:
    (learned,) = encoder.encode([encoder.render(chat)])
    return learned


def turns(encoder: ChatEncoder, learned: LearnedTokens) -> list[str]:
    """The text of each run of learned tokens."""
    where = np.flatnonzero(learned.learned)
    runs = np.split(where, np.flatnonzero(np.diff(where) > 1) + 1)
    return [encoder.tokenizer.decode([learned.tokens[i] for i in run]) for run in runs]


@pytest.mark.parametrize("name", LEARNED)
def test_turns_are_what_the_chat_has_behind_its_prompts(name: str) -> None:
    encoder = make_encoder(name)
    learned = encode(encoder, Chat(TWO_TURNS))
    assert turns(encoder, learned) == LEARNED[name]
    text = encoder.tokenizer.decode(learned.tokens)
    rendered = encoder.tokenizer.apply_chat_template(list(TWO_TURNS), tokenize=False)
    assert text.removesuffix("<|user|>" if name == "glm4moe" else "") == rendered
    last = encode(make_encoder(name, "last"), Chat(TWO_TURNS))
    assert turns(encoder, last) == LEARNED[name][1:]
    assert turns(encoder, encode(encoder, Chat(TWO_TURNS, first=3))) == LEARNED[name][1:]


@pytest.mark.parametrize("name", CHANGING)
def test_templates_that_change_what_they_wrote_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=CHANGING[name]):
        encode(make_encoder(name), Chat(TWO_TURNS))


@pytest.mark.parametrize("name", sorted(set(CALLING) & LEARNED.keys()))
def test_calls_are_learned_and_results_are_not(name: str) -> None:
    encoder = make_encoder(name)
    chat = Chat((ASK, call_of(name), RESULT, ANSWER), tools=(TOOL,))
    call, answer = turns(encoder, encode(encoder, chat))
    assert "add" in call
    assert ENDS[name][1] in call
    assert answer == LEARNED[name][0]


@pytest.mark.parametrize("name", MARKED)
def test_marked_templates_are_read_as_transformers_reads_them(name: str) -> None:
    encoder = make_encoder(name.removesuffix("_training"), template=published(name))
    expected = encoder.tokenizer.apply_chat_template(
        list(TWO_TURNS), return_dict=True, return_assistant_tokens_mask=True
    )
    learned = encode(encoder, Chat(TWO_TURNS))
    assert list(learned.tokens) == expected["input_ids"]
    assert learned.learned.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < learned.learned.sum() < len(learned.learned)
    last = encode(make_encoder(name.removesuffix("_training"), "last", published(name)), Chat(TWO_TURNS))
    assert turns(encoder, last) == turns(encoder, learned)[1:]


@pytest.mark.parametrize("name", ["deepseekv3_training", "glm4moe_training"])
def test_a_template_that_cuts_an_answer_is_refused(name: str) -> None:
    """Both strip the thinking of earlier turns, marks or not."""
    encoder = make_encoder(name.removesuffix("_training"), template=published(name))
    thinks: Message = {"role": "assistant", "content": "<think>\nThree and four.\n</think>\n\nSeven."}
    with pytest.raises(UserError, match="cuts the assistant's content '<think>"):
        encode(encoder, Chat((ASK, thinks, MORE, LATER)))


SPLIT_MARKS = (  # words and calls of a turn are marked each by itself, empty words are not
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {% if m['content'] %}{% generation %}"
    "{{ m['content'] if loop.last else m['content'].split('=')[-1] }}{% endgeneration %}{% endif %}"
    "{% for call in m.tool_calls or () %} calls {% generation %}{{ call.function.name }}{% endgeneration %}{% endfor %}"
    "<|im_end|>{% else %}U: {{ m['content'] }}\n{% endif %}{% endfor %}"
)


def test_turns_of_several_marks_or_none_are_compared_with_their_own() -> None:
    call = call_of("qwen2_5")
    asked: Message = {"role": "assistant", "content": "1+1=2"}
    quoting: Message = {**call, "content": "so 1+1=2 and more"}
    silent: Message = {"role": "assistant", "content": ""}
    keeping = SPLIT_MARKS.replace(" if loop.last else m['content'].split('=')[-1]", "")
    cut = [(ASK, asked, MORE, quoting), (ASK, silent, MORE, asked, MORE, quoting)]
    kept = [(ASK, quoting, RESULT, ANSWER), (ASK, silent, MORE, asked), (ASK, ANSWER, MORE, quoting, RESULT, asked)]
    for messages in (*kept, *cut):
        for first in (0, 3):
            encode(make_encoder("qwen2_5", template=keeping), Chat(messages, first, tools=(TOOL,)))
    for messages in cut:
        with pytest.raises(UserError, match=r"cuts the assistant's content '1\+1=2'"):
            encode(make_encoder("qwen2_5", template=SPLIT_MARKS), Chat(messages, tools=(TOOL,)))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_under_any_name_is_learned_or_missed(field: str) -> None:
    thinks: Message = {**ANSWER, field: "Three and four."}
    encoder = make_encoder("qwen3", "last")
    assert turns(encoder, encode(encoder, Chat((ASK, thinks)))) == [
        "<think>\nThree and four.\n</think>\n\nSeven.<|im_end|>\n"
    ]
    for loss_on in get_args(LossOn):
        with pytest.raises(
            UserError, match=rf"cuts the assistant's {field} 'Three and four\.'.* or remove the field {field}"
        ):
            encode(make_encoder("qwen2_5", loss_on), Chat((ASK, thinks)))


@pytest.mark.parametrize("template", ["", published("qwen2_5_training"), SPLIT_MARKS])
@pytest.mark.parametrize("off", [0, 1, 2])
def test_an_answer_that_is_switched_off_is_rendered_and_not_learned(template: str, off: int) -> None:
    words = ["One.", "Two.", "Three."]
    answers = [
        {"role": "assistant", "content": word} | ({"weight": 0} if i == off else {}) for i, word in enumerate(words)
    ]
    encoder = make_encoder("qwen2_5", template=template)
    learned = encode(encoder, Chat(tuple(message for answer in answers for message in (ASK, answer))))
    text = encoder.tokenizer.decode(learned.tokens)
    assert [text.count(word) for word in words] == [1, 1, 1]
    assert [turn[: turn.index(".") + 1].strip() for turn in turns(encoder, learned)] == [
        w for i, w in enumerate(words) if i != off
    ]


def test_a_chat_whose_answers_are_switched_off_is_refused() -> None:
    off: Message = {**ANSWER, "train": False}
    for loss_on, messages in (("assistant", (ASK, off)), ("last", (ASK, ANSWER, MORE, off))):
        with pytest.raises(UserError, match="no answer of the assistant that may be learned"):
            encode(make_encoder("qwen2_5", loss_on), Chat(messages))
    with pytest.raises(UserError, match=r"message 2 is not to be learned, and sft\.loss_on=all"):
        encode(make_encoder("qwen2_5", "all"), Chat((ASK, off, MORE, ANSWER)))
    last = make_encoder("qwen2_5", "last")
    assert turns(last, encode(last, Chat((ASK, off, MORE, ANSWER)))) == ["Seven.<|im_end|>\n"]


@pytest.mark.parametrize("template", ["", published("qwen2_5_training")])
def test_a_greeting_is_rendered_and_not_learned(template: str) -> None:
    greeting: Message = {"role": "assistant", "content": "Hello."}
    encoder = make_encoder("qwen2_5", template=template)
    learned = encode(encoder, Chat((greeting, ASK, ANSWER)))
    assert "Hello." in encoder.tokenizer.decode(learned.tokens)
    assert [turn.strip() for turn in turns(encoder, learned)] == ["Seven.<|im_end|>"]
    with pytest.raises(UserError, match="no answer of the assistant"):
        encode(encoder, Chat((greeting, ASK)))


def test_a_tokenizer_that_knows_no_places_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepseek_v2", "glm4moe", "llama3"):
        encoder = make_encoder(name)
        fast = encode(encoder, Chat(TWO_TURNS))
        monkeypatch.setattr(type(encoder.tokenizer), "is_fast", False)
        slow = encode(encoder, Chat(TWO_TURNS))
        monkeypatch.undo()
        assert slow.tokens == fast.tokens
        assert slow.learned.tolist() == fast.learned.tolist()


def test_a_tokenizer_without_an_end_takes_that_of_the_generation_config() -> None:
    tokenizer = make_renderer("qwen2_5", tools=False).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = None
    learned = encode(ChatEncoder(tokenizer, "assistant", frozenset([stop])), Chat((ASK, ANSWER)))
    assert (learned.tokens[-1], bool(learned.learned[-1])) == (stop, True)
    with pytest.raises(UserError, match=r"no eos_token, .* set eos_token in tokenizer_config\.json"):
        ChatEncoder(tokenizer, "assistant", frozenset())
