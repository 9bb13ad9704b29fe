"""Sparse attention of DeepSeek-V3.2 and GLM-5: frozen indexers, and models that Megatron cannot compute."""

from importlib.metadata import version

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.sparse_attention import INDEXER
from grpo_mp.utils.errors import UserError


def freeze_indexers(model: nn.Module) -> None:
    """Freeze all indexers: no gradient of the policy's loss passes through the choice of keys."""
    for name, parameter in model.named_parameters():
        if INDEXER in name:
            parameter.requires_grad_(False)


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
