"""Say what is wrong: grpo-mp doctor WHAT ...

Prints findings, each with its evidence and what to do. The exit status is 1 where one is an error, 0 where there are
only warnings or none, 2 for a wrong command line.
"""

from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import exit_status, render
from grpo_mp.utils.parsers import Parser, non_negative, positive_int

STUCK = """Say who waits for whom in a run that does not go on: grpo-mp doctor stuck RUN

Asks every rank on this host what it does, and the engines that they host; changes nothing. For a job of several
nodes, run it on each of them (srun --overlap), then once more on any. The exit status is 1 where a rank waits for
longer than --over-s in a collective, also in one that all its ranks are in, or where a rank does not answer.
"""

MACHINE = """Say whether this machine is fit to train: grpo-mp doctor machine [CONFIG] [section.key=value ...]

Checks GPUs, their clocks, memory errors and peer access, how fast ranks exchange tensors, shared and host memory, the
versions of the tested set, and whether the packages with kernels load. With a settings file also the run folder's disk.
"""

MODEL = """Say where policy and engine part from transformers on the same tokens: grpo-mp doctor model FOLDER

Runs a Hugging Face folder in transformers in float32, then in the policy's Megatron model and in an SGLang server in
--dtype, each alone on this machine's first GPU or on its CPU, and compares the residual stream after each attention
and each MLP, the chosen experts, and the logprobs. What transformers itself loses in --dtype is the measure.
With fp8 the engine has weights in blockwise FP8 (on a CPU: rounded to it), the policy is in bfloat16, and the measure
of the engine is transformers on weights that went to FP8 and back.
Then compares the weights themselves: the policy's with the folder's, and by the engine's checksums what it loads from
the folder with what it loads from the policy's export.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp doctor", __doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=Parser)
    stuck = commands.add_parser("stuck", help="a run that does not go on: who waits for whom", description=STUCK)
    stuck.add_argument("run", type=Path, metavar="RUN", help="run.folder of a run that is going on")
    limit = "seconds in which a rank must answer (default: 10)"
    stuck.add_argument("--timeout-s", type=non_negative, default=10.0, metavar="S", help=limit)
    over = "report waits longer than this many seconds (default: 5)"
    stuck.add_argument("--over-s", type=non_negative, default=5.0, metavar="S", help=over)
    stuck.add_argument("--full", action="store_true", help="then the stacks of all threads of every rank and engine")
    machine = commands.add_parser("machine", help="this machine: is it fit to train", description=MACHINE)
    machine.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="settings file of a run")
    machine.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings laid over the file's")
    model = commands.add_parser("model", help="a model folder: where policy and engine part", description=MODEL)
    model.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder")
    model.add_argument("--dtype", choices=["float32", "bfloat16", "fp8"], default="bfloat16", help="default: bfloat16")
    model.add_argument("--without", choices=["policy", "engine"], action="append", default=[], help="leave it out")
    model.add_argument("--sequences", type=positive_int, default=4, metavar="N", help="random ones (default: 4)")
    model.add_argument("--length", type=positive_int, default=64, metavar="N", help="tokens of each (default: 64)")
    args = parser.parse_args(arguments)
    if args.what == "machine":
        return diagnose_machine(args.config, args.overrides)
    if args.what == "model":
        return diagnose_model_folder(
            args.folder, args.dtype, without=args.without, sequences=args.sequences, length=args.length
        )
    return diagnose_stuck(args.run, args.timeout_s, args.over_s, args.full)


def diagnose_stuck(run_folder: Path, timeout_s: float, over_s: float, full: bool = False) -> int:
    """Print what the ranks of a run wait for; return the exit status."""
    from grpo_mp.monitor.rank_processes import ask_ranks
    from grpo_mp.monitor.stuck import diagnose, full_stacks, shown_engines

    dumps, silent, engines = ask_ranks(run_folder, timeout_s)
    findings = diagnose(dumps, silent, over_s)
    print(render([*findings, *shown_engines(engines)]))
    if full:
        print(full_stacks(dumps, engines))
    return exit_status(findings)


def diagnose_machine(config: Path | None, overrides: Sequence[str]) -> int:
    """Print what is found about this machine; return the exit status."""
    from grpo_mp.config import load_any_settings
    from grpo_mp.doctor.machine import examine

    findings = [*examine(load_any_settings(config, [*overrides]) if config else None)]
    print(render(findings))
    return exit_status(findings)


def diagnose_model_folder(folder: Path, dtype: str, without: Sequence[str], sequences: int, length: int) -> int:
    """Print where the policy and an engine part from transformers; return the exit status."""
    if {*without} >= {"policy", "engine"}:
        raise UserError("--without policy --without engine: nothing is left to compare: leave out one of them")
    from grpo_mp.checkpoint.hf_reader import has_hf_weights
    from grpo_mp.doctor.compare_models import compare_models
    from grpo_mp.doctor.model import random_tokens
    from grpo_mp.models.hf_config import HfConfig
    from grpo_mp.policy.load_models import check_memory

    hf = HfConfig.read(folder)
    if not has_hf_weights(folder):
        raise UserError(f"{folder}: no Hugging Face folder with weights: export or convert it first (grpo-mp convert)")
    longest = hf.int("max_position_embeddings")
    if not 2 <= length <= longest:
        raise UserError(f"--length {length}: the model takes 2 to {longest} tokens")
    check_memory(folder, "run it on a larger machine")
    findings = compare_models(folder, random_tokens(hf.int("vocab_size"), sequences, length), dtype, without)
    print(render(findings))
    return exit_status(findings)
