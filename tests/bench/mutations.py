"""Does the newcomer's tier see broken code? `python -m tests.bench.mutations` breaks a line a package, each in a copy.

The breaks are in mutations.yaml. The package's own tests run first, and where they see nothing the rest of the tier.
`--only PACKAGE ...` takes some.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
ELSEWHERE = ("tests/parallel", "tests/e2e", "tests")  # where a break that its package does not see is looked for


@dataclass(frozen=True)
class Mutation:
    """One line of the package, `original`, made `mutated`."""

    package: str
    title: str
    file: str
    original: str
    mutated: str


MUTATIONS = [Mutation(**one) for one in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[each.package for each in MUTATIONS], metavar="PACKAGE")
    only = parser.parse_args().only
    chosen = [each for package in only for each in MUTATIONS if each.package == package]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        copy_tree(copy)
        print("| package | break | caught by |\n|---|---|---|", flush=True)
        caught = [seen for each in chosen if (seen := try_mutation(each, copy))]
    print(f"{len(caught)} of {len(chosen)} breaks are caught")


def copy_tree(copy: Path) -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)


def try_mutation(each: Mutation, copy: Path) -> str:
    """Print a row of the table; return the test that fails with the break and passes without, "" for none."""
    start = time.monotonic()
    seen = next(filter(None, (killed_by(folder, each, copy) for folder in (f"tests/{each.package}", *ELSEWHERE))), "")
    print(f"| {each.package} | {each.title} | {seen or 'no test'} ({time.monotonic() - start:.0f} s) |", flush=True)
    return seen


def killed_by(folder: str, each: Mutation, copy: Path) -> str:
    """Break the copy and mend it again; return the test of `folder` that saw it, "" for none."""
    file = copy / "grpo_mp" / each.file
    text = file.read_text()
    assert text.count(each.original) == 1, f"{each.file} has not one {each.original}"
    failing_anyway: list[str] = []
    while True:
        file.write_text(text.replace(each.original, each.mutated))
        failing = first_failure(copy, folder, *(f"--deselect={name}" for name in failing_anyway))
        file.write_text(text)
        if failing in failing_anyway:  # a file that cannot be imported is not left out
            return ""
        if not failing or not first_failure(copy, failing):
            return failing
        failing_anyway.append(failing)


def first_failure(copy: Path, *arguments: str) -> str:
    """Run a newcomer's tests of the copy; return the first that fails, "" for none."""
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", *arguments]
    variables = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | variables | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    return next(iter(FAILURE.findall(process.stdout)), "")


if __name__ == "__main__":
    main()
