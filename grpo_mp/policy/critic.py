"""PPO's critic on one rank: a model of any family and size with a value head."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_mp.checkpoint.hf_reader import HfReader, check_model
from grpo_mp.config import TrainerSettings
from grpo_mp.distributed.layout import check_layout, critic_layout, model_shape, sets_pipeline_layout
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.distributed.stages import check_index_share
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.value_head import STORED_HEAD, VALUE_HEAD, critic_config, critic_params, is_classifier
from grpo_mp.policy.forward import OutputLoss
from grpo_mp.policy.gated_delta_net import check_gated_delta_nets
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.model import ValueModel
from grpo_mp.policy.trained_model import TrainedModel, UpdateReport
from grpo_mp.policy.weights import clear_weights, load_hf
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch


class Critic(TrainedModel):
    """Value model and its optimizer on this rank. Its MoE routers never replay the policy's experts."""

    def __init__(self, settings: TrainerSettings, parallel: Parallel, load_weights: bool = True) -> None:
        """Build the model and load this rank's shards. `settings`: the critic's (`Settings.for_critic`).

        The value head is zero if the folder has none, such as that of a language model. `load_weights=False` sets all
        weights to zero, for a checkpoint to be loaded later.
        """
        hf = critic_config(settings.model.read_config())
        layout = critic_layout(settings.layout, model_shape(hf))
        settings = settings.model_copy(update={"layout": layout})
        params = critic_params(hf)

        def load(tensors: dict[str, Tensor]) -> None:
            clear_weights(tensors, params)
            if not load_weights:
                return
            with HfReader(settings.model.path) as reader:
                has_head = STORED_HEAD in reader.names
                stored = {name: tensor for name, tensor in tensors.items() if name != VALUE_HEAD or has_head}
                load_hf(stored, params, reader=reader, coords=parallel.coords, layout=parallel.layout)

        super().__init__(settings, parallel, hf, params, load, ValueModel)

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the values [T] of each micro-batch; an empty list on all but the last pipeline stage.

        The value at a position belongs to the state after its token, before the next token is sampled.
        """
        return self._outputs(_without_replay(microbatches))

    def compute_gradients(self, microbatches: Sequence[MicroBatch], loss: OutputLoss) -> list[Any]:
        return self._gradients(_without_replay(microbatches), loss)

    def update(self, microbatches: Sequence[MicroBatch], loss: OutputLoss) -> UpdateReport:
        return self._step(self.compute_gradients(microbatches, loss))


def _without_replay(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, routed_experts=None, mtp_targets=None) for batch in microbatches]


def check_critic(own: TrainerSettings, policy: HfConfig, world_size: int) -> None:
    """Check the critic's folder and layout before process groups exist.

    `own`: the critic's settings; `policy`: the policy's config; `world_size`: number of training ranks.
    """
    stored = own.model.read_config()
    hf = critic_config(stored)
    if hf.int("vocab_size") != policy.int("vocab_size"):
        raise UserError(
            f"critic.path={hf.path}: its vocab_size is {hf.int('vocab_size')}, the policy's "
            f"{policy.int('vocab_size')}: take a critic of the policy's vocabulary, or leave critic.path out"
        )
    shape = model_shape(hf)
    uneven = sets_pipeline_layout(own.training.megatron_args)
    layout = critic_layout(own.layout, shape)
    check_layout(layout, shape, world_size=world_size, uneven_pipeline=uneven, setting="critic: layout")
    check_index_share(shape, layout, own.training.megatron_args)
    check_gated_delta_nets(shape, layout.context)
    transformer_config(layout, own.training, own.model.dtype, hf)
    if hf.path == policy.path:
        return
    with HfReader(hf.path) as reader:
        expects_head = STORED_HEAD in reader.names or is_classifier(stored)
        expected = [param for name, param in critic_params(hf).items() if name != VALUE_HEAD or expects_head]
        check_model(reader, expected, hf, others=["lm_head.weight"])
