"""Write one HTML page of a run: grpo-mp report RUN

The page shows warnings, settings, scores, curves, times, memory and answers and loads nothing from the network. The
warnings are also printed. --trace also writes RUN/trace.json, the timelines of all ranks in one file for Perfetto.
"""

from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.files import write_atomically
from grpo_mp.utils.parsers import Parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp report", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run.folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--trace", action="store_true", help="also write the timeline, RUN/trace.json")
    args = parser.parse_args(arguments)
    out = args.out or args.run / "report.html"

    from grpo_mp.monitor.report.page import build_report, render  # slow to import
    from grpo_mp.monitor.run_folder import read_run
    from grpo_mp.monitor.timeline import merge_traces
    from grpo_mp.utils.findings import render as render_findings

    report = build_report(read_run(args.run))
    page = render(report)
    if args.trace:
        merge_traces(args.run)
    write_atomically(out, page)
    print(f"{report.run}: {report.verdict}")
    print(render_findings(report.warnings), f"{out}: {len(page.encode()) / 2**20:.1f} MiB", sep="\n")
    return 0
