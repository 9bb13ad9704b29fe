"""Hours and seconds of `grpo-mp plan --simulate` out of any machine's range are refused where they are read."""

import pytest

from grpo_mp.cli.simulation_arguments import FAILING, add_simulation_arguments
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import Parser

HOURS = [f"--{name}-mtbf-hours" for name in FAILING]


def parser() -> Parser:
    parser = Parser("grpo-mp plan")
    add_simulation_arguments(parser)
    return parser


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, value, "expected 0, or a number from 0.01 to 1e") for name in HOURS for value in ("1e-320", "0.009")),
        *((name, value, "from 0 to 1e") for name in HOURS for value in ("1e8", "1e305", "inf", "nan", "-1", "x")),
        *(("--repair-hours", value, "from 0 to 10000") for value in ("1e305", "10001", "-1")),
        *((name, "1e300", "from 0 to 1e") for name in ("--restart-s", "--engine-restart-s")),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(UserError, match=f"argument {name}: expected") as caught:
        parser().parse_args([name, value])
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["0", "0.01", "50000", "1e7"])
def test_hours_between_failures_are_zero_or_in_range(value: str) -> None:
    for name in HOURS:
        args = vars(parser().parse_args([name, value, "--repair-hours", "0", "--restart-s", "0"]))
        assert args[name[2:].replace("-", "_")] == float(value)
