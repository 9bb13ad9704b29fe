"""Episodes in the harmony format: SGLang's parser of the real engine, and GPT-OSS's chat template, as TRL keeps it."""

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

from grpo_mp.data import harmony
from grpo_mp.data.template import as_template_reads
from grpo_mp.data.template_date import set_template_date
from grpo_mp.rollout.client import EngineOutput, SamplingParams
from tests.episodes.test_chat import make_renderer

RollOut = Callable[..., Any]
ROWS = "tests.rollout.light_tools:rows"
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
CALLS = {  # how GPT-OSS writes calls: OpenAI's page, its chat template, and without what is optional
    "channel": '<|channel|>commentary to=functions.rows <|constrain|>json<|message|>{"a": 2}<|call|>',
    "role": ' to=functions.rows<|channel|>commentary json<|message|>{"a": 2}<|call|>',
    "plain": '<|channel|>commentary to=functions.rows<|message|>{"a": 2}<|call|>',
    "analysis": '<|channel|>analysis to=functions.rows code<|message|>{"a": 2}<|call|>',
}
FINAL = "<|channel|>final<|message|>2 rows<|return|>"


@pytest.mark.parametrize(("call", "thought"), [*zip(CALLS, (THOUGHT, "", THOUGHT, ""), strict=True)])
def test_an_episode_with_a_call(roll_out: RollOut, call: str, thought: str) -> None:
    """Sampled ids stay; between them is what the template writes in the whole conversation."""
    set_template_date(date.today())
    renderer = make_renderer("gptoss", tools=False)
    words = renderer.tokenizer
    texts = [thought + CALLS[call], THOUGHT + FINAL]
    prompts = []

    async def generate(tokens: Any, sampling: SamplingParams, routing: Any = None) -> list[EngineOutput]:
        prompts.append(tuple(tokens))
        sampled = words.encode(texts[len(prompts) - 1], add_special_tokens=False)
        return [EngineOutput(tuple(sampled), (-1.0,) * len(sampled), (0,) * len(sampled), False)]

    settings = {"tools": [ROWS], "tool_parser": harmony.PARSER, "max_prompt_tokens": 3000, "max_response_tokens": 900}
    settings |= {"sampling": SamplingParams(900), "tokenizer": words, "generate": generate}
    _, group = roll_out("call_tools", count=1, **settings)
    (sample,) = group.samples
    assert (sample.state, sample.error) == ("completed", "")
    assert (sample.metrics["tool_calls"], sample.metrics["tool_raised"]) == (1, 0)
    arguments = {"name": "rows", "arguments": {"a": 2}}
    chat = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": arguments}]},
        {"role": "tool", "content": "2 rows"},
    ]
    whole = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    given = whole[whole.index("<|call|>") + len("<|call|>") :]
    assert '<|start|>functions.rows to=assistant<|channel|>commentary<|message|>"2 rows"<|end|>' in given
    assert words.decode(sample.tokens) == texts[0] + given + texts[1]
    own = [token for token, is_own in zip(sample.tokens, sample.generated, strict=True) if is_own]
    assert words.decode(own) == texts[0] + texts[1]
    assert sample.text == "<think>\nI look.\n</think>\n2 rows"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (THOUGHT + FINAL, "<think>\nI look.\n</think>\n2 rows"),
        ("<|channel|>analysis<|message|>I lo", "<think>\nI lo"),
        (f"<|channel|>analysis<|message|>One.<|end|><|start|>assistant{THOUGHT}{FINAL}", None),
        (f"{THOUGHT}<|channel|>final<|message|>2 ro", "<think>\nI look.\n</think>\n2 ro"),
        (FINAL, "2 rows"),
        ("2 rows<|return|>", "2 rows"),
        (f"{THOUGHT}{CALLS['role']}", '<think>\nI look.\n</think>\nfunctions.rows {"a": 2}'),
    ],
)
def test_an_answer_is_read_as_those_of_other_models(answer: str, text: str | None) -> None:
    assert harmony.plain_text(answer) == (text or "<think>\nOne.\nI look.\n</think>\n2 rows")


def test_thoughts_are_rendered_where_the_template_reads_them() -> None:
    words = make_renderer("gptoss", tools=False).tokenizer
    ask = {"role": "user", "content": "How many?"}
    for answer in (
        {"content": "<think>\nI look.\n</think>\n2 rows"},
        {"content": "2 rows", "reasoning_content": "I look."},
        {"content": "2 rows", "thinking": "I look."},
    ):
        chat = as_template_reads([ask, {"role": "assistant", **answer}], words)
        text = str(words.apply_chat_template(chat, tokenize=False))
        assert text.endswith(f"<|start|>assistant{THOUGHT}{FINAL}")
