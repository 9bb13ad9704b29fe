"""Parameters of each rank counted in the real Megatron model, built on the meta device.

All ranks of a pipeline stage hold equally many, so one rank of each stage is built, in a fake process group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo_mp.config import TrainerSettings
from grpo_mp.distributed.coordinates import coordinates
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.value_head import critic_config
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.parameter_count import ZERO, ParameterCount
from grpo_mp.platform import prepare

if TYPE_CHECKING:
    from grpo_mp.policy.model import PolicyModel


def check_parameter_counts(job: PlannedJob) -> None:
    counted: list[tuple[str, PlannedJob, tuple[ParameterCount, ...], dict[str, bool]]] = [
        ("model", job, job.parameter_counts, {})
    ]
    if job.settings.model.lora:
        counted.append(("adapters", job, job.policy_trained_counts, {"trained": True}))
    if job.has_critic:
        counted.append(("critic", job.critic, job.critic.parameter_counts, {"critic": True}))
    for what, of, expected, options in counted:
        counts = megatron_parameter_counts(of.settings, of.hf, job.train_ranks, **options)
        assert counts == expected, f"Megatron's {what} holds {counts}, the closed form says {expected}"


def megatron_parameter_counts(
    settings: TrainerSettings, hf: HfConfig, world_size: int, critic: bool = False, trained: bool = False
) -> tuple[ParameterCount, ...]:
    """Count what one rank of each pipeline stage holds, of the policy or its critic, or what is trained of it."""
    per_stage = world_size // settings.layout.pipeline  # the pipeline is Megatron's slowest dimension
    counts = []
    for stage in range(settings.layout.pipeline):
        count = ZERO
        with built_on_meta(settings, hf, world_size=world_size, rank=stage * per_stage, critic=critic) as chunks:
            for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
                size = parameter.numel() * (parameter.requires_grad or not trained)
                is_expert = ".experts." in name
                count += ParameterCount(0, size) if is_expert else ParameterCount(size, 0)
        counts.append(count)
    return tuple(counts)


@contextmanager
def built_on_meta(
    settings: TrainerSettings, hf: HfConfig, world_size: int, rank: int, critic: bool = False
) -> Iterator[list["PolicyModel"]]:
    """Build the model chunks of one rank, of the policy or its critic, without memory."""
    prepare()
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from grpo_mp.distributed.process_groups import megatron_sizes
    from grpo_mp.policy.lora import add_adapters
    from grpo_mp.policy.megatron_config import transformer_config
    from grpo_mp.policy.model import PolicyModel, ValueModel, build_chunks

    hf = critic_config(hf) if critic else hf
    config = transformer_config(settings.layout, settings.training, settings.model.dtype, hf)
    config.init_model_with_meta_device = True  # TransformerEngine's modules choose their device themselves
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(**megatron_sizes(settings.layout), create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.run.seed)
        with torch.device("meta"):
            model_class = ValueModel if critic else PolicyModel
            chunks = build_chunks(
                config,
                hf,
                training=settings.training,
                temperature=settings.temperature,
                fp32_head=settings.model.fp32_head,
                model_class=model_class,
            )
        if settings.model.lora and not critic:
            coords = coordinates(rank, settings.layout, world_size)
            params = family_of(hf).params(hf)
            layout = settings.layout
            add_adapters(chunks, params, coords=coords, layout=layout, lora=settings.model.lora)
        yield chunks
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
