"""Bytes per parameter in memory and in checkpoints, and the disk space that a run needs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from grpo_mp.checkpoint.run_state import FALLBACKS
from grpo_mp.config import Settings, TrainerSettings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapter_params
from grpo_mp.models.mapping import Param
from grpo_mp.models.value_head import critic_config, critic_params

RECORDED_TOKEN_BYTES = 20  # token id, float64 logprob, weight version and text of a recorded token, uncompressed
DTYPE_BYTES = {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "uint8": 1, "fp8": 1}


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes per parameter. Optimizer state is sharded over data-parallel ranks; the rest is not."""

    weights: int
    gradients: int
    optimizer: int  # main weights and moments on the device
    fp32_gradients: int = 0  # copy of the rank's gradient shard that an update makes
    host_optimizer: int = 0  # main weights and moments that are always on the host
    host_copies: int = 0  # copy of the weights in host memory
    saved_reference: int = 0  # weights of a reference model that is updated, in checkpoints

    @property
    def saved(self) -> int:
        """Return the bytes per parameter in a checkpoint, which stores every tensor in its dtype."""
        return self.weights + self.saved_reference + self.saved_state

    @property
    def saved_state(self) -> int:
        """Return the bytes per parameter of optimizer state in a checkpoint."""
        return self.optimizer + self.host_optimizer


def bytes_per_parameter(
    dtype: str, megatron_args: Mapping[str, Any], offload: str = "step", updated_reference: bool = False
) -> BytesPerParameter:
    """Return the bytes per parameter of a policy with distributed Adam and one host copy of the weights.

    In float32 the model's weights are Adam's main weights, and nothing is offloaded. `offload`: optimizer.offload;
    `updated_reference`: checkpoints have a reference model of their own.
    """
    if dtype == "float32":
        return BytesPerParameter(weights=4, gradients=4, optimizer=8, saved_reference=4 * updated_reference)
    reduce_in_fp32 = megatron_args.get("grad_reduce_in_fp32", True)
    gradients = 4 if reduce_in_fp32 else 2
    on_host = offload == "host"
    precision_aware = bool(megatron_args.get("use_precision_aware_optimizer"))
    # TransformerEngine's Adam stores only the half of a float32 main weight that the bfloat16 weight lacks.
    main_weight = DTYPE_BYTES[str(megatron_args.get("main_params_dtype", "float32"))]
    main_weight = 2 if megatron_args.get("store_param_remainders", True) and main_weight == 4 else main_weight
    moment_bytes = [DTYPE_BYTES[str(megatron_args.get(f"exp_avg{suffix}_dtype", "float32"))] for suffix in ("", "_sq")]
    state = main_weight + sum(moment_bytes) if precision_aware else 12
    return BytesPerParameter(
        weights=2,
        gradients=gradients,
        optimizer=0 if on_host else state,
        host_optimizer=state if on_host else 0,
        fp32_gradients=0
        if reduce_in_fp32 or precision_aware or on_host
        else 4,  # Megatron copies the gradients to float32 for Adam
        host_copies=2,
        saved_reference=2 * updated_reference,
    )


@dataclass(frozen=True)
class DiskNeed:
    """Disk space [bytes] of one checkpoint, one exported folder, the rollouts of one step, and the whole run."""

    checkpoint: int
    export: int
    rollouts: int
    run: int


def disk_need(settings: Settings, hf: HfConfig) -> DiskNeed:
    """Return an upper bound of the disk space of an RL run: checkpoints, exports, and rollouts kept for a resume."""
    run = settings.run
    behind = (run.save_every or run.steps) * min(run.keep_checkpoints, FALLBACKS)
    steps = min(behind + 1, run.steps) + settings.rollout.max_staleness
    rollout_steps = steps + run.steps * settings.rollout.dump
    updated = settings.algorithm.kl.ref_update_every > 0
    critic = None
    if settings.critic:
        critic = critic_config(settings.for_critic().model.read_config() if settings.critic.path else hf)
    return policy_disk_need(
        settings,
        hf,
        rollouts=recorded_bytes(settings, hf),
        rollout_steps=rollout_steps,
        updated_reference=updated,
        critic=critic,
    )


def policy_disk_need(
    settings: TrainerSettings,
    hf: HfConfig,
    rollouts: int = 0,
    rollout_steps: int = 0,
    updated_reference: bool = False,
    critic: HfConfig | None = None,
) -> DiskNeed:
    """Return an upper bound of the disk space of a run.

    `rollouts`: bytes of the rollouts of one step; `rollout_steps`: steps whose rollouts are kept; `critic`: config of
    the critic, if any.
    """
    params, lora = family_of(hf).params(hf), settings.model.lora
    count = trained = _count(params)
    if lora:
        trained = _count(adapter_params(params, lora.rank, lora.targets))
    megatron_args, offload = settings.training.megatron_args, settings.optimizer.offload
    size = bytes_per_parameter(settings.model.dtype, megatron_args, offload, updated_reference)
    run = settings.run
    if critic:
        trained += sum(param.num_elements for param in critic_params(critic).values())
    checkpoint, export = trained * size.saved, count * (1 if run.export_fp8 else size.weights)
    export += trained * size.weights if lora else 0
    checkpoints = min(run.keep_checkpoints + 1, run.steps // run.save_every + 1 if run.save_every else 1)
    exports = run.export + (run.steps // run.export_every if run.export_every else 0)
    total = checkpoints * checkpoint + exports * export + rollout_steps * rollouts
    return DiskNeed(checkpoint, export, rollouts, total)


def _count(params: Mapping[str, Param]) -> int:
    return sum(prod(shape) for param in params.values() if not param.alias for shape in param.shapes)


def recorded_bytes(settings: Settings, hf: HfConfig) -> int:
    """Return an upper bound of the bytes of a step's recorded responses, with routed experts if they are replayed."""
    shape, per_token = model_shape(hf), RECORDED_TOKEN_BYTES
    if settings.training.router_replay == "R3":
        per_token += shape.num_moe_layers * shape.experts_per_token * (1 if shape.num_experts <= 256 else 2)
    return settings.samples_per_step * settings.rollout.max_sequence_tokens * per_token
