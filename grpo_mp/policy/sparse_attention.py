"""Sparse attention of DeepSeek-V3.2 and GLM-5: frozen or trained indexers, replayed keys, models without support."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from grpo_mp import platform
from grpo_mp.distributed.process_groups import Parallel
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import INDEXER_LOSS
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch, copy_to

SHARED_KEYS = "_dsa_index_share_topk_holder"  # attribute in which Megatron stores the keys that layers share


def prepare_indexers(model: nn.Module, config: TransformerConfig) -> None:
    """Freeze all indexers, unless `config` trains them: the policy's loss has no gradient for the choice of keys.

    Megatron stores keys by layer number. The multi-token-prediction layer has the number of a decoder layer, so it must
    not store keys.
    """
    for name, module in model.named_modules():
        if getattr(module, "indexer", None) is not None:
            module.indexer.requires_grad_(getattr(config, INDEXER_LOSS) > 0)
            module.index_share &= "mtp." not in name


class IndexerLoss:
    """Loss of the indexers: KL(attention || indexer) over keys (DeepSeek-V3.2, arXiv 2512.02556, equation 4).

    Attention is the mean over heads. The loss is averaged over the tokens that the policy's loss trains, summed over
    indexers, and multiplied by Megatron's `dsa_indexer_loss_coeff`. Only indexers receive its gradient.
    """

    def __init__(self, config: TransformerConfig, parallel: Parallel, indexers: int) -> None:
        """`config`: its coefficient is replaced at each update; `indexers`: of the full model."""
        from megatron.core.transformer.experimental_attention_variant import dsa

        self._config: Any = config
        self._parallel = parallel
        self._indexers = indexers
        self._coefficient: float = self._config.dsa_indexer_loss_coeff
        # Megatron adds the losses of each layer to this tensor, which it would allocate on a GPU.
        self._sums = torch.zeros(config.num_layers, device=platform.device())
        dsa.DSAIndexerLossLoggingHelper.tracker["values"] = self._sums

    def begin_update(self, microbatches: Sequence[MicroBatch]) -> None:
        """Divide the coefficient by the number of tokens of an update, because Megatron sums the loss over tokens."""
        tokens = torch.tensor(sum(int(batch.in_loss.sum()) for batch in microbatches))
        tokens *= self._parallel.is_reporting_rank
        dist.all_reduce(tokens, group=self._parallel.cpu_group)
        self._config.dsa_indexer_loss_coeff = self._coefficient / max(1, int(tokens))

    def take_metrics(self) -> dict[str, float]:
        """Return the last update's loss per token and indexer, without the coefficient, and reset the sums."""
        total = self._sums.sum().double().cpu() * (self._parallel.coords.tensor == 0)  # tensor ranks have the same
        self._sums.zero_()
        dist.all_reduce(total, group=self._parallel.cpu_group)
        return {"train/indexer_loss": float(total) / self._coefficient / self._indexers}


class ReplayedKeys(dict[int, Tensor]):
    """Megatron's mapping of a forward pass from layer numbers, from 1, to chosen keys, int32 [1, rows, top-k].

    DSAttention stores its choice here before it computes attention. In layers with recorded keys, the stored tensor is
    changed in place: recorded keys replace the choice in some rows. A recomputed forward pass uses the same mapping.
    """

    def __init__(self, rows: Tensor, keys: Mapping[int, Tensor]) -> None:
        """`keys`: by layer, rows of packed keys to attend to, [len(rows), top-k]."""
        super().__init__()
        self._rows = rows
        self._keys = keys

    def __setitem__(self, layer: int, chosen: Tensor) -> None:
        if layer in self._keys:
            chosen[0].index_copy_(0, self._rows, self._keys[layer].to(chosen.dtype))
        super().__setitem__(layer, chosen)


def store_keys(chunks: Iterable[nn.Module]) -> tuple[int, ...]:
    """Have the indexers of decoder layers store their keys; return the numbers of their layers, from 0, ascending."""
    layers = []
    for name, attention in (item for chunk in chunks for item in chunk.named_modules()):
        if getattr(attention, "indexer", None) is not None and "mtp." not in name:
            attention.index_share = True
            layers.append(attention.layer_number - 1)
    return tuple(sorted(layers))


def prepare_forward(
    packed: PackedSeqParams, batch: MicroBatch, config: TransformerConfig, layers: Sequence[int]
) -> None:
    """Set the rows of the indexers' loss and the keys to replay in `packed`, for one forward pass.

    `layers`: see `store_keys`.
    """
    device = platform.device()
    if getattr(config, INDEXER_LOSS, 0):
        packed.real_token_mask_q = copy_to(batch.in_loss, device)
    if replayed := batch.routed_experts and batch.routed_experts.keys:
        rows = replayed.rows
        lengths = torch.tensor(batch.lengths)
        starts = (lengths.cumsum(0) - lengths)[batch.sequence_index.cpu()[rows]]  # a sequence's first packed key
        keys = (replayed.ids + starts[:, None, None]).int()
        by_layer = {layer + 1: copy_to(keys[:, column], device) for column, layer in enumerate(layers)}
        setattr(packed, SHARED_KEYS, ReplayedKeys(copy_to(rows, device), by_layer))


def supports_sparse_attention() -> bool:
    """Return whether the installed megatron-core computes packed sequences in sparse attention."""
    return hasattr(TransformerConfig, "dsa_kernel_backend")


def check_megatron(hf: HfConfig) -> None:
    """Refuse a megatron-core that computes no packed sequences in sparse attention."""
    if not supports_sparse_attention():
        raise UserError(
            f"{hf.model_type} needs megatron-core 0.19 or newer for its sparse attention, and "
            f"{version('megatron-core')} is installed: install with Python 3.12 (launch/install.sh --gpu-versions)"
        )
