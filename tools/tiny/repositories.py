"""Small repositories with a wrong line, and chats that teach a tiny policy to read and edit files."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from grpo_mp.rollout.workspace_tool import Workspace
from grpo_mp.utils.errors import UserError
from tools.tiny.models import make_tokenizer
from tools.tiny.products import CHAT_TEMPLATE

NAMES = (*("total", "score", "price", "count", "size", "weight"), *("length", "width", "cost", "speed", "time", "rate"))
VARIABLES = "abcdefgh"
OPERATORS = {"add": "+", "subtract": "-", "multiply": "*"}
RIGHT_EXAMPLES = 0.5  # share of the examples whose edit is right
TEST_NUMBERS = range(11, 100)
PARTS = (
    *NAMES,
    *OPERATORS,
    *("must", "and", "bash", "edit", "cat", "path", "command", "old", "new", "return", "edited", "done"),
)


@dataclass(frozen=True)
class Repository:
    """A module whose function must add, subtract or multiply, and has another operator."""

    kind: str  # of OPERATORS
    name: str  # of the module and its function
    variables: tuple[str, str]
    wrong: str  # the operator in the file
    numbers: tuple[int, int]  # arguments of the function in the test

    @property
    def question(self) -> str:
        return f"{self.name} must {self.kind} {self.variables[0]} and {self.variables[1]}"

    @property
    def code(self) -> str:
        return f"def {self.name}({', '.join(self.variables)}):\n    return {self.expression(self.wrong)}\n"

    @property
    def row(self) -> dict[str, Any]:
        """Return the data row, see Workspace.reset."""
        first, second = self.numbers
        expected = {"add": first + second, "subtract": first - second, "multiply": first * second}[self.kind]
        test = f"from {self.name} import {self.name}\nassert {self.name}({first}, {second}) == {expected}\n"
        return {
            "question": self.question,
            "files": {f"{self.name}.py": self.code},
            "tests": {"test.py": test},
            "test_command": "python3 -B test.py",
        }

    def expression(self, operator: str) -> str:
        """Return what the function returns."""
        return f" {operator} ".join(self.variables)


def make_problems(count_train: int, count_eval: int, seed: int) -> tuple[list[Repository], list[Repository]]:
    """Draw different repositories; train and eval share none. Raises UserError if there are fewer than requested."""
    rng = random.Random(seed)
    drawn = [
        _draw(rng, kind, name, (a, b)) for kind, name, a, b in product(OPERATORS, NAMES, VARIABLES, VARIABLES) if a != b
    ]
    if count_train + count_eval > len(drawn):
        raise UserError(f"there are only {len(drawn)} repositories: ask for fewer by --train and --eval")
    rng.shuffle(drawn)
    return drawn[:count_train], drawn[count_train : count_train + count_eval]


def _draw(rng: random.Random, kind: str, name: str, variables: tuple[str, str]) -> Repository:
    wrong = rng.choice([operator for operator in OPERATORS.values() if operator != OPERATORS[kind]])
    return Repository(kind, name, variables, wrong, (rng.choice(TEST_NUMBERS), rng.choice(TEST_NUMBERS)))


def tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the task; its chat template supports tools."""
    return make_tokenizer(PARTS, CHAT_TEMPLATE, roles=("<|tool|>",))


def make_examples(problems: Sequence[Repository], seed: int, held_out: int) -> list[dict[str, Any]]:
    """Return worked examples as chats: read the file, edit it, and end.

    Half of the edits take a random operator, but for the last `held_out`, which are right.
    """
    rng = random.Random(seed)
    schemas = [get_json_schema(tool) for tool in (Workspace.bash, Workspace.edit)]
    examples = []
    for number, problem in enumerate(problems):
        is_right = number >= len(problems) - held_out or rng.random() < RIGHT_EXAMPLES
        operator = OPERATORS[problem.kind] if is_right else rng.choice(list(OPERATORS.values()))
        wrong = problem.expression(problem.wrong)
        new = problem.expression(operator)
        turns = [
            ("user", problem.question),
            ("assistant", f'[bash(command="cat {problem.name}.py")]'),
            ("tool", problem.code),
            ("assistant", f'[edit(path="{problem.name}.py", old="{wrong}", new="{new}")]'),
            ("tool", f"edited {problem.name}.py"),
            ("assistant", "done"),
        ]
        messages = [{"role": role, "content": content} for role, content in turns]
        examples.append({"messages": messages, "tools": schemas})
    return examples
