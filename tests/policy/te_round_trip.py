"""TransformerEngine's Adam through a checkpoint on a CPU: `python -m tests.policy.te_round_trip WHEEL FOLDER`

WHEEL: a folder that holds its Python code. For each way of keeping state: a tiny policy of Megatron's TransformerEngine
layers saves a state that was drawn, wipes it, loads it, and loads it a second time into a new policy. Prints one JSON
object as the last line: `Found` by case, and what a policy says that keeps main weights otherwise than the checkpoint.
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
from grpo_mp.examples.tiny_models import make_tiny
from grpo_mp.examples.tiny_tokenizer import make_tokenizer
from grpo_mp.platform import fake_cuda as cuda_stand_ins
from tests.policy.te_python import load_python_parts

BFLOAT16 = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "remainders": BFLOAT16,
    "whole": BFLOAT16 | {"store_param_remainders": False},
    "float32 moments": {"use_precision_aware_optimizer": True},
}
STEP = 7


@dataclass(frozen=True)
class Found:
    """dtypes of the state by name, and names that came back otherwise than they were saved."""

    dtypes: dict[str, str]
    changed: list[str]
    changed_in_a_new_policy: list[str]
    steps: list[int]


def main() -> None:
    """Every case."""
    load_python_parts(Path(sys.argv[1]))
    cuda_stand_ins.is_available = lambda: True  # TransformerEngine's layers are built only then
    cuda_stand_ins.get_device_capability = lambda *_: (9, 0)
    folder = Path(sys.argv[2])
    make_tiny(folder / "model", "qwen3_moe", make_tokenizer(["apples"]), num_hidden_layers=2, hidden_size=64)
    found = {name: asdict(_case(folder, name, megatron)) for name, megatron in CASES.items()}
    print(json.dumps({"cases": found, "refused": _refusal(folder, "remainders", CASES["whole"])}))


def _case(folder: Path, name: str, megatron: dict[str, Any]) -> Found:
    from grpo_mp.policy.checkpoint import load_policy, save_policy
    from grpo_mp.policy.te_adam import init_state

    saved = folder / name
    saved.mkdir()
    with _policy(folder / "model", megatron) as policy:
        for tensor in _state(policy).values():
            _draw(tensor)
        for group in policy.optimizer.param_groups:
            group["step"] = STEP
        wanted = {key: tensor.clone() for key, tensor in _state(policy).items()}
        for part in policy.optimizer.chained_optimizers:
            init_state(part)  # makes what is missing only
        save_policy(policy, saved)
        for tensor in _state(policy).values():
            tensor.zero_()
        for group in policy.optimizer.param_groups:
            group["step"] = 0
        load_policy(policy, saved)
        changed = _unequal(_state(policy), wanted)
        steps = [group["step"] for group in policy.optimizer.param_groups]
    with _policy(folder / "model", megatron) as policy:
        load_policy(policy, saved)
        again = _unequal(_state(policy), wanted)
    dtypes = {key.partition(".")[2]: str(tensor.dtype) for key, tensor in wanted.items()}
    return Found(dtypes, changed, again, steps)


def _refusal(folder: Path, name: str, megatron: dict[str, Any]) -> str:
    from grpo_mp.errors import UserError
    from grpo_mp.policy.checkpoint import load_policy

    with _policy(folder / "model", megatron) as policy:
        try:
            load_policy(policy, folder / name)
        except UserError as error:
            return str(error)
    return ""


@contextmanager
def _policy(model: Path, megatron: dict[str, Any]) -> Iterator[Any]:
    from grpo_mp.distributed.process_groups import single_process_group, start_parallel, stop_parallel
    from grpo_mp.policy.policy import Policy

    tree = {
        "run": {"folder": model.parent, "steps": 1},
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"train": "nothing"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 64, "max_response_tokens": 64},
        "reward": {"answer": 1.0},
        "optimizer": {"lr": 1.0e-3, "megatron": megatron},
    }
    settings = check_settings(tree, "test")
    with single_process_group():
        parallel = start_parallel(settings.layout, 0, 600.0)
        try:
            yield Policy(settings, parallel, with_reference=False)
        finally:
            stop_parallel()


def _state(policy: Any) -> dict[str, torch.Tensor]:
    """Everything that Adam keeps of a parameter, by number and name."""
    found: dict[str, torch.Tensor] = {}
    for part in policy.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                number = len(found)
                kept = part.optimizer.state[param]
                found |= {f"{number}.{name}": one for name, one in kept.items() if isinstance(one, torch.Tensor)}
                if not part.config.use_precision_aware_optimizer:
                    found[f"{number}.main"] = param.data
    return found


def _draw(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.uniform_(-1, 1)
    else:
        tensor.random_(torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max)


def _unequal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in found.keys() | wanted.keys()
        if name not in found or found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])
    ]


if __name__ == "__main__":
    main()
