"""Diagnose a hanging run, a machine or a model: grpo-mp doctor WHAT ...

Prints findings with evidence and advice. The exit status is 1 if a finding is an error, otherwise 0.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_mp.utils.errors import UserError
from grpo_mp.utils.findings import Finding, exit_status, render
from grpo_mp.utils.parsers import Parser, non_negative, positive_int

STUCK = """Show who waits for whom in a run that hangs: grpo-mp doctor stuck RUN

Asks every rank on this host, and its engines, for their stacks; changes nothing. For a job of several nodes, run it on
each node (srun --overlap), then once more on any. The exit status is 1 if a rank waits in a collective for longer than
5 s, or does not answer.
"""

MACHINE = """Check whether this machine is fit to train: grpo-mp doctor machine

Checks GPUs, whether engines can start and compile kernels, InfiniBand, how fast ranks exchange tensors, memory, disks,
and whether the packages with kernels load.
"""

MODEL = """Find where policy and engine part from transformers on the same tokens: grpo-mp doctor model FOLDER

Runs a Hugging Face folder in transformers in float32, then in the policy's Megatron model and in an SGLang server in
--dtype, each alone on this machine's first GPU or on its CPU, and compares the residual stream after each attention
and each MLP, the chosen experts, the keys that indexers choose, and the logprobs. The measure is what transformers
itself loses in --dtype.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp doctor", __doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=Parser)
    stuck = commands.add_parser("stuck", help="a run that hangs: who waits for whom", description=STUCK)
    stuck.add_argument("run", type=Path, metavar="RUN", help="run.folder of a running run")
    limit = "seconds in which a rank must answer (default: 10)"
    stuck.add_argument("--timeout-s", type=non_negative, default=10.0, metavar="S", help=limit)
    commands.add_parser("machine", help="this machine: is it fit to train", description=MACHINE)
    model = commands.add_parser("model", help="a model folder: where policy and engine part", description=MODEL)
    model.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder")
    dtypes = ["float32", "bfloat16", "float16"]
    model.add_argument("--dtype", choices=dtypes, default="bfloat16", help="default: bfloat16")
    model.add_argument("--without", choices=["policy", "engine"], help="leave it out")
    model.add_argument("--sequences", type=positive_int, default=4, metavar="N", help="random ones (default: 4)")
    model.add_argument("--length", type=positive_int, default=64, metavar="N", help="tokens of each (default: 64)")
    args = parser.parse_args(arguments)
    findings = [*{"stuck": _stuck, "machine": _machine, "model": _model}[args.what](args)]
    print(render(findings))
    return exit_status(findings)


def _stuck(args: argparse.Namespace) -> Iterable[Finding]:
    from grpo_mp.monitor.stuck import ask_ranks, diagnose

    return diagnose(*ask_ranks(args.run, args.timeout_s))


def _machine(args: argparse.Namespace) -> Iterable[Finding]:
    from grpo_mp.doctor.machine import examine

    return examine()


def _model(args: argparse.Namespace) -> Iterable[Finding]:
    from grpo_mp.checkpoint.hf_reader import has_hf_weights
    from grpo_mp.doctor.model import compare_models, random_tokens
    from grpo_mp.models.hf_config import HfConfig

    hf = HfConfig.read(args.folder)
    if not has_hf_weights(args.folder):
        raise UserError(f"{args.folder}: no Hugging Face folder with weights: convert it first (grpo-mp convert)")
    longest = hf.int("max_position_embeddings")
    if not 2 <= args.length <= longest:
        raise UserError(f"--length {args.length}: the model takes 2 to {longest} tokens")
    tokens = random_tokens(hf.int("vocab_size"), args.sequences, args.length)
    return compare_models(args.folder, tokens, args.dtype, [args.without])
