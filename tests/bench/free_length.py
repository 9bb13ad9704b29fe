"""GRPO beside Dr. GRPO where length is free: `python -m tests.bench.free_length --seeds 0 1 2 --steps 60`.

The quickstart's task, but the cold start shows every worked answer behind 0 to 12 dots, drawn at random: length says
nothing about being right, and a policy may write as many dots as it likes. Dr. GRPO (arXiv:2503.20783, section 3.1)
says that dividing each answer's loss by its own length lets wrong answers grow. Prints mean lengths of wrong and right
answers over the first and the last ten steps and draws the curves; run the quickstart of each seed once before.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_mp.examples.arithmetic import Problem, draw_slip, make_problems, worked_response
from grpo_mp.examples.cold_start import Recipe, cold_start
from tests.bench.learning_curves import Steps, picture, points, train

PRESETS = ("grpo", "dr_grpo")
MOST_DOTS = 12
ACCURACY = 0.4  # of the cold start, whatever the dots
HELD_OUT = 200
LAST = 10  # steps


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/free_length"))
    args = parser.parse_args()
    runs: dict[str, list[Steps]] = {preset: [] for preset in PRESETS}
    for seed in args.seeds:
        model = cold_started(seed)
        for preset in PRESETS:
            run = args.out / f"{preset}_seed{seed}"
            train(run, preset, seed, args.steps, [f"model.path={model}", "rollout.max_response_tokens=64"])
            runs[preset].append([json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()])
    show(runs)
    (args.out / "free_length.svg").write_text(picture(runs))


def cold_started(seed: int) -> Path:
    """The seed's model that has seen dots before every answer; made once."""
    result = Path(f"checkpoints/free_length_seed{seed}")
    if (result / "config.json").is_file():
        return result
    draw = random.Random(seed)
    problems, _ = make_problems(6000, 200, seed, largest=29, kinds=("add",))
    examples = [(problem.question, dotted(problem, draw)) for problem in problems]
    source = Path(f"checkpoints/tiny_deepseek_v3_seed{seed}_random")
    recipe = Recipe(steps=300, held_out=HELD_OUT)
    cold_start(source, result, examples, seed, ACCURACY / 2 / (MOST_DOTS + 1), recipe, print)
    return result


def dotted(problem: Problem, draw: random.Random) -> str:
    """Half of the answers slip, as in the quickstart; dots are drawn apart from that."""
    return "." * draw.randint(0, MOST_DOTS) + worked_response(problem, draw_slip(draw, share=0.5))


def show(runs: dict[str, list[Steps]]) -> None:
    """Lengths at first and at last, seed by seed."""
    table = Table("preset", "seed", "wrong, first", "wrong, last", "right, first", "right, last", "accuracy")
    for preset, seeds in runs.items():
        for number, steps in enumerate(seeds):
            cells = [
                cell for kind in ("incorrect", "correct") for cell in _ends(steps, f"rollout/response_length/{kind}")
            ]
            accuracy = points(steps, "eval/arithmetic/accuracy")[-1][1]
            table.add_row(preset, str(number), *(f"{cell:.1f}" for cell in cells), f"{accuracy:.2f}")
    Console(width=120).print(table)


def _ends(steps: Steps, name: str) -> tuple[float, float]:
    values = [value for _, value in points(steps, name)]
    return statistics.fmean(values[:LAST]), statistics.fmean(values[-LAST:])


if __name__ == "__main__":
    main()
