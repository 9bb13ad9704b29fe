"""What rewards need of a data row: its tests, and a column for each parameter of a user's function."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mp.rewards.base import RESERVED, STEP_REWARDS, USAGE, load_reward, own_parameters
from grpo_mp.rewards.code_tests import read_tests
from grpo_mp.rewards.settings import DATA_SET, STEPS, RewardConfig
from grpo_mp.utils.errors import UserError


@dataclass(frozen=True)
class RowCheck:
    """Checks the rows of the prompts at the start."""

    settings: RewardConfig
    set_weights: Mapping[str, Mapping[str, float]]  # of the terms that prompts of a data set have, by its name
    parameters: Mapping[str, frozenset[str]]  # by name of a user's function: those that columns must give

    def __call__(self, columns: Mapping[str, Any], location: str) -> None:
        """Raise UserError, which begins with the location of the row, where a reward cannot score its prompt."""
        name = columns.get(DATA_SET)
        weights = self.set_weights.get(name) if isinstance(name, str) else None
        terms = self.settings.with_correct(self.settings.weights if weights is None else weights)
        given = columns.keys() - set(RESERVED)
        for function in self.parameters.keys() & {*terms, STEPS}:
            if missing := sorted(self.parameters[function] - given):
                raise UserError(
                    f"{location}: reward {function} has the parameter {', '.join(missing)}, and the row no such "
                    f"column: {USAGE}"
                )
        code = self.settings.code
        if code and "code" in terms:
            try:
                read_tests(columns, code.tests, code.partial)
            except ValueError as error:
                raise UserError(f"{location}: {error}") from error


def make_row_check(settings: RewardConfig, set_weights: Mapping[str, Mapping[str, float]]) -> RowCheck:
    """Load the user's functions and return the check. Raises UserError where one cannot be loaded or called."""
    functions = {name: load_reward(spec, "reward.functions") for spec, name in settings.function_names.items()}
    parameters = {name: own_parameters(function) for name, function in functions.items()}
    if settings.steps_function:
        parameters[STEPS] = own_parameters(STEP_REWARDS.resolve(settings.steps_function, "reward.steps"))
    return RowCheck(settings, set_weights, parameters)
