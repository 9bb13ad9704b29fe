"""Calls of tools that a model drafts while it thinks are not made, whichever parser reads calls."""

import ast
import re

import pytest

from grpo_mp.rollout.episode_policy import split_thinking
from grpo_mp.rollout.sglang_source import source_folder
from tests.episodes.test_chat import make_renderer
from tests.rollout.engineless import TextClient, make_runner, roll_out


def count(a: int) -> str:
    """
    Count.

    Args:
        a: from where
    """
    return f"{a} rows"


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        ('<think>[count]({"a": 1})</think>It is 5.', []),
        ('<think>[count]({"a": 1})</think>[count]({"a": 2})', ["2"]),
        ('<think>one</think>[count]({"a": 1})<think>two</think>It is 5.', []),
        ('[count]({"a": 1})</think>', []),
        ('[count]({"a": 3})', ["3"]),
        ('<think>[count]({"a": 4})', ["4"]),  # as when a model is served: a call ends thinking
    ],
)
def test_only_calls_behind_the_thinking_are_made(answer: str, called: list[str]) -> None:
    client = TextClient(make_renderer("qwen3", tools=True).tokenizer, [f"{answer}<|im_end|>", "done<|im_end|>"])
    sample = roll_out(make_runner(client, "call_tools", tools=[f"{__file__}:count"], tool_parser="test"))
    text = client.tokenizer.decode(sample.tokens)
    assert re.findall(r"(\d) rows", text) == called
    assert len(client.prompts) == 1 + len(called)
    assert text.startswith(answer)


def test_every_end_of_thinking_that_the_installed_engine_knows_is_one() -> None:
    source = ast.parse((source_folder() / "parser" / "reasoning_parser.py").read_text())
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    ends = {text for text in texts if re.fullmatch(r"(</|\[/|◁/|<\|END)\S*think\S*", text, re.IGNORECASE)}
    assert {"</think>", "◁/think▷", "[/THINK]", "<|END_THINKING|>"} <= ends
    for end in ends:
        assert split_thinking(f"a{end}b") == (f"a{end}", "b")
    assert split_thinking("</b> [/x] <think>") == ("", "</b> [/x] <think>")
