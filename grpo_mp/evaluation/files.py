"""The files that an evaluation leaves: scores as JSON, samples as JSON lines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.evaluation.score import EvalScore, as_tree, of_tree


def step_file(run_folder: Path, step: int) -> Path:
    """Where a run keeps the scores that it had after a step; 0 is before training."""
    return run_folder / "eval" / f"step_{step:06d}.json"


def write_scores(file: Path, scores: Mapping[str, EvalScore], **said: Any) -> None:
    """Write the scores of all sets, and what else is said of them, in one go."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".json.new")
    tree = {**said, "sets": {name: as_tree(one) for name, one in scores.items()}}
    fresh.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    fresh.replace(file)


def read_scores(file: Path) -> dict[str, EvalScore]:
    """What `write_scores` wrote. Raises UserError for another file."""
    try:
        sets = json.loads(file.read_text(encoding="utf-8"))["sets"]
        return {name: of_tree(tree) for name, tree in sets.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: no scores of an evaluation ({error!r}): remove it") from error
