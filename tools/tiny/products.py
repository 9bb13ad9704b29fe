"""Products that a tiny policy cannot compute, and chats in which it learns to call a calculator."""

import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message
from tools.tiny.arithmetic import Problem
from tools.tiny.calculator import calculator
from tools.tiny.models import make_tokenizer

SMALLEST, LARGEST = 11, 99
EXAMPLES_WITH_TOOL, EXAMPLES_THAT_CALL = 0.8, 0.4  # shares: of examples, and of those with the tool
WORDS = ("How", "much", "is", "times", "calculator", "expression")
# Tools are named in a system message, calls are written as Llama 4 writes them, results are messages of their own.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Product(Problem):
    """How much a times b is."""

    @property
    def answer(self) -> str:
        """Return the product."""
        return str(self.operands[0] * self.operands[1])


def make_problems(count_train: int, count_eval: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw products of two numbers of two digits, all different; those of eval never occur in train.

    Raises UserError where there are not so many.
    """
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    if count_train + count_eval > len(pairs):
        raise UserError(f"there are only {len(pairs)} products: ask for fewer problems by --train and --eval")
    random.Random(seed).shuffle(pairs)
    problems: list[Problem] = [Product(f"How much is {a} times {b}?", "multiply", (a, b)) for a, b in pairs]
    return problems[:count_train], problems[count_train : count_train + count_eval]


def tokenizer() -> PreTrainedTokenizerBase:
    """Make the tokenizer of the task, whose template knows tools."""
    return make_tokenizer(WORDS, CHAT_TEMPLATE, roles=("<|tool|>",))


def make_examples(problems: Sequence[Problem], seed: int, held_out: int) -> list[dict[str, Any]]:
    """Make chats to learn from: answers out of the head, and some that call the calculator, as the last `held_out` do.

    What the calculator says is a message of the tool, and not learned.
    """
    rng, schema = random.Random(seed), get_json_schema(calculator)
    examples = []
    for number, problem in enumerate(problems):
        is_held_out = number >= len(problems) - held_out
        has_tool = is_held_out or rng.random() < EXAMPLES_WITH_TOOL
        calls = is_held_out or (has_tool and rng.random() < EXAMPLES_THAT_CALL)
        examples.append({"messages": _chat(problem, calls), **({"tools": [schema]} if has_tool else {})})
    return examples


def _chat(problem: Problem, calls: bool) -> list[Message]:
    question: Message = {"role": "user", "content": problem.question}
    final: Message = {"role": "assistant", "content": f"\\boxed{{{problem.answer}}}"}
    if not calls:
        return [question, final]
    expression = "{}*{}".format(*problem.operands)
    call: Message = {"role": "assistant", "content": f'[calculator(expression="{expression}")]'}
    return [question, call, {"role": "tool", "content": calculator(expression)}, final]
