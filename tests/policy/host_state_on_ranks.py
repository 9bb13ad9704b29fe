"""State on the host and on the device, on two ranks: `torchrun -m tests.policy.host_state_on_ranks WHEEL MODEL OUT`

WHEEL: a folder that holds TransformerEngine's Python code; its kernels are replaced by formulas. Dense weights are
sharded, experts divided, each kind with an optimizer of its own. Then what was saved where experts are divided is
loaded where they are not, and the other way. Each rank writes OUT/RANK.json: by case what differs.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_mp.platform import fake_cuda
from tests.policy.te_kernels import install_update_kernels
from tests.policy.te_stub import install_te_stub

PRECISION_AWARE = {"use_precision_aware_optimizer": True}
MOMENTS = PRECISION_AWARE | {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
CASES: Mapping[str, dict[str, Any]] = {
    "remainders": MOMENTS | {"grad_reduce_in_fp32": False},
    "plain": {},
    "float32 moments": PRECISION_AWARE,
    "one bfloat16 moment": PRECISION_AWARE | {"exp_avg_dtype": "bfloat16"},
    "whole main weights": MOMENTS | {"store_param_remainders": False},
}
PIECE_BYTES = {"host": 2**18, "host, small": 2**16, "host, one piece": 2**28}


def main() -> None:
    """Run every case."""
    wheel, model, out = map(Path, sys.argv[1:])
    compiled = install_te_stub(wheel)
    install_update_kernels(compiled)
    fake_cuda.is_available = lambda: True  # otherwise TransformerEngine's layers are not built
    fake_cuda.get_device_capability = lambda *_: (9, 0)
    from grpo_mp.config.sections import LayoutConfig
    from grpo_mp.distributed.process_groups import start_parallel, stop_parallel

    parallel = start_parallel(LayoutConfig(expert=2), 0, 60.0)
    trial = Trial(model, parallel, out)
    result = {name: trial.compare(name, arguments) for name, arguments in CASES.items()}
    result["refused"] = trial.load_error("remainders", CASES["whole main weights"])
    for expert in (1, 2):
        folder = out / f"for expert={expert}"
        saved = trial.save_updated(folder)
        stop_parallel()
        parallel = start_parallel(LayoutConfig(expert=expert), 0, 60.0, name=folder.name)
        trial = Trial(model, parallel, out)
        result[folder.name] = trial.compare_loaded(folder, saved)
    (out / f"{parallel.rank}.json").write_text(json.dumps(result))
    stop_parallel()


class Trial:
    """Policies of one model on this rank."""

    def __init__(self, model: Path, parallel: Any, out: Path) -> None:
        self.model = model
        self.parallel = parallel
        self.out = out

    def compare(self, case: str, megatron_args: dict[str, Any]) -> dict[str, Any]:
        """Update in turn, save one kind of policy, load it into the other, and update again."""
        from grpo_mp.policy.checkpoint import load_policy
        from tests.save_policy import save_policy

        expected = self.policy(megatron_args, "step")
        policies = {name: self.policy(megatron_args, "host", size) for name, size in PIECE_BYTES.items()}
        result: dict[str, Any] = {
            "pieces": {name: pieces_of(policy) for name, policy in policies.items()},
            "bytes per parameter": state_bytes(policies["host"]),
            "initial": {name: unequal(policy, expected) for name, policy in policies.items()},
        }
        initial = {index: tensor.clone() for index, tensor in _state(expected).items()}
        for number in range(3):
            for policy in (expected, *policies.values()):
                update(policy, number)
        now = _state(expected)
        result["unchanged"] = [str(index) for index in initial if torch.equal(initial[index], now[index])]
        result["updated"] = {name: unequal(policy, expected) for name, policy in policies.items()}
        for before, after in (("host", "host"), ("host", "step"), ("step", "host")):
            folder = self.out / case / f"{before} to {after}"
            if self.parallel.rank == 0:
                folder.mkdir(parents=True)
            dist.barrier(group=self.parallel.cpu_group)
            save_policy(policies["host"] if before == "host" else expected, folder)
            dist.barrier(group=self.parallel.cpu_group)
            result.setdefault("bytes stored", []).append(stored_bytes(folder, self.model))
            resumed = self.policy(megatron_args, after, PIECE_BYTES["host, small"])
            load_policy(resumed, folder)
            policies[f"{before} to {after}"] = resumed
        result["resumed"] = {name: unequal(policy, expected) for name, policy in policies.items()}
        for policy in (expected, *policies.values()):
            update(policy, 3)
        result["updated again"] = {name: unequal(policy, expected) for name, policy in policies.items()}
        result["steps"] = sorted({step for policy in policies.values() for step in steps_of(policy)})
        return result

    def load_error(self, case: str, megatron_args: dict[str, Any]) -> str:
        """Return what a policy with other main weights says of the checkpoint of a case."""
        from grpo_mp.policy.checkpoint import load_policy
        from grpo_mp.utils.errors import UserError

        try:
            load_policy(self.policy(megatron_args, "step"), self.out / case / "step to host")
        except UserError as error:
            return str(error)
        return ""

    def save_updated(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Save a policy of main weights in 16-bit remainders after an update; return all that it has, of all ranks."""
        from grpo_mp.policy.checkpoint import optimizer_chunks, weight_chunks
        from tests.save_policy import save_policy

        policy = self.policy(CASES["remainders"], "step")
        update(policy, self.parallel.layout.expert)
        if self.parallel.rank == 0:
            folder.mkdir()
        dist.barrier(group=self.parallel.cpu_group)
        save_policy(policy, folder)
        return joined([*weight_chunks(policy, policy.tensors), *optimizer_chunks(policy)], self.parallel)

    def compare_loaded(self, folder: Path, saved: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Load a checkpoint; return the kinds of tensors that this rank has, and the names of those that differ."""
        from grpo_mp.policy.checkpoint import load_policy, local_weight_chunks, optimizer_chunks

        policy = self.policy(CASES["remainders"], "step")
        load_policy(policy, folder)
        chunks = [*local_weight_chunks(policy, policy.tensors), *optimizer_chunks(policy)]
        expected = [saved[chunk.name][place_of(chunk)] for chunk in chunks]
        return {
            "kinds": sorted({f"{chunk.name.partition('/')[0]} {chunk.tensor.dtype}" for chunk in chunks}),
            "experts": sum(".experts." in chunk.name for chunk in chunks),
            "different": [
                chunk.name
                for chunk, other in zip(chunks, expected, strict=True)
                if chunk.tensor.dtype != other.dtype or not torch.equal(chunk.tensor, other)
            ],
        }

    def policy(self, megatron_args: dict[str, Any], offload: str, piece_bytes: int = 2**28) -> Any:
        """Build a policy whose optimizer is where `offload` says."""
        from grpo_mp.config import check_settings
        from grpo_mp.policy.policy import Policy
        from tests.planner.jobs import BASE

        settings = {
            "model": {"path": self.model},
            "optimizer": {
                "lr": 1e-3,
                "weight_decay": 0.1,
                "clip_grad": 0.5,
                "warmup_updates": 2,
                "offload": offload,
            },
            "layout": {"expert": self.parallel.layout.expert},
            "training": {"megatron_args": megatron_args},
        }
        with as_on_a_device(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("grpo_mp.policy.optimizer.OPTIMIZER_PIECE_BYTES", piece_bytes)
            return Policy(check_settings(BASE | settings, "test"), self.parallel, with_reference=False)


def joined(chunks: list[Any], parallel: Any) -> dict[str, torch.Tensor]:
    """Return the whole tensors of which all ranks have chunks; each element is on one rank."""
    from grpo_mp.distributed.process_groups import all_gather

    tensors: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    own = [replace(chunk, tensor=chunk.tensor.clone()) for chunk in chunks if not chunk.is_replica]
    for chunk in chain(*all_gather(own, parallel.cpu_group)):
        whole = tensors.setdefault(chunk.name, torch.zeros(chunk.shape, dtype=chunk.tensor.dtype))
        whole[place_of(chunk)] = chunk.tensor
        missing[chunk.name] = missing.get(chunk.name, whole.numel()) - chunk.tensor.numel()
    assert set(missing.values()) == {0}
    assert any(tensor.any() for name, tensor in tensors.items() if name.startswith("main_param/"))
    return tensors


def place_of(chunk: Any) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.tensor.shape, strict=True))


def stored_bytes(folder: Path, model: Path) -> tuple[float, float]:
    parameters = sum(tensor.numel() for part in model.glob("*.safetensors") for tensor in load_file(part).values())
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    data = sum(file.stat().st_size for file in folder.rglob("*.bin"))
    return data / parameters, (total - data) / parameters


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Build the policy's optimizer as on a GPU."""
    from grpo_mp import platform
    from grpo_mp.policy import megatron_config

    with pytest.MonkeyPatch.context() as patch:
        answers = SimpleNamespace(
            on_cuda=lambda: True, megatron_fields=platform.megatron_fields, fp8_fields=platform.fp8_fields
        )
        patch.setattr(megatron_config, "platform", answers)
        yield


def update(policy: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in policy.chunks[0].parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator) * (number + 1))
    success, _, _ = policy.optimizer.step()
    policy.lr_scheduler.step(1)
    assert success


def unequal(policy: Any, expected: Any) -> list[str]:
    """Return the names of weights and state tensors that differ, in dtype or any bit."""
    tensors = _tensors(policy)
    others = _tensors(expected)
    assert tensors.keys() == others.keys()
    return [
        str(name)
        for name, tensor in tensors.items()
        if tensor.dtype != others[name].dtype or not torch.equal(tensor, others[name])
    ]


def _tensors(policy: Any) -> dict[Any, torch.Tensor]:
    return _state(policy) | dict(policy.tensors)


def _state(policy: Any) -> dict[Any, torch.Tensor]:
    from grpo_mp.policy.checkpoint import optimizer_chunks

    return {(chunk.name, chunk.offsets): chunk.tensor for chunk in optimizer_chunks(policy)}


def pieces_of(policy: Any) -> int:
    return sum(len(part.optimizer.step.__self__._pieces) for part in policy.optimizer.chained_optimizers)


def state_bytes(policy: Any) -> float:
    groups = [(part.optimizer, group) for part in policy.optimizer.chained_optimizers for group in part.param_groups]
    params = [(adam, param) for adam, group in groups for param in group["params"]]
    size = sum(tensor.nbytes for adam, param in params for tensor in adam.state[param].values())
    return size / sum(param.numel() for _, param in params)


def steps_of(policy: Any) -> set[int]:
    return {group["step"] for part in policy.optimizer.chained_optimizers for group in part.optimizer.param_groups}


if __name__ == "__main__":
    main()
