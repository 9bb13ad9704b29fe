"""Compare and convert checkpoints, in bounded memory.

    grpo-mp convert check A B --tolerance 1e-6
    grpo-mp convert to-megatron SRC DST
    grpo-mp convert to-hf SRC DST --fp8 --like HF_FOLDER

`check` compares names, shapes, dtypes and values of two Hugging Face folders and prints the largest difference first;
the exit status is 1 if the folders differ. `to-megatron` writes a torch_dist checkpoint, which Megatron loads in any
parallel layout. `to-hf` converts such a checkpoint or a saved step of a run; config, tokenizer and tensors outside the
policy come from the run's model.path, from the folder that was converted, or from --like. Both resume after an
interruption; DST gets its final name only when it is complete.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from grpo_mp.utils.log import log_to_terminal
from grpo_mp.utils.parsers import Parser, non_negative

DIFFERENT = 1  # exit status


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(arguments)
    log_to_terminal()
    status: int = args.run(args, Console(highlight=False, soft_wrap=True))
    return status


def _check(args: argparse.Namespace, console: Console) -> int:
    from grpo_mp.checkpoint.compare import compare_weights
    from grpo_mp.checkpoint.hf_reader import HfReader

    with HfReader(args.left) as left, HfReader(args.right) as right:
        differences = compare_weights(left, right, args.tolerance)
        tensors = len(left.stored_names)
    for difference in differences:
        console.print(f"{difference.name}: {difference.description}")
    if not differences:
        how = f"to within {args.tolerance:g}" if args.tolerance else "bit for bit"
        console.print(f"equal {how}: {tensors} tensors")
    return DIFFERENT if differences else 0


def _to_megatron(args: argparse.Namespace, console: Console) -> int:
    from torch.serialization import set_crc32_options

    from grpo_mp.checkpoint.convert import to_megatron

    set_crc32_options(False)  # the checksums are slow
    with _progress(console, args.destination) as report_progress:
        to_megatron(args.source, args.destination, report_progress)
    return 0


def _to_hf(args: argparse.Namespace, console: Console) -> int:
    from grpo_mp.checkpoint.convert import to_hf

    with _progress(console, args.destination) as report_progress:
        to_hf(args.source, args.destination, args.like, fp8=args.fp8, report_progress=report_progress)
    return 0


@contextmanager
def _progress(console: Console, destination: Path) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with speed and time left; at the end print the destination."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        task = progress.add_task(destination.name, total=None)

        def report_progress(written: int, total: int) -> None:
            progress.update(task, advance=written, total=total)

        yield report_progress
    console.print(f"written: {destination}")


def _parser() -> Parser:
    parser = Parser("grpo-mp convert", __doc__)
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check", help="compare two Hugging Face folders")
    check.add_argument("left", type=Path)
    check.add_argument("right", type=Path)
    check.add_argument("--tolerance", type=non_negative, default=0.0, help="largest difference of values that passes")
    check.set_defaults(run=_check)
    megatron = commands.add_parser("to-megatron", help="Hugging Face folder -> torch_dist")
    megatron.set_defaults(run=_to_megatron)
    hf = commands.add_parser("to-hf", help="torch_dist, or a checkpoint of a run -> Hugging Face folder")
    hf.add_argument("--fp8", action="store_true", help="write blockwise FP8")
    hf.add_argument("--like", type=Path, help="folder with config, tokenizer, and the FP8 bytes of unchanged blocks")
    hf.set_defaults(run=_to_hf)
    for command in (megatron, hf):
        command.add_argument("source", type=Path)
        command.add_argument("destination", type=Path)
    return parser
