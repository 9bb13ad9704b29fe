"""Settings that runs of RL and of supervised fine-tuning share, and their checks."""

from collections.abc import Mapping
from typing import Any, Protocol, Self

from grpo_mp.config.sections import LayoutConfig, ModelConfig, MonitorConfig, OptimizerConfig, RunConfig, TrainingConfig

NOT_WITH_LORA = {  # fields of Megatron's configs that do not work with LoRA, and why
    "moe_shared_expert_overlap": "lets layers run in parts, where adapters do not see their inputs",
    "use_transformer_engine_op_fuser": "lets experts run without their layers, where adapters do not see their inputs",
    "delay_wgrad_compute": "stores gradients of the weights, which are frozen",
    "moe_router_bias_update_rate": "changes a bias of the routers, which checkpoints of adapters leave out",
}


class TrainerSettings(Protocol):
    """Interface of Settings and SftSettings for the policy and the trainer."""

    @property
    def run(self) -> RunConfig: ...

    @property
    def model(self) -> ModelConfig: ...

    @property
    def layout(self) -> LayoutConfig: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def training(self) -> TrainingConfig: ...

    @property
    def monitor(self) -> MonitorConfig: ...

    @property
    def total_updates(self) -> int: ...

    @property
    def temperature(self) -> float: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...

    @property
    def bucket_bytes(self) -> int | None: ...


def check_training(settings: TrainerSettings) -> None:
    """Raise ValueError for combinations of settings that do not work together."""
    if settings.training.share_prompts and settings.layout.context > 1:
        raise ValueError(
            "training.share_prompts does not work with context parallelism "
            f"(layout.context={settings.layout.context}): set share_prompts=false, or layout.context=1"
        )
    lora, megatron = settings.model.lora, settings.training.megatron_args
    if lora and settings.model.trains_mtp:
        raise ValueError(
            "model.lora has no adapters for the multi-token-prediction layer, nor would peft load them: set "
            "mtp_loss_scaling_factor=0, or lora=null"
        )
    if lora and settings.training.fp8_format:
        raise ValueError("training.fp8_format with model.lora has not been tested: set fp8_format=null, or lora=null")
    for field, reason in NOT_WITH_LORA.items():
        if lora and megatron.get(field):
            raise ValueError(f"model.lora: training.megatron_args.{field} {reason}: leave it out, or set lora=null")
    if settings.optimizer.offload == "host" and not settings.model.offloads:
        raise ValueError(
            f"optimizer.offload=host needs model.dtype=bfloat16: an optimizer in {settings.model.dtype} works on the "
            "model's own weights: set dtype=bfloat16, or offload=step"
        )
