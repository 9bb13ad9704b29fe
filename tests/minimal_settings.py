"""The fewest settings that are a run."""

from typing import Any

MINIMAL_SETTINGS: dict[str, Any] = {
    "run": {"folder": "runs/x", "steps": 3},
    "model": {"path": "checkpoints/x"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts_per_step": 4, "group_size": 8, "max_prompt_tokens": 64, "max_response_tokens": 32},
    "reward": {"answer": 1.0},
    "optimizer": {"lr": 1e-6},
}
