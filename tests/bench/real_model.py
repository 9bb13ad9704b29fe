"""Train SmolLM2-135M-Instruct to answer sums with a number alone: `python -m tests.bench.real_model FOLDER`.

Makes the model in FOLDER where it is missing. Prints of each step its reward, seconds, and the difference of engine and
policy after the sync beside its limit. Settings may follow, as model.dtype=bfloat16.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.jobs import read_jsonl
from tests.smollm2 import make_smollm2, write_sums_run


def main(folder: Path, steps: int, overrides: list[str]) -> None:
    model = make_smollm2(folder / "SmolLM2-135M-Instruct")
    run = folder / "sums"
    shutil.rmtree(run, ignore_errors=True)
    settings = write_sums_run(run, model, run={"steps": steps})
    subprocess.run([sys.executable, "-m", "grpo_mp", "train", str(settings), "--ranks", "1", *overrides], check=True)
    print("step  reward  seconds  engine - policy  limit")
    for line in read_jsonl(run / "run" / "metrics.jsonl")[1:]:
        mean = line["sync/check/logprob_abs_diff/mean"]
        limit = line["sync/check/limit"]
        print(f"{line['step']:4}  {line['reward/mean']:6.3f}  {line['time/step_s']:7.1f}  {mean:15.1e}  {limit:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=10)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    main(**vars(parser.parse_args()))
