"""Sparse attention of DeepSeek-V3.2 and GLM-5: frozen indexers, and models that Megatron cannot compute."""

from importlib.metadata import version
from itertools import product

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
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


def check_megatron(hf: HfConfig) -> None:
    """Refuse a megatron-core that computes no packed sequences in sparse attention."""
    if not hasattr(TransformerConfig, "dsa_kernel_backend"):
        raise UserError(
            f"{hf.model_type} needs megatron-core 0.19 or newer for its sparse attention, and "
            f"{version('megatron-core')} is installed: install with Python 3.12 (launch/install.sh --gpu-versions)"
        )


def check_index_share(config: TransformerConfig) -> None:
    """Refuse a pipeline stage in which a layer would take keys that a layer of another stage chose (IndexShare)."""
    virtual = config.virtual_pipeline_model_parallel_size
    for rank, stage in product(range(config.pipeline_model_parallel_size), range(virtual or 1)):
        try:
            get_transformer_block_with_experimental_attention_variant_spec(
                config, vp_stage=stage if virtual else None, pp_rank=rank
            )
        except RuntimeError as error:
            first = config.dsa_indexer_skip_topk_offset - 1
            starts = [*range(first), *range(first, config.num_layers, config.dsa_indexer_topk_freq)]
            raise UserError(
                f"layout.pipeline={config.pipeline_model_parallel_size}: a stage starts with a layer without an "
                "indexer, which takes the keys that a layer before it chose: give the stages layers with "
                f"training.megatron_args.pipeline_model_parallel_layout so that each starts with one of {starts}"
            ) from error
