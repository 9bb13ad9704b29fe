"""The score files of an evaluation, in JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_mp.errors import UserError
from grpo_mp.evaluation.pass_at_k import Estimate
from grpo_mp.evaluation.score import EvalScore


def step_file(run_folder: Path, step: int) -> Path:
    """Return where a run keeps its scores after a step; 0 is before training."""
    return run_folder / "eval" / f"step_{step:06d}.json"


def write_scores(file: Path, scores: Mapping[str, EvalScore], **metadata: Any) -> None:
    """Write the scores of all sets with their metadata; a reader never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".json.new")
    tree = {**metadata, "sets": {name: asdict(score) for name, score in scores.items()}}
    temporary.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)


def read_scores(file: Path) -> dict[str, EvalScore]:
    """Read what `write_scores` wrote. Raises UserError for another file."""
    try:
        sets = json.loads(file.read_text(encoding="utf-8"))["sets"]
        return {name: _score_from_json(tree) for name, tree in sets.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: no scores of an evaluation ({error!r}): remove it") from error


def _score_from_json(tree: Mapping[str, Any]) -> EvalScore:
    estimates = {
        kind: {int(k): Estimate(**estimate) for k, estimate in tree[kind].items()} for kind in ("pass_at", "maj_at")
    }
    return EvalScore(**{**tree, **estimates})
