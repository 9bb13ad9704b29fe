"""Write the metrics of runs as one table: CSV, or Parquet."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mp.monitor.report.records import RunRecords
from grpo_mp.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".csv", ".parquet")


def check_export(file: Path) -> None:
    """Raise UserError where a table cannot be written there."""
    if file.suffix not in SUFFIXES:
        hint = did_you_mean(file.suffix, SUFFIXES)
        raise UserError(f"--export {file}: a table is one of {', '.join(SUFFIXES)}{hint}")
    if not file.parent.is_dir():
        raise UserError(f"--export {file}: its folder does not exist: make it first")


def metric_table(runs: Sequence[RunRecords]) -> "pa.Table":
    """Return a row for each step of each run: its name, the step, and every metric, null where a step has none."""
    import pyarrow as pa

    names = dict.fromkeys(name for run in runs for line in run.metrics for name in line if name != "step")
    rows = [(run.name, line) for run in runs for line in run.metrics]
    columns = {"run": [name for name, _ in rows], "step": [int(line["step"]) for _, line in rows]}
    metrics = {name: pa.array([line.get(name) for _, line in rows], pa.float64()) for name in sorted(names)}
    return pa.table({**columns, **metrics})


def write_table(runs: Sequence[RunRecords], file: Path) -> None:
    """Write the metrics of the runs; the ending of the file's name says how."""
    import pyarrow.csv
    import pyarrow.parquet

    table = metric_table(runs)
    if file.suffix == ".csv":
        pyarrow.csv.write_csv(table, file)
    else:
        pyarrow.parquet.write_table(table, file)
