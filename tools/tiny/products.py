"""Products that a tiny policy cannot compute itself, and chats that teach it to call a calculator."""

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

SMALLEST = 11
LARGEST = 99
# shares: of all examples; of the examples with the tool
EXAMPLES_WITH_TOOL = 0.8
EXAMPLES_THAT_CALL = 0.4
WORDS = ("How", "much", "is", "times", "calculator", "expression")
# A system message names the tools, calls have the format of Llama 4, and results are separate messages.
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' + tools | map(attribute='function.name') | join(' ') + '<|im_end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Product(Problem):
    """A problem that asks for the product of two numbers."""

    @property
    def answer(self) -> str:
        """Return the product as text."""
        return str(self.operands[0] * self.operands[1])


def make_problems(count_train: int, count_eval: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw different products of two two-digit numbers; train and eval share no question.

    Raises UserError if there are fewer products than requested.
    """
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    if count_train + count_eval > len(pairs):
        raise UserError(f"there are only {len(pairs)} products: ask for fewer problems by --train and --eval")
    random.Random(seed).shuffle(pairs)
    problems: list[Problem] = [Product(f"How much is {a} times {b}?", "multiply", (a, b)) for a, b in pairs]
    return problems[:count_train], problems[count_train : count_train + count_eval]


def tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the task; its chat template supports tools."""
    return make_tokenizer(WORDS, CHAT_TEMPLATE, roles=("<|tool|>",))


def make_examples(problems: Sequence[Problem], seed: int, held_out: int) -> list[dict[str, Any]]:
    """Return worked examples as chats. Some answer directly, others and the last `held_out` call the calculator.

    The result of the calculator is a tool message, which is not trained on.
    """
    rng = random.Random(seed)
    schema = get_json_schema(calculator)
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
