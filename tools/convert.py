"""Look at checkpoints and compare them, a tensor at a time.

    python tools/convert.py info PATH
    python tools/convert.py check A B --tolerance 1e-6

`info` says what a Hugging Face folder or a checkpoint of a run holds. `check` compares two Hugging Face folders:
names, shapes, dtypes and values, one line per difference, the worst first, exit status 1 where there is one.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_mp.config import exit_with
from grpo_mp.errors import UserError
from grpo_mp.models.compare import compare_folders
from grpo_mp.models.describe import describe_hf
from grpo_mp.platform.quiet import hush_libraries

DIFFERENT = 1  # exit status


def main() -> None:
    """Command line; see the text above."""
    wanted = _parser().parse_args()
    hush_libraries()
    try:
        status: int = wanted.run(wanted, Console(highlight=False, soft_wrap=True))
    except UserError as error:
        exit_with(error)
    raise SystemExit(status)


def _info(wanted: argparse.Namespace, console: Console) -> int:
    from grpo_mp.policy.torch_dist_reader import describe_torch_dist, is_torch_dist  # Megatron is slow to import

    rows = describe_torch_dist(wanted.path) if is_torch_dist(wanted.path) else describe_hf(wanted.path).rows()
    table = Table.grid(padding=(0, 2))
    for row in rows.items():
        table.add_row(*row)
    console.print(table)
    return 0


def _check(wanted: argparse.Namespace, console: Console) -> int:
    differences = compare_folders(wanted.one, wanted.other, wanted.tolerance)
    for difference in differences:
        console.print(f"{difference.name}: {difference.what}")
    return DIFFERENT if differences else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    info = commands.add_parser("info", help="what a folder holds")
    info.add_argument("path", type=Path)
    info.set_defaults(run=_info)
    check = commands.add_parser("check", help="compare two Hugging Face folders")
    check.add_argument("one", type=Path)
    check.add_argument("other", type=Path)
    check.add_argument("--tolerance", type=float, default=0.0, help="largest difference of values that passes; 0: bits")
    check.set_defaults(run=_check)
    return parser


if __name__ == "__main__":
    main()
