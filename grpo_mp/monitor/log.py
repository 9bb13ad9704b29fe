"""Logging of one rank: everything into a file of the run folder, warnings and errors to the terminal as well.

What libraries say on a good run, and a user can do nothing about, is kept in the file and not shown.
"""

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PYTHON_WARNINGS = "py.warnings"  # the logger of warnings.warn

# (message, module) patterns of Megatron and torch at their pinned versions.
KNOWN_WARNINGS = (
    # Megatron calls collectives by names that torch has renamed.
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger"),
    # The distributed optimizer asks its own shards, views of the parameters, for a gradient they never have.
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\.optimizer"),
    # Megatron reads checkpoints by a name, and of a tensor kind, that torch means to give up.
    (r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\."),
    (r"Please use DTensor instead", r"torch\.distributed\.checkpoint\."),
    # Megatron-Core 0.19 reads checkpoints by itself on every rank, and passes arguments in an order that torch changed.
    (r"torch\.distributed is disabled, unavailable or uninitialized", r"torch\.distributed\.checkpoint\."),
    (r"The argument order of load has been changed", r"torch\.distributed\.checkpoint\."),
)
QUIET_LOGGERS = (
    "megatron.core.rerun_state_machine",  # announces that it is not in use
    "matplotlib",  # announces where it keeps its list of fonts
)
# (logger, beginning of a message) that megatron-core says from 0.19 on.
KNOWN_MESSAGES = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
)


def log_file(run_folder: Path, rank: int) -> Path:
    """Return where a rank's log lies."""
    return run_folder / "logs" / f"rank_{rank}.log"


def is_known_notice(record: logging.LogRecord) -> bool:
    """Say whether a record is one of the notices that mean nothing. Errors never are."""
    if record.levelno >= logging.ERROR:
        return False
    if any(record.name == name or record.name.startswith(name + ".") for name in QUIET_LOGGERS):
        return True
    message = record.getMessage()
    if record.name == PYTHON_WARNINGS:
        # "PATH:LINE: CATEGORY: MESSAGE": a module's pattern is looked for in the path.
        return any(
            re.search(text, message) and re.search(module.replace(r"\.", "/"), message)
            for text, module in KNOWN_WARNINGS
        )
    return any(record.name == name and message.startswith(beginning) for name, beginning in KNOWN_MESSAGES)


@contextmanager
def logging_to(file: Path, level: str) -> Iterator[None]:
    """Append records of `level` and above to `file` while the body runs; warnings go to the terminal, too.

    Python's own warnings are records. Handlers that others set stay.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(LINE))
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setLevel(logging.WARNING)
    to_terminal.addFilter(lambda record: not is_known_notice(record))
    root = logging.getLogger()
    level_before, show_before = root.level, warnings.showwarning
    root.setLevel(level.upper())
    for handler in (to_file, to_terminal):
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = show_before
        for handler in (to_file, to_terminal):
            root.removeHandler(handler)
        root.setLevel(level_before)
        to_file.close()
