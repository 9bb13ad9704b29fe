"""PPO's critic on one rank: a model as the policy's with a value head, in the policy's layout."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_mp.algorithms.values import ValueLoss
from grpo_mp.checkpoint.converted_reader import open_weights
from grpo_mp.checkpoint.hf_reader import check_layers, check_tensors
from grpo_mp.checkpoint.manifest import Checksums
from grpo_mp.config import Settings
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.errors import UserError
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.value_head import STORED_HEAD, VALUE_HEAD, critic_config, critic_params
from grpo_mp.policy.forward import forward_only
from grpo_mp.policy.model import ValueModel
from grpo_mp.policy.trained_model import TrainedModel, UpdateReport
from grpo_mp.policy.weights import clear_weights, load_hf
from grpo_mp.reading import shorten
from grpo_mp.types import MicroBatch


class Critic(TrainedModel):
    """Value model and its optimizer of this rank. Its routers choose for themselves, whatever the policy's replay."""

    def __init__(self, settings: Settings, parallel: Parallel, load_weights: bool = True) -> None:
        """Build the model and load this rank's shards of the folder that `critic` names, else of the policy's.

        A value head that the folder lacks begins at zero. Without `load_weights` all is zero: a checkpoint will bring
        it. Raises UserError where a file differs from its checksum, ValueError without section critic.
        """
        settings = settings.for_critic()
        hf = critic_config(settings.model.read_config())
        params = critic_params(hf)

        def load(tensors: dict[str, Tensor]) -> None:
            clear_weights(tensors, params)
            if not load_weights:
                return
            Checksums.of_conversion(settings.model.path).check_share(parallel.rank, parallel.world_size)
            with open_weights(settings.model.path, family=settings.model.family) as reader:
                has_head = STORED_HEAD in reader.names
                stored = {name: tensor for name, tensor in tensors.items() if name != VALUE_HEAD or has_head}
                load_hf(stored, params, reader, parallel.coords, parallel.layout)

        super().__init__(settings, parallel, hf, params, load, ValueModel)

    def values(self, microbatches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return values [T] of every micro-batch; an empty list on all but the last stage.

        At each position that of the sequence up to its token: the state in which the next one is drawn.
        """
        return forward_only(self.chunks, _without_replay(microbatches))

    def compute_gradients(self, microbatches: Sequence[MicroBatch], loss: ValueLoss) -> list[Any]:
        """Compute the gradient of the summed loss over all ranks into the gradient buffers."""
        return self._gradients(_without_replay(microbatches), loss)

    def update(self, microbatches: Sequence[MicroBatch], loss: ValueLoss) -> UpdateReport:
        """Do one optimizer update; skip it, and report so, where the gradient is not finite or too large."""
        return self._step(self.compute_gradients(microbatches, loss))


def _without_replay(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [replace(batch, routed_experts=None, mtp_targets=None) for batch in microbatches]


def check_critic(settings: Settings, policy: HfConfig) -> None:
    """Check the folder of the critic before process groups exist; nothing where it is the policy's, or there is none.

    Raises UserError: another family, vocabulary or size than the policy's, missing or wrong tensors.
    """
    if settings.critic is None or settings.critic.path is None:
        return
    where, model = f"critic.path={settings.critic.path}", settings.for_critic().model
    hf, policy = critic_config(model.read_config()), critic_config(policy)
    for key in ("model_type", "vocab_size"):
        if hf.get(key) != policy.get(key):
            raise UserError(
                f"{where}: its {key} is {hf.get(key)}, the policy's {policy.get(key)}: take a critic of the policy's "
                "family and vocabulary, or leave critic.path out"
            )
    positions = hf.int("max_position_embeddings")
    if positions < settings.rollout.max_sequence_tokens:
        raise UserError(
            f"{where}: it has {positions} positions, and a prompt with its response up to "
            f"{settings.rollout.max_sequence_tokens}: lower rollout.max_response_tokens"
        )
    own, expected = ({"num_layers": shape.num_layers, **vars(shape)} for shape in map(model_shape, (hf, policy)))
    if different := next((name for name in expected if own[name] != expected[name]), None):
        raise UserError(
            f"{where}: its {different} is {shorten(repr(own[different]))}, the policy's "
            f"{shorten(repr(expected[different]))}: take a critic of the policy's size, or leave critic.path out"
        )
    params = critic_params(hf)
    with open_weights(model.path, family=model.family) as reader:
        has_head = STORED_HEAD in reader.names
        if has_head and reader.shape(STORED_HEAD)[:1] != (1,):
            raise UserError(
                f"{where}: its {STORED_HEAD} has shape {list(reader.shape(STORED_HEAD))}, and a critic has one value: "
                "take a model with one label, or leave critic.path out"
            )
        check_tensors(reader, [param for name, param in params.items() if name != VALUE_HEAD or has_head])
        check_layers(reader.names, hf)
