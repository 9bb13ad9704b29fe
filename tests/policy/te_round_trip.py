"""TransformerEngine's Adam through a checkpoint on a CPU: `python -m tests.policy.te_round_trip WHEEL FOLDER`

WHEEL: a folder that holds its Python code. For each optimizer config, a tiny policy of TransformerEngine layers saves a
random state, zeroes it and loads it; then a new policy loads it. The last line of the output is a JSON object:
`RoundTrip` by case, and the error of a policy whose main weights have another format than the checkpoint's.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_mp.config import check_settings
from grpo_mp.platform import fake_cuda
from tests.policy.te_stub import install_te_stub
from tools.tiny.models import make_tiny, make_tokenizer

BFLOAT16 = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "remainders": BFLOAT16,
    "whole": BFLOAT16 | {"store_param_remainders": False},
    "float32 moments": {"use_precision_aware_optimizer": True},
}
STEP = 7


@dataclass(frozen=True)
class RoundTrip:
    """dtypes of the state by name, and names of tensors that a load did not restore."""

    dtypes: dict[str, str]
    changed: list[str]
    changed_in_a_new_policy: list[str]
    steps: list[int]


def main() -> None:
    """Run every case."""
    install_te_stub(Path(sys.argv[1]))
    fake_cuda.is_available = lambda: True  # otherwise TransformerEngine's layers are not built
    fake_cuda.get_device_capability = lambda *_: (9, 0)
    folder = Path(sys.argv[2])
    make_tiny(folder / "model", "qwen3_moe", make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=64)
    cases = {name: asdict(_round_trip(folder, name, megatron)) for name, megatron in CASES.items()}
    print(json.dumps({"cases": cases, "refused": _load_error(folder, "remainders", CASES["whole"])}))


def _round_trip(folder: Path, name: str, megatron: dict[str, Any]) -> RoundTrip:
    from grpo_mp.policy.adam_state import init_state
    from grpo_mp.policy.checkpoint import load_policy
    from tests.save_policy import save_policy

    checkpoint = folder / name
    checkpoint.mkdir()
    with _policy(folder / "model", megatron) as policy:
        for tensor in _state(policy).values():
            _randomize(tensor)
        for group in policy.optimizer.param_groups:
            group["step"] = STEP
        expected = {key: tensor.clone() for key, tensor in _state(policy).items()}
        for part in policy.optimizer.chained_optimizers:
            init_state(part)  # only creates what is missing
        save_policy(policy, checkpoint)
        for tensor in _state(policy).values():
            tensor.zero_()
        for group in policy.optimizer.param_groups:
            group["step"] = 0
        load_policy(policy, checkpoint)
        changed = _unequal(_state(policy), expected)
        steps = [group["step"] for group in policy.optimizer.param_groups]
    with _policy(folder / "model", megatron) as policy:
        load_policy(policy, checkpoint)
        changed_in_new = _unequal(_state(policy), expected)
    dtypes = {key.partition(".")[2]: str(tensor.dtype) for key, tensor in expected.items()}
    return RoundTrip(dtypes, changed, changed_in_new, steps)


def _load_error(folder: Path, name: str, megatron: dict[str, Any]) -> str:
    from grpo_mp.policy.checkpoint import load_policy
    from grpo_mp.utils.errors import UserError

    with _policy(folder / "model", megatron) as policy:
        try:
            load_policy(policy, folder / name)
        except UserError as error:
            return str(error)
    return ""


@contextmanager
def _policy(model: Path, megatron: dict[str, Any]) -> Iterator[Any]:
    from grpo_mp.policy.policy import Policy
    from tests.one_rank import one_rank_job

    tree = {
        "run": {"folder": model.parent, "steps": 1},
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"train": "nothing"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 64, "max_response_tokens": 64},
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1.0e-3},
        "training": {"megatron_args": megatron},
    }
    settings = check_settings(tree, "test")
    with one_rank_job() as parallel:
        yield Policy(settings, parallel, with_reference=False)


def _state(policy: Any) -> dict[str, torch.Tensor]:
    """Return Adam's state tensors by parameter number and name."""
    tensors: dict[str, torch.Tensor] = {}
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                number = len(tensors)
                for name, value in part.optimizer.state[param].items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{number}.{name}"] = value
                if not part.config.use_precision_aware_optimizer:
                    tensors[f"{number}.main"] = param.data
    return tensors


def _randomize(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.uniform_(-1, 1)
    else:
        tensor.random_(torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)


def _unequal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in actual.keys() | expected.keys()
        if name not in actual
        or actual[name].dtype != expected[name].dtype
        or not torch.equal(actual[name], expected[name])
    ]


if __name__ == "__main__":
    main()
