"""Logging of a process: warnings and errors on the terminal, all records of a rank in a file of the run folder."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PYTHON_WARNINGS = "py.warnings"  # logger that captureWarnings sends warnings.warn to

# Warnings of libraries that appear in healthy runs and that a user cannot act on: (message, module) patterns.
KNOWN_WARNINGS = (
    # Megatron uses deprecated names of torch's collectives.
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger"),
    # The distributed optimizer reads .grad of its shards, views of the parameters, which never have one.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    # Megatron reads checkpoints with a function and a tensor class that torch has deprecated.
    (r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\."),
    (r"Please use DTensor instead", r"torch\.distributed\.checkpoint\."),
    # Megatron-Core 0.19 reads checkpoints on every rank separately and passes arguments in torch's former order.
    (r"torch\.distributed is disabled, unavailable or uninitialized", r"torch\.distributed\.checkpoint\."),
    (r"The argument order of load has been changed", r"torch\.distributed\.checkpoint\."),
)
# Log messages of the same kind: (logger, beginning of the message).
KNOWN_MESSAGES = (
    ("megatron.core.rerun_state_machine", ""),  # reports that it is disabled
    ("matplotlib", ""),  # reports the folder of its font cache
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),  # this one and the next two: since Megatron 0.19
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


class TerminalHandler(logging.Handler):
    """Writes warnings and errors to stderr, except known notices of libraries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(lambda record: not is_known_notice(record))

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record).rstrip() + "\n")


def log_to_terminal() -> None:
    """Show warnings and errors of all loggers, and Python's warnings, on stderr until the process exits."""
    root = logging.getLogger()
    if not any(isinstance(handler, TerminalHandler) for handler in root.handlers):
        root.addHandler(TerminalHandler())
    logging.captureWarnings(True)


def is_known_notice(record: logging.LogRecord) -> bool:
    """Return whether a log record matches KNOWN_WARNINGS or KNOWN_MESSAGES. Errors never match."""
    message = record.getMessage()
    if record.levelno >= logging.ERROR:
        return False
    if record.name == PYTHON_WARNINGS:  # "PATH:LINE: CATEGORY: MESSAGE": match the module against the path
        return any(
            re.search(text, message) and re.search(module.replace(r"\.", "/"), message)
            for text, module in KNOWN_WARNINGS
        )
    return any(f"{record.name}.".startswith(f"{name}.") and message.startswith(text) for name, text in KNOWN_MESSAGES)


def log_file(run_folder: Path, rank: int) -> Path:
    """Return the path of the log file of a rank."""
    return run_folder / "logs" / f"rank_{rank}.log"


@contextmanager
def logging_to(file: Path, level: str) -> Iterator[None]:
    """Append log records of `level` and above, known notices included, to `file` while the body runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk must not stop or flood a run
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    level_before = root.level
    root.setLevel(level.upper())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level_before)
        with suppress(OSError):  # closing flushes, which fails on a full disk
            handler.close()
