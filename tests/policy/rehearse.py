"""The trainer of recipes on CUDA up to its first kernel: `python -m tests.policy.rehearse WHEEL RECIPE ...`

WHEEL: a folder that holds TransformerEngine's Python code. Model, gradient buffers and optimizer of one rank of each
pipeline stage are built on the meta device by Megatron and TransformerEngine, with the fields that the trainer gives
them on CUDA, in a process group that only pretends. Prints one JSON object, a list of `Found` by recipe, last.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_mp import platform
from grpo_mp.config import load_settings
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import Job, make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import find_config
from grpo_mp.platform import fake_cuda as cuda_stand_ins
from tests.policy.te_python import load_python_parts

COMMAND = re.compile(r"--cluster (\S+) --nodes (\d+)")
META = torch.device("meta")


@dataclass(frozen=True)
class Found:
    """Of one rank: bytes of what stays, as allocated and as planned; bytes that the state_dicts of a save and of a
    load allocate beside it; and what its layers are set to."""

    weights: float
    gradients: float
    optimizer: float
    planned: tuple[float, float, float]
    save: int
    load: int
    plain_save: int
    rope_fused: bool
    permute_fused: bool
    layers: int
    layers_that_add_gradients: int


def main() -> None:
    """Rehearse the recipes that are named."""
    load_python_parts(Path(sys.argv[1]))
    cuda_stand_ins.current_device = lambda: META
    cuda_stand_ins.is_available = lambda: True
    cuda_stand_ins.get_device_capability = lambda *_: (9, 0)
    torch.Tensor.type = _type_as_on_a_device
    platform.on_cuda = lambda: True
    platform.device = lambda: META
    print(json.dumps({path: [asdict(one) for one in _rehearse(Path(path))] for path in sys.argv[2:]}))


def _type_as_on_a_device(tensor: torch.Tensor, *wanted: Any) -> Any:
    """Megatron knows tensors by the names of their types, which differ on meta."""
    found = super(torch.Tensor, tensor).type(*wanted)
    return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found


def _rehearse(path: Path) -> Iterator[Found]:
    settings = load_settings(path)
    command = COMMAND.search(path.read_text())
    assert command
    hf, _ = find_config(settings.model.path)
    job = make_job(settings, hf, read_cluster(command[1]), int(command[2]))
    per_stage = job.world_size // settings.layout.pipeline
    for stage in range(settings.layout.pipeline):
        yield _rank(job, stage, stage * per_stage)


def _rank(job: Job, stage: int, rank: int) -> Found:
    from grpo_mp.planner.meta_model import built_on_meta
    from grpo_mp.policy import optimizer as rooms

    # The gathers of a checkpoint go through gloo, which does not pretend.
    rooms.get_megatron_optimizer = partial(rooms.get_megatron_optimizer, use_gloo_process_groups=False)
    with built_on_meta(job.settings, job.hf, job.world_size, rank) as models:
        chunks = rooms.wrap_for_training(job.settings, models[0].config, models)
        optimizer, _ = rooms.build_optimizer(job.settings, chunks)
        return _found(job, stage, chunks, optimizer)


def _found(job: Job, stage: int, chunks: Sequence[Any], optimizer: Any) -> Found:
    from grpo_mp.policy.te_adam import state_in_place

    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    weights = [buffer.param_data for buffer in buffers]
    gradients = [buffer.grad_data for buffer in buffers]
    parts = optimizer.chained_optimizers
    kept = _bytes(weights + gradients)
    planned = plan_memory(job).device[stage][SubPhase.TRAIN]
    linear = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    with state_in_place(parts):
        save = _allocated(lambda: [part.state_dict() for part in parts])
        load = _allocated(lambda: [part.load_state_dict(part.state_dict()) for part in parts])
    config = chunks[0].config
    return Found(
        weights=_bytes(weights),
        gradients=_bytes(gradients),
        optimizer=_bytes([*weights, *gradients, *_state(parts)]) - kept,
        planned=(planned["weights"], planned["gradients"], planned["optimizer"]),
        save=save,
        load=load,
        plain_save=_allocated(lambda: [part.state_dict() for part in parts]),
        rope_fused=config.apply_rope_fusion,
        permute_fused=config.moe_permute_fusion,
        layers=len(linear),
        layers_that_add_gradients=sum(module.fuse_wgrad_accumulation for module in linear),
    )


def _state(parts: Sequence[Any]) -> Iterator[torch.Tensor]:
    for part in parts:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    """Each storage once."""
    return float(sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values()))


def _allocated(run: Any) -> int:
    """Bytes of all new storages that `run` makes."""
    with _Count() as counted:
        run()
    return counted.nbytes


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and function.is_view is False and not function._schema.is_mutable:
            self.nbytes += result.untyped_storage().nbytes()
        return result


if __name__ == "__main__":
    main()
