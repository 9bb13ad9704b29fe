"""Know what a run needs before the machines are booked: python tools/plan.py CONFIG --cluster h100-80 --nodes 16

The plan says for every phase what a rank's device and a node's host hold, what moves, and how long it takes; then
whether it fits (exit status 0 or 1). `explain CONFIG` says in words what the settings mean. --search ranks the layouts
of trainer and engines that fit these machines. Nothing is started, no GPU is needed.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from grpo_mp.config import exit_with, load_settings
from grpo_mp.errors import UserError
from grpo_mp.planner.clusters import cluster_names, read_cluster
from grpo_mp.planner.explain import explain
from grpo_mp.planner.feasibility import check_fits
from grpo_mp.planner.job import Job, make_job
from grpo_mp.planner.meta_model import check_parameter_counts
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.plan import make_plan
from grpo_mp.planner.search import search_layouts
from grpo_mp.planner.show import show_models, show_plan, show_search_result
from grpo_mp.platform.warnings import silence_known_warnings
from grpo_mp.rollout.engine_args import check_arguments, known_arguments

DOES_NOT_FIT = 1  # exit status


def main() -> None:
    """Run the command line; see the text above."""
    arguments = sys.argv[1:]
    explains = arguments[:1] == ["explain"]
    args = _parser().parse_intermixed_args(arguments[explains:])
    silence_known_warnings()
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    try:
        job = _make_job(args, console)
        if explains:
            console.print(explain(job))
            fits = True
        else:
            fits = _search(job, console) if args.search else _plan(job, args.ppo, console)
    except UserError as error:
        exit_with(error)
    raise SystemExit(0 if fits else DOES_NOT_FIT)


def _plan(job: Job, ppo: bool, console: Console) -> bool:
    check_parameter_counts(job)
    plan = make_plan(job)
    feasibility = check_fits(plan)
    show_plan(plan, feasibility, console)
    if ppo:
        show_models(plan, console)
    return feasibility.fits


def _search(job: Job, console: Console) -> bool:
    result = search_layouts(job)
    for plan in result.best:
        check_parameter_counts(plan.job)
    show_search_result(result, console)
    return bool(result.best)


def _make_job(args: argparse.Namespace, console: Console) -> Job:
    settings = load_settings(args.config, args.overrides)
    hf, source = find_config(settings.model.path, args.model_config)
    console.print(f"model: {source}")
    if hf.get("num_nextn_predict_layers"):
        console.print("its multi-token-prediction layer is not part of the policy: it is not counted")
    for name, value in (("--nodes", args.nodes), ("--gpus-per-node", args.gpus_per_node)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value}: give at least one")
    if find_spec("sglang"):  # a laptop need not have an engine
        check_arguments(settings.engine.args, known_arguments())
    cluster = read_cluster(args.cluster)
    return make_job(settings, hf, cluster, args.nodes, args.gpus_per_node, args.response_tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="settings file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file's")
    parser.add_argument("--cluster", default="h100-80", help=f"{', '.join(cluster_names())}, or a YAML file")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, help="default: as the cluster has")
    parser.add_argument("--search", action="store_true", help="rank the layouts that fit, print the best five")
    parser.add_argument("--ppo", action="store_true", help="what the four models of PPO would need beside it")
    parser.add_argument("--model-config", type=Path, help="config.json to plan with, where model.path is not here")
    parser.add_argument("--response-tokens", type=float, help="mean response to plan for (default: half of the limit)")
    return parser


if __name__ == "__main__":
    main()
