"""Sparse attention of DeepSeek-V3.2 and GLM-5: frozen indexers, replayed keys, and models without support."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from grpo_mp import platform
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import INDEXER
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import MicroBatch, copy_to

SHARED_KEYS = "_dsa_index_share_topk_holder"  # attribute in which Megatron stores the keys that layers share


def freeze_indexers(model: nn.Module) -> None:
    """Freeze all indexers: no gradient of the policy's loss passes through the choice of keys."""
    for name, parameter in model.named_parameters():
        if INDEXER in name:
            parameter.requires_grad_(False)


class ReplayedKeys(dict[int, Tensor]):
    """Megatron's mapping of a forward pass from layer numbers, from 1, to chosen keys, int32 [1, rows, top-k].

    In a layer with recorded keys, the choices of some rows are overwritten when an attention stores them here, before
    it computes with them. A forward pass that is recomputed finds the same mapping.
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
    """Have all indexers of decoder layers store their keys; return the numbers of their layers, from 0, ascending.

    The layer that predicts ahead has the number of a decoder layer, and stores none.
    """
    layers = []
    for name, attention in (item for chunk in chunks for item in chunk.named_modules()):
        if getattr(attention, "indexer", None) is not None:
            attention.index_share = "mtp." not in name
            layers += [attention.layer_number - 1] * attention.index_share
    return tuple(sorted(layers))


def replay_keys(packed: PackedSeqParams, batch: MicroBatch, layers: Iterable[int]) -> None:
    """Replay the micro-batch's keys in the forward pass with `packed`. `layers`: see `store_keys`."""
    replayed = batch.routed_experts and batch.routed_experts.keys
    if not replayed:
        return
    device = platform.device()
    rows = replayed.rows
    lengths = torch.tensor(batch.lengths)
    starts = (lengths.cumsum(0) - lengths)[batch.sequence_index.cpu()[rows]]  # a sequence's first packed key
    keys = replayed.ids + starts[:, None, None]
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
