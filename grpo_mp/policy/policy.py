"""The policy on one rank, in any layout: logprobs, optimizer updates and weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader, check_model
from grpo_mp.config import TrainerSettings
from grpo_mp.config.sections import LayoutConfig, ModelConfig, TrainingConfig
from grpo_mp.distributed.layout import check_layout, model_shape, sets_pipeline_layout
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.distributed.stages import check_index_share
from grpo_mp.models.families import family_of
from grpo_mp.models.fp8_products import check_fp8_products
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.lora import adapter_params, check_adapters
from grpo_mp.models.multi_token_prediction import COPIED_EMBEDDING, is_of_mtp
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.policy.forward import LossFunction
from grpo_mp.policy.gated_delta_net import check_gated_delta_nets
from grpo_mp.policy.lora import MergedWeights, add_adapters, initialize
from grpo_mp.policy.megatron_config import check_fp8, check_overrides, transformer_config
from grpo_mp.policy.model import PolicyModel
from grpo_mp.policy.multi_token_prediction import MtpLoss
from grpo_mp.policy.reference import Reference
from grpo_mp.policy.routing_replay import ExpertLoad, RoutingReplay, check_router_replay
from grpo_mp.policy.sparse_attention import IndexerLoss
from grpo_mp.policy.trained_model import TrainedModel, UpdateReport
from grpo_mp.policy.vocab_parallel import within_kept
from grpo_mp.policy.weights import clear_weights, load_hf
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch


class Policy(TrainedModel):
    """Megatron model, optimizer and reference model on this rank."""

    def __init__(
        self, settings: TrainerSettings, parallel: Parallel, with_reference: bool, load_weights: bool = True
    ) -> None:
        """Build the model and the optimizer and load this rank's weights.

        `load_weights=False` sets all but frozen weights to zero, for a checkpoint to be loaded later.
        """
        hf = settings.model.read_config()
        self.lora = settings.model.lora
        self._seed = settings.run.seed
        self.base_params = family_of(hf).params(hf)
        adapters = adapter_params(self.base_params, self.lora.rank, self.lora.targets) if self.lora else {}

        def load(tensors: dict[str, Tensor]) -> None:
            base = {name: tensor for name, tensor in tensors.items() if name in self.base_params}
            if load_weights or self.lora:  # checkpoints of a run with adapters lack the base weights
                with HfReader(settings.model.path) as reader:
                    load_hf(base, self.base_params, reader=reader, coords=parallel.coords, layout=parallel.layout)
            else:
                clear_weights(base, self.base_params)

        super().__init__(settings, parallel, hf, self.base_params | adapters, load)
        if self.lora:
            self.adapters = self.lora.description
        self.expert_load = ExpertLoad(self.models(), self.config.num_layers, self.config.num_moe_experts or 0)
        self.mtp_loss = MtpLoss(settings.model.mtp_loss_scaling_factor) if settings.model.trains_mtp else None
        if settings.training.router_replay != "none":
            self.replay = RoutingReplay(
                self.chunks, self.config.num_moe_experts or 0, with_keys=settings.training.replays_keys
            )
        indexer = model_shape(hf).indexer
        self.indexer_loss = None
        if indexer and getattr(self.config, INDEXER_LOSS):
            self.indexer_loss = IndexerLoss(self.config, parallel, len(indexer.layers) + settings.model.trains_mtp)
        # The reference computes no logprobs with the multi-token-prediction layer, so it has no copy of that layer.
        trained = self.trained_tensors.items()
        decoder = {name: tensor for name, tensor in trained if not is_of_mtp(self.params[name], hf)}
        self.reference = Reference(decoder) if with_reference else None

    def _add_adapters(self, models: list[PolicyModel]) -> None:
        if self.lora:
            add_adapters(
                models, self.base_params, coords=self.parallel.coords, layout=self.parallel.layout, lora=self.lora
            )

    def _mark_tensor_parallel(self) -> None:
        super()._mark_tensor_parallel()
        adapters = {name: param for name, param in self.params.items() if name not in self.base_params}
        initialize(self.tensors, adapters, coords=self.parallel.coords, layout=self.parallel.layout, seed=self._seed)

    @property
    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's tensors that checkpoints store: with LoRA the adapters, else all of them."""
        return {name: one for name, one in self.tensors.items() if not self.lora or name not in self.base_params}

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's weights by full-model name, with adapters merged."""
        if not self.lora:
            return self.tensors
        return MergedWeights(self.tensors, self.base_params, self.parallel.layout, self.lora)

    def logprobs(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return logprobs and entropies, [2, T], of each micro-batch; an empty list on all but the last stage.

        Inside `use_head(with_squares=True)` a last row has the sums of squared probabilities.
        """
        outputs = zip(self._outputs(microbatches), microbatches, strict=False)
        with_squares = self.models()[0].head.with_squares
        return [
            output if batch.kept_ids is None else within_kept(output, batch.kept_ids, with_squares)[0]
            for output, batch in outputs
        ]

    def record_routing(self, microbatches: Sequence[MicroBatch]) -> tuple[list[torch.Tensor], list[MicroBatch]]:
        """Return the result of `logprobs`, and the micro-batches with the experts that this rank's routers chose."""
        if self.replay is None:
            raise ValueError("this policy was built without routing replay")
        self.replay.record()
        outputs = self.logprobs(microbatches)
        if recorded := self.replay.take_recorded():  # empty on a pipeline stage without MoE layers
            pairs = zip(microbatches, recorded, strict=True)
            return outputs, [replace(batch, routed_experts=routed) for batch, routed in pairs]
        return outputs, list(microbatches)

    @contextmanager
    def use_reference_weights(self) -> Iterator[None]:
        """Inside the context, compute with the reference model's weights."""
        if self.reference is None:
            raise ValueError("this policy was built without a reference")
        with self.reference.swapped():
            yield

    @contextmanager
    def use_head(self, **changes: Any) -> Iterator[None]:
        """Inside the context, compute logprobs with other settings of the head, such as `temperature`."""
        heads = [model.head for model in self.models()]
        for model in self.models():
            model.head = replace(model.head, **changes)
        try:
            yield
        finally:
            for model, head in zip(self.models(), heads, strict=True):
                model.head = head

    def compute_gradients(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> list[Any]:
        """Write the gradient of the loss to the gradient buffers; return its reports on the last pipeline stage."""
        if self.indexer_loss:
            self.indexer_loss.begin_update(microbatches)

        def of_output(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Any]:
            if batch.teacher_topk_ids is not None:
                batch = replace(batch, topk_logprobs=output[2 : 3 + batch.teacher_topk_ids.shape[1]])
            logprobs, entropy = output[:2]
            if batch.kept_ids is not None:
                (logprobs, entropy), log_mass = within_kept(output, batch.kept_ids)
                batch = replace(batch, kept_log_mass=log_mass)
            value, report = loss(logprobs, entropy, batch)
            if self.mtp_loss:
                value = value + self.mtp_loss(output[-1], batch).to(value.dtype)
            return value, report

        return self._gradients(microbatches, of_output)

    def update(self, microbatches: Sequence[MicroBatch], loss: LossFunction) -> UpdateReport:
        """Compute gradients and take one optimizer step, unless the gradient norm is not finite or too large."""
        return self._step(self.compute_gradients(microbatches, loss))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Return the layer numbers of this rank's routers that replay experts; () without routing replay."""
        return self.replay.layers if self.replay else ()

    @property
    def key_layers(self) -> tuple[int, ...]:
        """Return the layer numbers of this rank's indexers whose keys are replayed."""
        return self.replay.key_layers if self.replay else ()

    def weight_shards(self) -> dict[str, int]:
        """Return weight name -> tensor-parallel part, for the names in `weights`."""
        return {name: part for name, part in self.local_shards().items() if name in self.base_params}


def check_policy(
    hf: HfConfig, model: ModelConfig, layout: LayoutConfig, training: TrainingConfig, world_size: int
) -> None:
    """Check the model's folder, the layout and the training settings before process groups exist."""
    shape = model_shape(hf)
    check_layout(layout, shape, world_size, sets_pipeline_layout(training.megatron_args))
    check_index_share(shape, layout, training.megatron_args)
    check_gated_delta_nets(shape, layout.context)
    check_fp8(training, model.dtype)
    if training.fp8_format:
        check_fp8_products(family_of(hf).rules(hf), layout.tensor, layout.expert_tensor)
    check_overrides(training.megatron_args)
    config = transformer_config(layout, training, model.dtype, hf)
    if hf.trains_mtp and COPIED_EMBEDDING not in family_of(hf).params(hf):
        raise hf.error(
            f"the family of {hf.model_type!r} does not map a multi-token-prediction layer: set "
            "model.mtp_loss_scaling_factor to 0"
        )
    if training.router_replay != "none":
        check_router_replay(config)
    if training.megatron_args.get(INDEXER_LOSS) and (model.lora or not shape.indexer):
        raise UserError(
            f"training.megatron_args.{INDEXER_LOSS} trains the indexers of sparse attention, which "
            f"{'adapters leave as they are' if model.lora else f'{hf.model_type} has not'}: leave it out"
        )
    if model.lora:
        sizes = (layout.tensor, layout.expert, layout.expert_tensor)
        check_adapters(family_of(hf).params(hf), model.lora.targets, *sizes)
    with HfReader(model.path) as reader:
        check_model(reader, family_of(hf).params(hf).values(), hf)
