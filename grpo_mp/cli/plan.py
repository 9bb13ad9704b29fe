"""Estimate memory and time of a run, without a GPU: grpo-mp plan CONFIG --cluster h100-80 --nodes 16

Shows device memory per rank, host memory per node, traffic and time of every phase, and whether the run fits: the exit
status is 0 if it fits, 1 if not. Also plans settings files of `grpo-mp sft`, whose ranks only train. Starts nothing.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from grpo_mp.config import Settings, is_pipeline, load_any_settings
from grpo_mp.planner.clusters import cluster_names, read_cluster
from grpo_mp.planner.model_configs import find_config
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import DOES_NOT_FIT, Parser, positive_int, settings_parser

DEFAULT_CLUSTER = "h100-80"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_intermixed_args(arguments)
    cluster = read_cluster(args.cluster)
    if is_pipeline(args.config):
        raise UserError(f"{args.config} is a pipeline: plan the settings file of each stage")
    settings = load_any_settings(args.config, args.overrides)
    hf, source = find_config(settings.model.path, args.model_config)
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    console.print(f"model: {source}")
    if isinstance(settings, Settings) and hf.mtp_layers and not settings.model.trains_mtp:
        counted = "drafts for the engines" if settings.engine.speculative.drafts_by_mtp else "is not counted"
        console.print(f"its multi-token-prediction layer is not part of the policy: it {counted}")

    # torch is slow to import; the help and the errors above do not need it.
    from grpo_mp.planner.job import check_megatron_args, make_job
    from grpo_mp.planner.plan import check_fits, make_plan
    from grpo_mp.planner.show import show_plan
    from grpo_mp.platform import prepare
    from grpo_mp.rollout.engine_args import check_arguments
    from grpo_mp.utils.log import log_to_terminal

    log_to_terminal()
    machines = cluster, args.nodes, args.gpus_per_node, args.response_tokens
    if isinstance(settings, Settings) and find_spec("sglang"):  # a laptop may lack the engine
        check_arguments(settings.engine.args)
    job = make_job(settings, hf, *machines)
    if find_spec("megatron"):
        prepare()
        check_megatron_args(job)
    plan = make_plan(job)
    show_plan(plan, console)
    return 0 if check_fits(plan).fits else DOES_NOT_FIT


def _parser() -> Parser:
    parser = settings_parser("plan", __doc__)
    names = ", ".join(cluster_names())
    cluster = f"{names}, or a YAML file (default: {DEFAULT_CLUSTER})"
    parser.add_argument("--cluster", default=DEFAULT_CLUSTER, help=cluster)
    parser.add_argument("--nodes", type=positive_int, default=1, help="default: 1")
    parser.add_argument("--gpus-per-node", type=positive_int, help="default: that of the cluster")
    parser.add_argument("--model-config", type=Path, help="config.json to use where model.path does not exist")
    parser.add_argument(
        "--response-tokens",
        type=positive_int,
        help="assumed mean length, of supervised samples in full (default: half of the limit)",
    )
    return parser
