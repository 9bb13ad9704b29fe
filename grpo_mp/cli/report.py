"""Write one HTML page of one or several runs: grpo-mp report RUN...

Warnings, settings, scores, curves, times, memory and answers of the run folders, side by side. It needs no network.
--export FILE writes the metrics as one table in place of the page, a row for each step: CSV or Parquet, as FILE ends.
--trace also writes RUN/trace.json, the timelines of all ranks so far as one file for Perfetto.
--picture FILE.svg draws scores, reward, length, entropy and phases in place of the page, for a page of your own.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_atomically
from grpo_mp.utils.parsers import Parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line, see the text above; return the exit status. Raises UserError."""
    parser = Parser("grpo-mp report", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run.folder of a run that is going on or has ended"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html in the only RUN, else here)"
    )
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the metrics there: FILE.csv or FILE.parquet")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the main curves there: FILE.svg")
    parser.add_argument("--trace", action="store_true", help="also write the timeline, RUN/trace.json")
    args = parser.parse_args(arguments)
    _check_arguments(args)
    if args.export:
        return _export(args.runs, args.export)
    if args.picture:
        return _draw(args.runs, args.picture)
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    if args.out and not out.parent.is_dir():
        raise UserError(f"--out {out}: its folder does not exist: make it first")
    if out.is_dir():
        raise UserError(f"{out} is a folder: give --out a file for the page")
    from grpo_mp.monitor.report.build import build_report  # slow to import
    from grpo_mp.monitor.report.page import render
    from grpo_mp.monitor.report.records import read_runs
    from grpo_mp.monitor.timeline import merge_traces

    runs = read_runs(args.runs)
    try:
        for folder in args.runs if args.trace else ():
            merge_traces(folder)
        page = render(build_report(runs))
        write_atomically(out, page, make_folder=False)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: its folder was removed meanwhile: no page is written") from error
    print(f"{out}: {len(page.encode()) / 2**20:.1f} MiB")
    return 0


def _check_arguments(args: Namespace) -> None:
    """Raise UserError for a run folder that does not exist, and for what is not written in one call."""
    for folder in args.runs:
        if not folder.exists():
            raise UserError(f"{folder}: the run folder does not exist: give the run.folder of a run")
    given = [f"--{name}" for name in ("export", "picture", "out", "trace") if vars(args)[name]]
    if (args.export or args.picture) and len(given) > 1:
        raise UserError(f"{' and '.join(given)}: only one of them is written: call grpo-mp report once for each")


def _export(folders: Sequence[Path], file: Path) -> int:
    """Write the metrics of runs as a table; return the exit status."""
    from grpo_mp.monitor.report.export import check_export, write_table
    from grpo_mp.monitor.report.records import read_runs

    check_export(file)
    runs = read_runs(folders)
    write_table(runs, file)
    print(f"{file}: {sum(len(run.metrics) for run in runs)} rows")
    return 0


def _draw(folders: Sequence[Path], file: Path) -> int:
    """Draw the main curves of runs; return the exit status."""
    if file.suffix != ".svg":
        raise UserError(f"--picture {file}: a picture is SVG: give it a name that ends in .svg")
    if not file.parent.is_dir():
        raise UserError(f"--picture {file}: its folder does not exist: make it first")
    from grpo_mp.monitor.report.build import main_charts
    from grpo_mp.monitor.report.charts import write_charts
    from grpo_mp.monitor.report.records import read_runs

    charts = main_charts(read_runs(folders))
    if not charts:
        raise UserError(f"--picture {file}: no run has a curve to draw yet: wait for its first steps")
    write_charts(charts, file)
    print(f"{file}: {', '.join(chart.title for chart in charts)}")
    return 0
