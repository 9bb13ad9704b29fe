from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tools.tiny.arithmetic import make_problems, vocabulary_words, worked_response
from tools.tiny.models import make_tokenizer

TOKENIZER = make_tokenizer(vocabulary_words())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_tokenizer_is_unchanged_by_save_and_load(saved: PreTrainedTokenizerBase) -> None:
    train, _ = make_problems(200, 0, 0, 99)
    for problem in train:
        text = f"{problem.question} {worked_response(problem)}"
        assert saved.encode(text) == TOKENIZER.encode(text)
        assert saved.decode(saved.encode(text)) == text
    assert saved.get_vocab() == TOKENIZER.get_vocab()
    assert saved.chat_template == TOKENIZER.chat_template
    assert saved.eos_token == "<|im_end|>"
    assert saved.pad_token_id not in (None, saved.eos_token_id)


def test_vocabulary_is_small_and_prompts_are_short(saved: PreTrainedTokenizerBase) -> None:
    assert 100 <= len(saved) <= 200
    assert sorted(saved.get_vocab().values()) == list(range(len(saved)))
    train, _ = make_problems(500, 0, 0, 99)
    for problem in train:
        chat = [{"role": "user", "content": problem.question}]
        assert 15 <= len(saved.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) <= 26
        assert len(saved.encode(worked_response(problem))) <= 24


def test_digits_are_single_tokens_and_words_are_whole() -> None:
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("Tom has 123 apples. 9 \\boxed{12}"))
    assert tokens == ["Tom", "Ġhas", "Ġ", *"123", "Ġapples", ".", "Ġ", "9", "Ġ", "\\boxed{", *"12", "}"]


def test_chat_special_tokens_are_not_decoded() -> None:
    text = TOKENIZER.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        tokenize=False,
    )
    assert text == "<|system|>s<|im_end|><|user|>q<|im_end|><|assistant|>a<|im_end|>"
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == "sqa"
