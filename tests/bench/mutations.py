"""Does the newcomer's tier see broken code? `python -m tests.bench.mutations` breaks a line a package, each in a copy.

The package's own tests run first, and where they see nothing the rest of the tier. `--only PACKAGE ...` takes some.
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


MUTATIONS = (
    Mutation(
        "algorithms",
        "the upper clip bound is the lower one",
        "algorithms/policy_losses.py",
        "clipped = ratio.clamp(1 - clip.low, 1 + clip.high)",
        "clipped = ratio.clamp(1 - clip.low, 1 + clip.low)",
    ),
    Mutation(
        "rewards",
        "repetition is rewarded",
        "rewards/terms.py",
        "return len(set(grams)) / len(grams) - 1 if grams else 0.0",
        "return 1 - len(set(grams)) / len(grams) if grams else 0.0",
    ),
    Mutation(
        "data",
        "every epoch has the same order",
        "data/cursor.py",
        "[cursor.seed % 2**64, cursor.epoch]",
        "[cursor.seed % 2**64, 0]",
    ),
    Mutation(
        "models",
        "the output projection of attention is split along the wrong dimension",
        "models/gqa.py",
        "tp_dim=1,",
        "tp_dim=0,",
    ),
    Mutation(
        "distributed",
        "an expert's tensor rank is that of the dense layers",
        "distributed/coordinates.py",
        "expert_tensor=expert_tensor,",
        "expert_tensor=tensor,",
    ),
    Mutation(
        "batching",
        "a response is packed one token late",
        "batching/packing.py",
        "slice(start + len(sample.prompt_tokens) - 1, end - 1)",
        "slice(start + len(sample.prompt_tokens), end)",
    ),
    Mutation(
        "checkpoint",
        "a file's size is not compared",
        "checkpoint/run_state.py",
        "is_whole = file.is_file() and file.stat().st_size == size",
        "is_whole = file.is_file()",
    ),
    Mutation(
        "policy",
        "ranks name their experts in reverse",
        "policy/weights.py",
        "expert_rank * (experts",
        "(expert_parallel - 1 - expert_rank) * (experts",
    ),
    Mutation(
        "weight_sync",
        "the check of the engines passes whatever they say",
        "weight_sync/compare.py",
        "return self.mean <= tolerance",
        "return self.mean <= tolerance or self.mean > 0",
    ),
    Mutation(
        "rollout",
        "scores of given tokens are one token late",
        "rollout/client.py",
        '["input_token_logprobs"][1:]]',
        '["input_token_logprobs"][:-1]]',
    ),
    Mutation(
        "planner",
        "the optimizer takes no memory",
        "planner/memory.py",
        "state = model.sharded_parameters(trained) * per_parameter.optimizer",
        "state = 0.0",
    ),
    Mutation(
        "trainer",
        "a resumed run keeps the weights that it started with",
        "trainer/job.py",
        'load_policy(policy, checkpoint / "policy")',
        "pass",
    ),
)


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
