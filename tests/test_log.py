"""A rank's log: all of it in the file, what matters on the terminal."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.utils.log import TerminalHandler, log_file, log_to_terminal, logging_to


@pytest.fixture(autouse=True)
def _terminal() -> Iterator[None]:
    logging.captureWarnings(False)  # what another test left: pytest restores showwarning, not what logging knows of it
    root, show = logging.getLogger(), warnings.showwarning
    before = list(root.handlers)
    log_to_terminal()
    log_to_terminal()  # shows nothing twice
    yield
    root.handlers = [handler for handler in root.handlers if handler in before]
    logging.captureWarnings(False)
    warnings.showwarning = show


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return log_file(tmp_path, 3)


def warn(message: str, module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        path = f"/lib/{module.replace('.', '/')}.py"
        warnings.warn_explicit(message, FutureWarning, path, 1, module=module)


def test_a_warning_is_shown_and_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(file, "info"):
        logging.getLogger("some.library").warning("low on memory")
        warn("the gradient is not finite", "some.library")
    for text in (file.read_text(), capsys.readouterr().err):
        assert "low on memory" in text
        assert "the gradient is not finite" in text
    assert " WARNING some.library: low on memory" in file.read_text()


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
def test_a_known_notice_is_kept_and_not_shown(
    message: str, module: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(file, "info"):
        warn(message, module)
        assert capsys.readouterr().err == ""
        warn(message, "grpo_mp.policy.optimizer")
        assert message in capsys.readouterr().err
    assert file.read_text().count(message) == 2


def test_known_messages_of_loggers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(file, "info"):
        logging.getLogger("megatron.core.models.gpt.gpt_model").warning("GPTModel IS DEPRECATED. GPTModel is only")
        logging.getLogger("megatron.core.rerun_state_machine").warning("not in use")
        assert capsys.readouterr().err == ""
        logging.getLogger("megatron.core.rerun_state_machine").error("broken")
        logging.getLogger("megatron.core.other").warning("GPTModel IS DEPRECATED")
    assert capsys.readouterr().err == "broken\nGPTModel IS DEPRECATED\n"
    assert len(file.read_text().splitlines()) == 4


def test_the_level_is_that_of_the_file(file: Path) -> None:
    with logging_to(file, "warning"):
        logging.getLogger("grpo_mp").info("step 1")
    with logging_to(file, "debug"):
        logging.getLogger("grpo_mp").debug("step 2")
    assert [line.rpartition(": ")[2] for line in file.read_text().splitlines()] == ["step 2"]


def test_nothing_is_left_behind(file: Path) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    with logging_to(file, "debug"):
        pass
    assert (root.level, root.handlers) == before
    assert sum(isinstance(handler, TerminalHandler) for handler in root.handlers) == 1
