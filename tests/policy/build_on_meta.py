"""Build the trainer of recipes up to the first kernel: `python -m tests.policy.build_on_meta WHEEL RECIPE ...`

WHEEL: a folder that holds TransformerEngine's Python code. Model, gradient buffers and optimizer of one rank of each
pipeline stage are built on the meta device by Megatron and TransformerEngine, with the config fields of CUDA, in a fake
process group. RECIPE@fp8 is the recipe with training.fp8_format=e4m3. The last line of the output is a JSON object: a
list of `BuildResult` by recipe.
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
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase, plan_memory
from grpo_mp.planner.model_configs import find_config
from grpo_mp.platform import fake_cuda
from tests.policy.te_stub import install_te_stub

COMMAND = re.compile(r"--cluster (\S+) --nodes (\d+)")
META = torch.device("meta")


@dataclass(frozen=True)
class BuildResult:
    """Results of one rank: bytes of weights, gradients and optimizer, allocated and planned; bytes that a save, a load
    and TransformerEngine's own state_dict allocate in addition; which fused kernels are on."""

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
    fp8: tuple[str, str]  # TransformerEngine's recipe and its format; ("", "") without FP8


def main() -> None:
    """Build the recipes on the command line."""
    install_te_stub(Path(sys.argv[1]))
    fake_cuda.current_device = lambda: META
    fake_cuda.is_available = lambda: True
    fake_cuda.get_device_capability = lambda *_: (9, 0)
    torch.Tensor.type = _cuda_type
    platform.on_cuda = lambda: True
    platform.device = lambda: META
    from megatron.core.transformer import transformer_config

    from grpo_mp.policy import adam_state

    adam_state.PinnedBuffer = MetaBuffer
    transformer_config._validate_dsa_kernel_backend_dependencies = lambda _: None  # TileLang is for GPUs
    print(json.dumps({recipe: [asdict(result) for result in _build(recipe)] for recipe in sys.argv[2:]}))


class MetaBuffer:
    """Stands for pinned host memory, which a recipe needs a terabyte of."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.tensors = [torch.empty_like(tensor) for tensor in like]


def _cuda_type(tensor: torch.Tensor, *args: Any) -> Any:
    result = super(torch.Tensor, tensor).type(*args)
    return result.replace("torch.meta.", "torch.") if isinstance(result, str) else result


def _build(recipe: str) -> Iterator[BuildResult]:
    name, _, fp8 = recipe.partition("@")
    path = Path(name)
    settings = load_settings(path, ["training.fp8_format=e4m3"] if fp8 else [])
    command = COMMAND.search(path.read_text())
    assert command
    hf, _ = find_config(settings.model.path)
    job = make_job(settings, hf, read_cluster(command[1]), int(command[2]))
    per_stage = job.world_size // settings.layout.pipeline
    for stage in range(settings.layout.pipeline):
        yield _build_rank(job, stage, stage * per_stage)


def _build_rank(job: PlannedJob, stage: int, rank: int) -> BuildResult:
    from grpo_mp.policy import optimizer as policy_optimizer
    from tests.planner.meta_model import built_on_meta

    # Checkpoint gathers use gloo, which the fake process group does not cover.
    policy_optimizer.get_megatron_optimizer = partial(
        policy_optimizer.get_megatron_optimizer, use_gloo_process_groups=False
    )
    with built_on_meta(job.settings, job.hf, job.world_size, rank) as models:
        settings = job.settings
        megatron_args = job.settings.training.megatron_args
        for model in models:
            model.to(META)  # TransformerEngine makes sinks on "cuda" whatever the default device, here a CPU
        chunks = policy_optimizer.wrap_for_training(settings.layout, megatron_args, models[0].config, models)
        optimizer, _ = policy_optimizer.build_optimizer(
            settings.optimizer, settings.model.dtype, megatron_args, settings.total_updates, chunks
        )
        return _measure(job, stage, chunks, optimizer)


def _measure(job: PlannedJob, stage: int, chunks: Sequence[Any], optimizer: Any) -> BuildResult:
    from grpo_mp.policy.adam_state import state_dict_without_copies

    buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    frozen = [param for chunk in chunks for param in chunk.parameters() if not param.requires_grad]
    weights = [buffer.param_data for buffer in buffers] + frozen
    gradients = [buffer.grad_data for buffer in buffers]
    parts = optimizer.chained_optimizers
    planned = plan_memory(job).device[stage][SubPhase.TRAIN]
    modules = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "fuse_wgrad_accumulation")]
    linear = [module for module in modules if all(param.requires_grad for param in module.parameters(recurse=False))]
    with state_dict_without_copies(parts):
        save = _allocated(lambda: [part.state_dict() for part in parts])
        load = _allocated(lambda: [part.load_state_dict(part.state_dict()) for part in parts])
    config = chunks[0].config
    on_host = job.sharded_parameters(job.parameter_counts[stage]) * job.per_parameter.host_optimizer
    return BuildResult(
        weights=_bytes(weights),
        gradients=_bytes(gradients),
        optimizer=_bytes([*weights, *gradients, *_optimizer_tensors(parts)]) - _bytes(weights + gradients),
        planned=(planned["weights"], planned["gradients"], planned.get("optimizer", 0.0) + on_host),
        save=save,
        load=load,
        plain_save=_allocated(lambda: [part.state_dict() for part in parts]),
        rope_fused=config.apply_rope_fusion,
        permute_fused=config.moe_permute_fusion,
        layers=len(linear),
        layers_that_add_gradients=sum(module.fuse_wgrad_accumulation for module in linear),
        fp8=_fp8_recipe(config),
    )


def _fp8_recipe(config: Any) -> tuple[str, str]:
    from megatron.core.fp8_utils import get_fp8_recipe

    if not config.fp8:
        return "", ""
    recipe = get_fp8_recipe(config)
    return type(recipe).__name__, recipe.fp8_format.name


def _optimizer_tensors(parts: Sequence[Any]) -> Iterator[torch.Tensor]:
    for part in parts:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Sequence[torch.Tensor]) -> float:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return float(sum({storage._cdata: storage.nbytes() for storage in storages}.values()))


def _allocated(run: Any) -> int:
    with _AllocationCounter() as counter:
        run()
    return counter.nbytes


class _AllocationCounter(torch.utils._python_dispatch.TorchDispatchMode):
    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and function.is_view is False and not function._schema.is_mutable:
            self.nbytes += result.untyped_storage().nbytes()
        return result


if __name__ == "__main__":
    main()
