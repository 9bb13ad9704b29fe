"""Know what a run needs before the machines are booked: python tools/plan.py CONFIG --cluster h100-80 --nodes 16

The plan says for every phase what a rank's device and a node's host hold, what moves, and how long it takes; then
whether it fits. `explain CONFIG` says in words what the settings mean. Nothing is started, no GPU is needed.
"""

import argparse
from pathlib import Path

from rich.console import Console

from grpo_mp.config import exit_with, load_settings
from grpo_mp.errors import UserError
from grpo_mp.planner.clusters import cluster_names, read_cluster
from grpo_mp.planner.job import Job, make_job
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.published import find_config
from grpo_mp.planner.show import show_plan
from grpo_mp.planner.verdict import judge
from grpo_mp.platform.quiet import hush_libraries

DOES_NOT_FIT = 1  # exit status


def main() -> None:
    """Command line; see the text above."""
    wanted = _parser().parse_intermixed_args()
    hush_libraries()
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    try:
        status = _plan(wanted, console)
    except UserError as error:
        exit_with(error)
    raise SystemExit(status)


def _plan(wanted: argparse.Namespace, console: Console) -> int:
    job = _job(wanted, console)
    plan = make_plan(job)
    verdict = judge(plan)
    show_plan(plan, verdict, console)
    return 0 if verdict.fits else DOES_NOT_FIT


def _job(wanted: argparse.Namespace, console: Console) -> Job:
    settings = load_settings(wanted.config, wanted.overrides)
    hf, source = find_config(settings.model.path, wanted.model_config)
    console.print(f"model: {source}")
    cluster = read_cluster(wanted.cluster)
    return make_job(settings, hf, cluster, wanted.nodes, wanted.gpus_per_node, wanted.response_tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="settings file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file's")
    parser.add_argument("--cluster", default="h100-80", help=f"{', '.join(cluster_names())}, or a YAML file")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, help="default: as the cluster has")
    parser.add_argument("--model-config", type=Path, help="config.json to plan with, where model.path is not here")
    parser.add_argument("--response-tokens", type=float, help="mean response to plan for (default: half of the limit)")
    return parser


if __name__ == "__main__":
    main()
