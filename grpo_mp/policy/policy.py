"""The policy on one rank: logprobs, optimizer updates and weights, in any layout."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.hf_reader import check_layers, check_tensors
from grpo_mp.checkpoint.manifest import Checksums
from grpo_mp.checkpoint.peft_folder import base_digest
from grpo_mp.config import TrainerSettings
from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.layout import check_layout, model_shape, sets_pipeline_layout
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.distributed.shards import tensor_part, tp_size
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapter_params, check_targets
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING, is_of_mtp
from grpo_mp.policy.expert_load import ExpertLoad
from grpo_mp.policy.forward import LossFunction, forward_backward, forward_only
from grpo_mp.policy.lora import MergedWeights, add_adapters, initialize
from grpo_mp.policy.megatron_config import check_overrides, transformer_config
from grpo_mp.policy.model import PolicyModel, build_chunks
from grpo_mp.policy.multi_token_prediction import MtpLoss
from grpo_mp.policy.optimizer import build_optimizer, wrap_for_training
from grpo_mp.policy.reference import Reference
from grpo_mp.policy.routing_replay import RoutingReplay, check_router_replay
from grpo_mp.policy.weights import clear_weights, load_hf, local_tensors
from grpo_mp.types import MicroBatch


@dataclass(frozen=True)
class UpdateReport:
    """Result of one optimizer update. `losses` come from the last pipeline stage only."""

    losses: list[Any]
    grad_norm: float
    lr: float
    skipped: bool  # the gradient was not finite, or larger than optimizer.skip_grad_norm
    bad_gradients: Sequence[str] = ()  # parameters of this rank whose gradient was not finite
    measured: Mapping[str, float] = field(default_factory=dict)  # metrics over the job


class Policy:
    """Megatron model, optimizer and reference of this rank."""

    def __init__(
        self, settings: TrainerSettings, parallel: Parallel, with_reference: bool, load_weights: bool = True
    ) -> None:
        """Build the model, load this rank's shards of the weights, build the optimizer.

        Without `load_weights` they are zero: a checkpoint will bring them.

        Raises UserError where a file of a converted folder differs from its checksum; each rank checks some files.
        """
        self.parallel = parallel
        self.hf = settings.model.read_config()
        self.base_params = self.params = family_of(self.hf).params(self.hf)
        dtype, megatron_args = settings.model.dtype, settings.training.megatron_args
        self.config = transformer_config(settings.layout, settings.training, dtype, self.hf)
        models = build_chunks(self.config, self.hf, settings.training, settings.temperature)
        self.lora = settings.model.lora
        self.base_digest = base_digest(settings.model.path) if self.lora else ""
        if self.lora:
            add_adapters(models, self.params, parallel.coords, settings.layout, self.lora)
            self.params = self.params | adapter_params(self.params, self.lora.rank, self.lora.targets)
        self.chunks = wrap_for_training(settings.layout, megatron_args, self.config, models)
        self.tensors = local_tensors(models, self.params, parallel.coords, settings.layout.expert)
        self._set_values(settings, load_weights)
        self.optimizer, self.lr_scheduler = build_optimizer(
            settings.optimizer, dtype, megatron_args, settings.total_updates, self.chunks
        )
        self._skip_grad_norm = settings.optimizer.skip_grad_norm or math.inf
        self.expert_load = ExpertLoad(models, self.config.num_layers, self.config.num_moe_experts or 0)
        self.mtp_loss = MtpLoss(settings.model.mtp_loss_scaling_factor) if settings.model.trains_mtp else None
        self.replay: RoutingReplay | None = None
        if settings.training.router_replay != "none":
            self.replay = RoutingReplay(self.chunks, self.config.num_moe_experts or 0)
        # No logprob of the reference is computed by the multi-token-prediction layer.
        decoder = {
            name: tensor for name, tensor in self.trained_tensors.items() if not is_of_mtp(self.params[name], self.hf)
        }
        self.reference = Reference(decoder) if with_reference else None

    def _set_values(self, settings: TrainerSettings, load_weights: bool) -> None:
        """Load this rank's weights, or without `load_weights` those that no checkpoint will bring."""
        parallel, base = self.parallel, {name: self.tensors[name] for name in self.tensors if name in self.base_params}
        if load_weights or self.lora:
            Checksums.of_conversion(settings.model.path).check_share(parallel.rank, parallel.world_size)
            with open_weights(settings.model.path, family=settings.model.family) as reader:
                load_hf(base, self.base_params, reader, parallel.coords, parallel.layout)
        else:
            clear_weights(base, self.base_params)
        for name, tensor in base.items():
            # Megatron marks a weight when it initializes it, and counts unmarked ones in the norm on one rank only.
            tensor.tensor_model_parallel = self.params[name].tp_dim is not None  # type: ignore[attr-defined]
        if self.lora:
            adapters = {name: param for name, param in self.params.items() if name not in self.base_params}
            initialize(self.tensors, adapters, parallel.coords, parallel.layout, settings.run.seed)

    @property
    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Return what checkpoints have of this rank: all of its tensors, or its adapters where there are any."""
        return {name: one for name, one in self.tensors.items() if not self.lora or name not in self.base_params}

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's weights by name as engines and exports get them, with what adapters add."""
        if not self.lora:
            return self.tensors
        return MergedWeights(self.tensors, self.base_params, self.parallel.layout, self.lora)

    def logprobs(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return [2, T] logprobs and entropies of every micro-batch; an empty list on all but the last stage."""
        return forward_only(self.chunks, microbatches, self.replay)

    def record_routing(self, microbatches: Sequence[MicroBatch]) -> tuple[list[torch.Tensor], list[MicroBatch]]:
        """Return their logprobs, and the micro-batches with the experts that the routers chose for them."""
        if self.replay is None:
            raise ValueError("this policy was built without routing replay")
        self.replay.record()
        outputs = self.logprobs(microbatches)
        if recorded := self.replay.take_recorded():  # a stage may have dense layers only
            pairs = zip(microbatches, recorded, strict=True)
            return outputs, [replace(batch, routed_experts=routed) for batch, routed in pairs]
        return outputs, list(microbatches)

    @contextmanager
    def use_reference_weights(self) -> Iterator[None]:
        """Swap in the reference's weights inside. Raises ValueError where the policy was built without one."""
        if self.reference is None:
            raise ValueError("this policy was built without a reference")
        with self.reference.swapped():
            yield

    @contextmanager
    def use_temperature(self, temperature: float) -> Iterator[None]:
        """Compute logprobs at this temperature inside, instead of the settings'."""
        heads = [model.head for model in self.models()]
        for model in self.models():
            model.head = replace(model.head, temperature=temperature)
        try:
            yield
        finally:
            for model, head in zip(self.models(), heads, strict=True):
                model.head = head

    def compute_gradients(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Compute the gradient of the summed loss over all ranks into the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return forward_backward(self.chunks, microbatches, loss, self.replay, self.mtp_loss)

    def update(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> UpdateReport:
        """Do one optimizer update; skip it, and report so, where the gradient is not finite or too large."""
        losses = self.compute_gradients(microbatches, loss)
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())  # over the job: all ranks skip, or none
        skipped = not (math.isfinite(grad_norm) and grad_norm <= self._skip_grad_norm)
        if not skipped:
            self.optimizer.step()
        self.lr_scheduler.step(1)
        return UpdateReport(losses, grad_norm, lr, skipped, self._bad_gradients() if skipped else ())

    def _bad_gradients(self) -> list[str]:
        """Return the parameters of this rank whose gradient is not finite."""
        gradients = {name: tensor.main_grad for name, tensor in self.tensors.items() if hasattr(tensor, "main_grad")}
        return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the MoE layers of this rank, from 0, where its routers can replay; () where they cannot."""
        return self.replay.layers if self.replay else ()

    def models(self) -> list[PolicyModel]:
        """Return the Megatron chunks without Float16Module and DDP wrappers."""
        models: list[PolicyModel] = unwrap_model(self.chunks)
        return models

    def tp_sizes(self) -> dict[str, int]:
        """Return the number of tensor-parallel parts of each parameter of the full model."""
        return {name: tp_size(param, self.parallel.layout) for name, param in self.params.items()}

    def local_shards(self) -> dict[str, int]:
        """Return parameter name -> tensor-parallel part, for the parameters on this rank."""
        return {name: tensor_part(self.params[name], self.parallel.coords) for name in self.tensors}

    def weight_shards(self) -> dict[str, int]:
        """Return the same of `weights`, without adapters."""
        return {name: part for name, part in self.local_shards().items() if name in self.base_params}


def check_policy(
    hf: HfConfig, model: ModelConfig, layout: LayoutConfig, training: TrainingConfig, world_size: int
) -> None:
    """Check model and layout before process groups exist.

    Raises UserError: unsupported architecture, invalid layout, unknown Megatron field, missing or incomplete files,
    missing tensors.
    """
    check_layout(layout, model_shape(hf), world_size, sets_pipeline_layout(training.megatron_args))
    check_overrides(training.megatron_args)
    config = transformer_config(layout, training, model.dtype, hf)
    if hf.trains_mtp and COPIED_EMBEDDING not in family_of(hf).params(hf):
        raise hf.error(
            f"the family of {hf.model_type!r} does not map a multi-token-prediction layer: set "
            "model.mtp_loss_scaling_factor to 0"
        )
    if training.router_replay != "none":
        check_router_replay(config)
    if model.lora:
        check_targets(family_of(hf).params(hf).values(), model.lora.targets)
    with open_weights(model.path, family=model.family) as reader:
        check_tensors(reader, family_of(hf).params(hf).values())
        check_layers(reader.names, hf)
