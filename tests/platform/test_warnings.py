"""Known notices are silenced, and nothing else."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from grpo_mp.platform.warnings import LOGGERS, silence_known_warnings


@pytest.fixture(autouse=True)
def _silenced() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    with warnings.catch_warnings():
        warnings.resetwarnings()
        silence_known_warnings()
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def is_shown(message: str, module: str) -> bool:
    """Tell whether a warning of this module would be shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit(message, FutureWarning, f"{module}.py", 1, module=module)
    return bool(shown)


@pytest.mark.parametrize(
    ("message", "module"),
    [
        ("`torch.distributed.reduce_scatter_tensor` is deprecated. Please use", "torch.distributed.c10d_logger"),
        ("The .grad attribute of a Tensor that is not a leaf Tensor is", "megatron.core.optimizer.optimizer"),
        ("`load_state_dict` is deprecated and will be", "megatron.core.dist_checkpointing.strategies.torch"),
        ("Please use DTensor instead and we are", "torch.distributed.checkpoint.planner_helpers"),
        ("torch.distributed is disabled, unavailable or uninitialized, assuming", "torch.distributed.checkpoint.utils"),
        ("The argument order of load has been changed. Please check", "torch.distributed.checkpoint.logger"),
    ],
)
def test_only_the_known_warning_of_the_module_is_silenced(message: str, module: str) -> None:
    assert not is_shown(message, module)
    assert is_shown(message, "grpo_mp.policy.optimizer")
    assert is_shown("the gradient is not finite", module)


def test_errors_of_a_silenced_logger_are_shown() -> None:
    logger = logging.getLogger("megatron.core.rerun_state_machine")
    assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.ERROR)


def test_only_the_known_message_of_the_logger_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("something else")
    logging.getLogger("megatron.core.other").warning("GPTModel IS DEPRECATED")
    assert caplog.messages == ["something else", "GPTModel IS DEPRECATED"]
