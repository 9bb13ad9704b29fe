"""PPO's critic on one rank: a model of any family and size with a value head."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_mp.algorithms.values import ValueLoss
from grpo_mp.checkpoint.hf_reader import HfReader, check_model
from grpo_mp.config import Settings
from grpo_mp.config.sections import LayoutConfig, ModelConfig
from grpo_mp.distributed.layout import check_layout, critic_layout, model_shape, sets_pipeline_layout
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.value_head import (
    CLASSIFIER,
    OTHER_HEADS,
    STORED_HEAD,
    VALUE_HEAD,
    check_head,
    classifier_name,
    critic_config,
    critic_params,
)
from grpo_mp.policy.megatron_config import transformer_config
from grpo_mp.policy.model import ValueModel
from grpo_mp.policy.trained_model import TrainedModel, UpdateReport
from grpo_mp.policy.weights import clear_weights, load_hf
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch


class Critic(TrainedModel):
    """Value model and its optimizer on this rank. Its MoE routers never replay the policy's experts."""

    def __init__(self, settings: Settings, parallel: Parallel, load_weights: bool = True) -> None:
        """Build the model and load this rank's shards from critic.path, or from model.path if that is not set.

        The value head is zero if the folder has none, such as that of a language model. `load_weights=False` sets all
        weights to zero, for a checkpoint to be loaded later.
        """
        settings = settings.for_critic()
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

        The value at a position is that of the state after its token, before the next token is sampled.
        """
        return self._outputs(_without_replay(microbatches))

    def compute_gradients(self, microbatches: Sequence[MicroBatch], loss: ValueLoss) -> list[Any]:
        return self._gradients(_without_replay(microbatches), loss)

    def update(self, microbatches: Sequence[MicroBatch], loss: ValueLoss) -> UpdateReport:
        return self._step(self.compute_gradients(microbatches, loss))


def _without_replay(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, routed_experts=None, mtp_targets=None) for batch in microbatches]


def check_critic(settings: Settings, policy: HfConfig, world_size: int) -> None:
    """Check the critic's folder and layout before process groups exist; do nothing without a critic.

    `policy`: the policy's config; `world_size`: number of training ranks.
    """
    if settings.critic is None:
        return
    own = settings.for_critic()
    stored = own.model.read_config()
    hf = critic_config(stored)
    _check_size(settings, hf, policy)
    shape, uneven = model_shape(hf), sets_pipeline_layout(own.training.megatron_args)
    layout = critic_layout(own.layout, shape)
    check_layout(layout, shape, world_size=world_size, uneven_pipeline=uneven, setting="critic: layout")
    _check_megatron(settings, hf, layout)
    if settings.critic.path:
        _check_tensors(own.model, stored, f"critic.path={settings.critic.path}")


def _check_size(settings: Settings, hf: HfConfig, policy: HfConfig) -> None:
    """Check that the critic has the policy's vocabulary and enough positions for its sequences."""
    where, vocabulary = f"critic.path={settings.for_critic().model.path}", hf.int("vocab_size")
    if vocabulary != policy.int("vocab_size"):
        raise UserError(
            f"{where}: its vocab_size is {vocabulary}, the policy's {policy.int('vocab_size')}: take a critic of the "
            "policy's vocabulary, or leave critic.path out"
        )
    positions = hf.int("max_position_embeddings")
    if positions < settings.rollout.max_sequence_tokens:
        raise UserError(
            f"{where}: it has {positions} positions, and a prompt with its response up to "
            f"{settings.rollout.max_sequence_tokens}: lower rollout.max_response_tokens"
        )


def _check_megatron(settings: Settings, hf: HfConfig, layout: LayoutConfig) -> None:
    """Check that Megatron accepts the critic's model and layout."""
    own = settings.for_critic()
    try:
        transformer_config(layout, own.training, own.model.dtype, hf)
    except UserError as error:
        raise UserError(f"critic: {error}") from error


def _check_tensors(model: ModelConfig, stored: HfConfig, where: str) -> None:
    """Check that a critic's folder has all tensors, and a value head if it is a reward model.

    `stored`: the folder's config; `where`: the setting and folder, for error messages.
    """
    hf, classifier = critic_config(stored), classifier_name(stored)
    params = critic_params(hf)
    with HfReader(model.path) as reader:
        has_head, (shape,) = STORED_HEAD in reader.names, params[VALUE_HEAD].shapes
        if classifier or has_head:
            remedy = "point critic.path at a whole reward model, or at a language model's folder for a head of zeros"
            check_head(
                reader.names,
                reader.shape,
                head={STORED_HEAD: shape},
                where=where,
                architecture=classifier,
                remedy=remedy,
            )
        # Without this check the critic would silently replace a trained head by zeros or by a part of it.
        if unread := sorted(name for name in reader.names if name.startswith(OTHER_HEADS) and name != STORED_HEAD):
            raise UserError(
                f"{where}: its weights hold {unread[0]} of a head, and a critic reads {STORED_HEAD} alone: take a "
                f"...{CLASSIFIER} with one label, or a language model's folder without a head for one of zeros"
            )
        expected = [param for name, param in params.items() if name != VALUE_HEAD or has_head]
        check_model(reader, expected, hf, others=["lm_head.weight"])
