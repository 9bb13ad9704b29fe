"""Write one HTML page of one or several runs: grpo-mp report RUN...

The page shows warnings, settings, scores, curves, times, memory and answers of the runs side by side and loads nothing
from the network. The warnings are also printed. --trace also writes RUN/trace.json, the timelines of all ranks in one
file for Perfetto.
"""

from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import write_atomically
from grpo_mp.utils.parsers import Parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run.folder of a run")
    default = "the page (default: report.html in the only RUN, else here)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=default)
    parser.add_argument("--trace", action="store_true", help="also write the timeline, RUN/trace.json")
    args = parser.parse_args(arguments)
    for folder in args.runs:
        if not folder.exists():
            raise UserError(f"{folder}: the run folder does not exist: give the run.folder of a run")
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"

    from grpo_mp.monitor.report.page import build_report, render  # slow to import
    from grpo_mp.monitor.run_folder import read_runs
    from grpo_mp.monitor.timeline import merge_traces
    from grpo_mp.utils.findings import render as render_findings

    report = build_report(read_runs(args.runs))
    page = render(report)
    try:
        for folder in args.runs if args.trace else ():
            merge_traces(folder)
        write_atomically(out, page, make_folder=False)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: its folder does not exist: no page is written") from error
    for name, verdict in zip(report.runs, report.verdicts, strict=True):
        print(f"{name}: {verdict}")
        if findings := [finding for run, finding in report.warnings if run == name]:
            print(render_findings(findings))
    print(f"{out}: {len(page.encode()) / 2**20:.1f} MiB")
    return 0
