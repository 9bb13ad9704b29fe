"""Variables of the chat template and the date of the run reach everything that is rendered."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_mp.config.data_sections import DataConfig
from grpo_mp.config.sections import RolloutConfig
from grpo_mp.config.sft_settings import ChatDataConfig, SftConfig
from grpo_mp.data.chat_data import Chat, ChatEncoder, ChatReader, load_held_out_chats, load_train_chats
from grpo_mp.data.prompts import PromptReader, load_eval_prompts, load_train_prompts
from grpo_mp.data.template import ChatRenderer
from grpo_mp.rollout.episodes import load_episode_parts
from grpo_mp.utils.types import Message
from tests.episodes.test_chat import make_renderer, published
from tools.tiny.models import make_tokenizer

# As Qwen3's: the empty thoughts of a prompt without thinking.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}[]{% endif %}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ mark }}{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mark }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ message.content }}<|im_end|>",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}",
)
TOKENIZER = make_tokenizer(["How", "many", "apples"])
TOKENIZER.chat_template = TEMPLATE
OFF = {"enable_thinking": False}
ASK: Message = {"role": "user", "content": "3+4"}
ANSWER: Message = {"role": "assistant", "content": "7"}


def data(folder: Path, **settings: Any) -> DataConfig:
    (folder / "rows.jsonl").write_text('{"question": "3+4", "answer": "7"}\n')
    source = str(folder / "rows.jsonl")
    return DataConfig(train=source, eval={"held": source}, **settings)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "apply_chat_template_kwargs"])
def test_they_reach_train_and_eval_prompts(name: str, tmp_path: Path) -> None:
    own = data(tmp_path, **{name: OFF})
    reader = PromptReader(own, TOKENIZER, 100)
    train = load_train_prompts(reader)
    evals = load_eval_prompts(reader)
    plain = load_train_prompts(PromptReader(data(tmp_path), TOKENIZER, 100))
    text = TOKENIZER.decode(plain[0].tokens)
    assert text == "<|user|>3+4<|im_end|><|assistant|>"
    for prompts in (train, evals["held"]):
        assert TOKENIZER.decode(prompts[0].tokens) == f"{text}[]"
    assert train.digest != plain.digest


async def rollout(task: Any, policy: Any) -> float:
    return 0.0


def test_they_reach_the_turns_of_episodes() -> None:
    sizes = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 9, "max_response_tokens": 9}
    parts = load_episode_parts(RolloutConfig(**sizes, function=f"{__name__}:rollout"), TOKENIZER, OFF)
    assert parts
    assert TOKENIZER.decode(parts.renderer.prompt([ASK])) == "<|user|>3+4<|im_end|><|assistant|>[]"
    assert TOKENIZER.decode(parts.renderer.continuation((), [ASK])).endswith("<|user|>3+4<|im_end|><|assistant|>[]")


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prompts", "marks"])
def test_they_reach_chats_to_learn_from(template: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer([])
    tokenizer.chat_template = template
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [ASK, ANSWER]}) + "\n")
    source = str(tmp_path / "chats.jsonl")
    sft = SftConfig(batch_size=1, max_tokens=64)
    config = ChatDataConfig(train=source, eval={"held": source}, chat_template_kwargs={"mark": "[]"})
    encoder = ChatEncoder(tokenizer, "assistant", frozenset([tokenizer.eos_token_id]), config.chat_template_kwargs)
    reader = ChatReader(config, sft, encoder)
    for chats in (load_train_chats(reader), load_held_out_chats(reader)["held"]):
        sample = chats[0]
        assert tokenizer.decode(sample.prompt_tokens) == "<|user|>[]3+4<|im_end|><|assistant|>[]"
        assert tokenizer.decode(sample.tokens) == "7<|im_end|>"


DATED = "{{ strftime_now('%d %b %Y') }} "


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
