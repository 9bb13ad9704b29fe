"""Base class of policy and critic: a Megatron model on one rank, with optimizer and learning-rate schedule."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor

from grpo_mp.config import TrainerSettings
from grpo_mp.distributed.coordinates import tensor_part, tp_size
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.mapping import Param
from grpo_mp.policy.forward import OutputLoss, forward_backward, forward_only
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.model import PolicyModel, build_chunks
from grpo_mp.policy.optimizer import build_optimizer, take_loss_scaler, wrap_for_training
from grpo_mp.policy.reference import Reference
from grpo_mp.policy.routing_replay import RoutingReplay
from grpo_mp.policy.weights import local_tensors
from grpo_mp.utils.types import MicroBatch

LOSS_SCALE = "train/loss_scale"


@dataclass(frozen=True)
class UpdateReport:
    """Result of one optimizer update."""

    losses: list[Any]  # report of the loss function for each micro-batch; empty on all but the last pipeline stage
    grad_norm: float
    lr: float
    skipped: bool  # the gradient was not finite, or larger than optimizer.skip_grad_norm
    bad_gradients: Sequence[str] = ()  # parameters of this rank whose gradient was not finite
    lowers_scale: bool = False  # the gradient overflowed, and the next update has a lower loss scale
    measured: Mapping[str, float] = field(default_factory=dict)  # metrics over all ranks


LoadWeights = Callable[[dict[str, Tensor]], None]  # fills this rank's tensors, given by full-model name


class TrainedModel:
    """Megatron model and optimizer on this rank."""

    reference: Reference | None = None  # a second set of weights for the same model
    adapters = ""  # description of the adapters
    replay: RoutingReplay | None = None

    def __init__(
        self,
        settings: TrainerSettings,
        parallel: Parallel,
        hf: HfConfig,
        params: dict[str, Param],
        load: LoadWeights,
        model_class: type[PolicyModel] = PolicyModel,
    ) -> None:
        """Build the model, fill this rank's weights with `load`, and build the optimizer.

        `params`: parameters of the full model, adapters included.
        """
        self.parallel = parallel
        self.hf = hf
        self.params = params
        dtype = settings.model.dtype
        megatron_args = settings.training.megatron_args
        self.config = transformer_config(settings.layout, settings.training, dtype, hf)
        models = build_chunks(
            self.config,
            hf,
            training=settings.training,
            temperature=settings.temperature,
            fp32_head=settings.model.fp32_head,
            model_class=model_class,
        )
        self._add_adapters(models)
        self.chunks = wrap_for_training(settings.layout, megatron_args, self.config, models)
        self.tensors = local_tensors(models, params, parallel.coords, settings.layout.expert)
        load(self.tensors)
        self._mark_tensor_parallel()
        self.optimizer, self.lr_scheduler = build_optimizer(
            settings.optimizer,
            dtype,
            megatron_args=megatron_args,
            total_updates=settings.total_updates,
            chunks=self.chunks,
        )
        self.loss_scaler = take_loss_scaler(self.optimizer)
        if scaler := self.loss_scaler:
            self.config.grad_scale_func = lambda loss: loss * scaler.scale
        self.padding_multiple = settings.training.padding_multiple(settings.layout)
        self._skip_grad_norm = settings.optimizer.skip_grad_norm or math.inf

    def _add_adapters(self, models: list[PolicyModel]) -> None:
        """Add low-rank adapters to the models; called before Megatron wraps them for training."""

    def _mark_tensor_parallel(self) -> None:
        # In the gradient norm, Megatron counts a tensor without this mark on the first tensor-parallel rank only.
        for name, tensor in self.tensors.items():
            tensor.tensor_model_parallel = self.params[name].tp_dim is not None  # type: ignore[attr-defined]

    @property
    def trained_tensors(self) -> dict[str, Tensor]:
        """Return this rank's tensors that checkpoints store, by full-model name."""
        return self.tensors

    def _outputs(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        return forward_only(self.chunks, microbatches, self.replay)

    def _gradients(self, microbatches: Sequence[MicroBatch], loss: OutputLoss) -> list[Any]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = forward_backward(self.chunks, microbatches, loss, self.replay)
        if self.loss_scaler:
            for chunk in self.chunks:
                chunk.scale_gradients(self.loss_scaler.inv_scale)
        return reports

    def _step(self, losses: list[Any]) -> UpdateReport:
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())  # global, so either all ranks skip the update or none
        skipped = not (math.isfinite(grad_norm) and grad_norm <= self._skip_grad_norm)
        if not skipped:
            self.optimizer.step()
        self.lr_scheduler.step(1)
        bad_gradients = self._bad_gradients() if skipped else ()
        report = UpdateReport(losses, grad_norm, lr=lr, skipped=skipped, bad_gradients=bad_gradients)
        if not self.loss_scaler:
            return report
        scale = float(self.loss_scaler.scale)
        self.loss_scaler.update(not math.isfinite(grad_norm))
        is_lower = float(self.loss_scaler.scale) < scale
        return replace(report, lowers_scale=is_lower, measured={LOSS_SCALE: scale})

    def _bad_gradients(self) -> list[str]:
        gradients = {name: tensor.main_grad for name, tensor in self.tensors.items() if hasattr(tensor, "main_grad")}
        return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]

    def models(self) -> list[PolicyModel]:
        """Return the model chunks without Megatron's wrappers."""
        models: list[PolicyModel] = unwrap_model(self.chunks)
        return models

    def tp_sizes(self) -> dict[str, int]:
        """Return parameter name -> number of its tensor-parallel parts, for the full model."""
        return {name: tp_size(param, self.parallel.layout) for name, param in self.params.items()}

    def local_shards(self) -> dict[str, int]:
        """Return parameter name -> index of this rank's tensor-parallel part, for the parameters on this rank."""
        return {name: tensor_part(self.params[name], self.parallel.coords) for name in self.tensors}
