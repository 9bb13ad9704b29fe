"""Logging of one rank: everything into a file of the run folder, warnings and errors to the terminal as well."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_file(run_folder: Path, rank: int) -> Path:
    """Return where a rank's log lies."""
    return run_folder / "logs" / f"rank_{rank}.log"


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
