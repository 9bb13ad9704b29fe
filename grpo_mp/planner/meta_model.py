"""Parameters of each rank counted in the real Megatron model, built without memory. The planner's only use of Megatron.

Every rank of a pipeline stage holds equally many, so one rank of each stage is built, on the meta device, in a process
group that only pretends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo_mp.config import Settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.job import Job
from grpo_mp.planner.parameter_count import NOTHING, Count
from grpo_mp.platform import prepare

if TYPE_CHECKING:
    from grpo_mp.policy.model import PolicyModel


def check_in_the_model(job: Job) -> None:
    """Raise UserError where Megatron refuses the settings; the formula and its model must count alike."""
    prepare()
    from grpo_mp.policy.megatron_config import check_overrides

    check_overrides(job.settings)
    found = counted(job.settings, job.hf, job.world_size)
    assert found == job.counts, f"Megatron's model holds {found}, the closed form says {job.counts}"


def counted(settings: Settings, hf: HfConfig, world_size: int) -> tuple[Count, ...]:
    """What one rank of each pipeline stage holds. Raises UserError where Megatron refuses the settings."""
    per_stage = world_size // settings.layout.pipeline  # the pipeline is Megatron's slowest dimension
    return tuple(_count(settings, hf, world_size, stage * per_stage) for stage in range(settings.layout.pipeline))


def _count(settings: Settings, hf: HfConfig, world_size: int, rank: int) -> Count:
    with built_on_meta(settings, hf, world_size, rank) as chunks:
        found = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    return sum((_place(name, parameter) for name, parameter in found), NOTHING)


@contextmanager
def built_on_meta(settings: Settings, hf: HfConfig, world_size: int, rank: int) -> Iterator[list["PolicyModel"]]:
    """The model chunks of one rank of a job, without memory. Raises UserError where Megatron refuses the settings."""
    prepare()
    from grpo_mp.policy.megatron_config import transformer_config
    from grpo_mp.policy.model import build_chunks

    config = transformer_config(settings, hf)
    config.init_model_with_meta_device = True  # TransformerEngine's modules choose their device themselves
    with _pretended_job(settings, world_size, rank):
        with torch.device("meta"):
            chunks = build_chunks(settings, hf, config)
        yield chunks


def _place(name: str, parameter: torch.nn.Parameter) -> Count:
    return Count(0, parameter.numel()) if ".experts." in name else Count(parameter.numel(), 0)


@contextmanager
def _pretended_job(settings: Settings, world_size: int, rank: int) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from grpo_mp.distributed.process_groups import megatron_sizes

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(**megatron_sizes(settings.layout), create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.run.seed)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
