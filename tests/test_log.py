"""A rank's log: all of it in the file, what matters on the terminal."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mp.utils.log import log_file, log_to_terminal, logging_to


@pytest.fixture(autouse=True)
def _terminal() -> Iterator[None]:
    logging.captureWarnings(False)  # what another test left: pytest restores showwarning, not what logging knows of it
    root = logging.getLogger()
    show = warnings.showwarning
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
        ("`load_state_dict` is deprecated and will be", "megatron.core.dist_checkpointing.strategies.torch"),
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
