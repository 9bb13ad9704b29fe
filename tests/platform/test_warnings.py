"""Known notices are left out, and nothing else."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from grpo_mp.platform.warnings import LOGGERS, silence_known_warnings


@pytest.fixture(autouse=True)
def _hushed() -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    with warnings.catch_warnings():
        warnings.resetwarnings()
        silence_known_warnings()
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def warned(message: str, module: str) -> bool:
    """Whether a warning of this module would be shown."""
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
    ],
)
def test_only_that_notice_of_that_module_is_left_out(message: str, module: str) -> None:
    assert not warned(message, module)
    assert warned(message, "grpo_mp.policy.optimizer")
    assert warned("the gradient is not finite", module)


def test_errors_of_a_hushed_logger_stay() -> None:
    logger = logging.getLogger("megatron.core.rerun_state_machine")
    assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.ERROR)


def test_only_that_message_of_that_logger_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
    logger.warning("something else")
    logging.getLogger("megatron.core.other").warning("GPTModel IS DEPRECATED")
    assert caplog.messages == ["something else", "GPTModel IS DEPRECATED"]
