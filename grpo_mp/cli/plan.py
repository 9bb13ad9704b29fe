"""Estimate memory and time of a run, without a GPU: grpo-mp plan CONFIG --cluster h100-80 --nodes 16

The plan shows for every phase the memory of a rank's device and a node's host, the traffic, and the time; then whether
the run fits (exit status 0 or 1). `explain CONFIG` describes the settings in words. --search ranks the layouts of
trainer and engines that fit these machines. --times says how each phase's time is made up. `--against FILE` compares
measured steps (grpo_mp/planner/measured.yaml) with what is expected of them. A file of `grpo-mp sft`
is planned, too: its ranks only train; of one of `grpo-mp pipeline` every stage, with its GPU hours. Nothing is started.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from grpo_mp.config import SftSettings, is_pipeline, load_any_settings, load_pipeline
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.reporter import DOES_NOT_FIT
from grpo_mp.planner.clusters import Cluster, cluster_names, describe_rates, read_cluster
from grpo_mp.planner.model_configs import find_config
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import Parser, number_between, number_of_ranks, positive_int, settings_parser

DEFAULT_CLUSTER = "h100-80"
TABLE_WIDTH = 130  # of measured steps: a narrower terminal breaks its lines, and nothing is left out


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    if "--against" in arguments:
        return _compare([argument for argument in arguments if argument != "--against"])
    explains = list(arguments[:1]) == ["explain"]
    args = _parser().parse_intermixed_args(arguments[explains:])
    assumed = _fill_in_machines(args)
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: its folder does not exist: make it first")
    cluster = read_cluster(args.cluster)
    if is_pipeline(args.config):
        if explains or args.search or args.ppo or args.times or args.json or args.model_config:
            raise UserError("a pipeline is planned by machines alone: plan a stage's own file with the other options")
        return _plan_pipeline(args, cluster)
    settings = load_any_settings(args.config, args.overrides)
    hf, source = find_config(settings.model.path, args.model_config)
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    console.print(f"model: {source}", *([assumed] if assumed else []), sep="\n")
    if isinstance(settings, SftSettings):
        if explains or args.search or args.ppo or args.times:
            options = "--search, --ppo and --times"
            raise UserError(f"explain, {options} are for RL: plan this file without them")
        return _plan_sft(settings, hf, cluster, args, console)
    if hf.get("num_nextn_predict_layers") and not settings.model.trains_mtp:
        counted = "drafts for the engines" if settings.engine.speculative.drafts_by_mtp else "is not counted"
        console.print(f"its multi-token-prediction layer is not part of the policy: it {counted}")

    # torch is slow to import: the help and mistakes so far come without it.
    from grpo_mp.planner.explain import explain
    from grpo_mp.planner.job import make_job
    from grpo_mp.planner.record import write_plan
    from grpo_mp.planner.show import plan_and_show, search_and_show
    from grpo_mp.rollout.engine_args import check_arguments
    from grpo_mp.utils.log import log_to_terminal

    log_to_terminal()
    if find_spec("sglang"):  # a laptop need not have an engine
        check_arguments(settings.engine.args)
    try:
        tokens, accepted = args.response_tokens, args.acceptance_length
        job = make_job(settings, hf, cluster, args.nodes, args.gpus_per_node, tokens, accepted)
    except UserError as error:
        raise UserError(f"{error} ({assumed})" if assumed else str(error)) from error
    if explains:
        console.print(explain(job))
        return 0
    if args.json:
        return 0 if write_plan(job, args.json) else DOES_NOT_FIT
    fits = search_and_show(job, console) if args.search else plan_and_show(job, args.ppo, args.times, console)
    return 0 if fits else DOES_NOT_FIT


def _fill_in_machines(args: argparse.Namespace) -> str:
    """Fill in the machines that the command line leaves out; return a sentence that names them, or ""."""
    assumed = []
    if args.nodes is None:
        args.nodes = 1
        assumed.append("--nodes 1")
    if args.cluster is None:
        args.cluster = DEFAULT_CLUSTER
        assumed.append(f"--cluster {DEFAULT_CLUSTER}")
    return f"assumed: {' '.join(assumed)}" if assumed else ""


def _plan_pipeline(args: argparse.Namespace, cluster: Cluster) -> int:
    """Plan the stages of a pipeline."""
    from grpo_mp.pipeline.plan import Machines, plan_pipeline, show_pipeline_plan
    from grpo_mp.utils.log import log_to_terminal

    log_to_terminal()
    machines = Machines(cluster, args.nodes, args.gpus_per_node, args.response_tokens)
    plans = plan_pipeline(load_pipeline(args.config, args.overrides), args.config, machines)
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    return 0 if show_pipeline_plan(plans, machines, console) else DOES_NOT_FIT


def _plan_sft(settings: SftSettings, hf: HfConfig, cluster: Cluster, args: argparse.Namespace, console: Console) -> int:
    """Plan a job of supervised fine-tuning."""
    from grpo_mp.planner.record import write_sft_plan
    from grpo_mp.planner.sft import plan_and_show_sft, sft_job
    from grpo_mp.utils.log import log_to_terminal

    log_to_terminal()
    job = sft_job(settings, hf, cluster, args.nodes, args.gpus_per_node, args.response_tokens)
    if args.json:
        return 0 if write_sft_plan(job, args.json) else DOES_NOT_FIT
    return 0 if plan_and_show_sft(job, console) else DOES_NOT_FIT


def _compare(arguments: Sequence[str]) -> int:
    """Print measured steps beside what is expected of them."""
    parser = Parser("grpo-mp plan --against", "Compare measured steps with what the planner expects of their recipes.")
    parser.add_argument("file", type=Path, help="a list of measured steps, as grpo_mp/planner/measured.yaml")
    from grpo_mp.planner.measured import COLUMNS, FITTED, compare, read_measured
    from grpo_mp.planner.show import table_of

    rows = compare(read_measured(parser.parse_args(arguments).file))
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table_of("Measured and expected; a step with its weight sync, without the check", COLUMNS, rows))
    for name, rates in FITTED.items():
        assumed = read_cluster(name)
        console.print(f"{name}: plans assume {describe_rates(assumed)}; the fit found", end=" ")
        console.print(f"{describe_rates(replace(assumed, achievable=rates))}")
    return 0


def _parser() -> Parser:
    parser = settings_parser("plan", __doc__)
    parser.add_argument("--cluster", help=f"{', '.join(cluster_names())}, or a YAML file (default: {DEFAULT_CLUSTER})")
    parser.add_argument("--nodes", type=number_of_ranks, help="default: 1")
    parser.add_argument("--gpus-per-node", type=number_of_ranks, help="default: that of the cluster")
    parser.add_argument("--search", action="store_true", help="rank the layouts that fit, print the best five")
    parser.add_argument("--times", action="store_true", help="also show the terms of each phase's time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan there as JSON, and show nothing")
    parser.add_argument("--ppo", action="store_true", help="also show what the four models of PPO would need")
    parser.add_argument("--model-config", type=Path, help="config.json to use where model.path does not exist")
    parser.add_argument(
        "--response-tokens",
        type=positive_int,
        help="assumed mean length, of supervised samples in full (default: half of the limit)",
    )
    parser.add_argument(
        "--acceptance-length",
        type=number_between(1, 64),
        help="tokens that a decode step with speculation yields for a sequence",
    )
    return parser
