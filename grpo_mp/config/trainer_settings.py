"""Settings that runs of RL and of supervised fine-tuning share, and their checks."""

from collections.abc import Iterator
from typing import Self

from pydantic import Field, model_validator

from grpo_mp.config.sections import LayoutConfig, ModelConfig, MonitorConfig, OptimizerConfig, RunConfig, TrainingConfig
from grpo_mp.utils.section import Section

NOT_WITH_LORA = {  # fields of Megatron's configs that do not work with LoRA, and why
    "moe_shared_expert_overlap": "lets layers run in parts, where adapters do not see their inputs",
    "use_transformer_engine_op_fuser": "lets experts run without their layers, where adapters do not see their inputs",
    "delay_wgrad_compute": "stores gradients of the weights, which are frozen",
    "moe_router_bias_update_rate": "changes a bias of the routers, which checkpoints of adapters leave out",
}


class TrainerSettings(Section):
    """Sections of every run that trains."""

    run: RunConfig = Field(description="folder, length, checkpoints and evaluations of the run")
    model: ModelConfig = Field(description="the policy and its reference")
    layout: LayoutConfig = Field(LayoutConfig(), description="parallelism of the trainer")
    optimizer: OptimizerConfig = Field(description="AdamW and its learning rate")
    training: TrainingConfig = Field(TrainingConfig(), description="updates of a step, micro-batches, memory, Megatron")
    monitor: MonitorConfig = Field(MonitorConfig(), description="metrics, logs and time limits")

    @property
    def total_updates(self) -> int:
        """Return the number of optimizer updates of the policy in the whole run."""
        return self.run.steps

    @property
    def temperature(self) -> float:
        return 1.0

    @property
    def bucket_bytes(self) -> int | None:
        return None

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each combination of settings that does not work."""
        if self.training.share_prompts and self.layout.context > 1:
            yield (
                "training.share_prompts does not work with context parallelism "
                f"(layout.context={self.layout.context}): set share_prompts=false, or layout.context=1"
            )
        lora = self.model.lora
        megatron = self.training.megatron_args
        if lora and self.model.trains_mtp:
            yield (
                "model.lora has no adapters for the multi-token-prediction layer, nor would peft load them: set "
                "mtp_loss_scaling_factor=0, or lora=null"
            )
        if lora and self.training.fp8_format:
            yield "training.fp8_format with model.lora has not been tested: set fp8_format=null, or lora=null"
        for field, reason in NOT_WITH_LORA.items():
            if lora and megatron.get(field):
                yield f"model.lora: training.megatron_args.{field} {reason}: leave it out, or set lora=null"
        if self.model.dtype == "float16" and megatron.get("grad_reduce_in_fp32") is False:
            yield (
                "training.megatron_args.grad_reduce_in_fp32=false: with model.dtype=float16 sums of gradients are "
                "divided by the loss scale, and float16 would round them to 0: leave it out"
            )
        if self.optimizer.offload == "host" and not self.model.offloads:
            yield (
                f"optimizer.offload=host needs model.dtype=bfloat16: an optimizer in {self.model.dtype} works on the "
                "model's own weights: set dtype=bfloat16, or offload=step"
            )

    @model_validator(mode="after")
    def _work_together(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self
