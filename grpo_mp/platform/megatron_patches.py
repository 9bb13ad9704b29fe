"""Patches of Megatron's modules on a CPU. Each is applied right after its module is imported (AFTER_IMPORT).

The functions import Megatron lazily, because this module is loaded before Megatron.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from grpo_mp.platform.import_hook import Patch


def _disable_jit(jit: Any) -> None:
    # On a CPU, torch.compile would run a C++ compiler for minutes, for functions of a few operations.
    jit.disable_jit_fuser()


def _te_modules(te: Any) -> None:
    # Without TransformerEngine these names are mocks, with which isinstance() and latent attention fail.
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from grpo_mp.platform import te_layers
    from grpo_mp.platform.attention import Attention

    te.TENorm = te_layers.Norm
    te.TELinear = te_layers.DuplicatedLinear
    te.TEDotProductAttention = Attention
    te.TEColumnParallelLinear = ColumnParallelLinear
    te.TERowParallelLinear = RowParallelLinear
    te.TELayerNormColumnParallelLinear = te_layers.LayerNormColumnParallelLinear
    te.TEColumnParallelGroupedLinear = te_layers.ColumnParallelGroupedLinear
    te.TERowParallelGroupedLinear = te_layers.RowParallelGroupedLinear


def _spec_provider(provider: Any) -> None:
    # Megatron's provider compares TransformerEngine's version, which is None here.
    class CpuSpecProvider(provider.TESpecProvider):
        def layer_norm(self, *_: bool, **__: bool) -> type:
            return provider.TENorm

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy: bool) -> Any:
            if not moe_use_grouped_gemm or any(legacy):
                raise NotImplementedError("experts on a CPU need moe_grouped_gemm and no moe_use_legacy_grouped_gemm")
            return super().grouped_mlp_modules(True, *legacy)

    provider.TESpecProvider = CpuSpecProvider


def _te_names(module: Any) -> None:
    # Megatron's modules import these names only if TransformerEngine is installed. `LayerNormImpl` is the final norm of
    # a block whose spec has none; the torch norm that Megatron would use refuses sequence parallelism.
    from megatron.core.extensions import transformer_engine as te

    module.TENorm = module.LayerNormImpl = te.TENorm
    module.TELinear = te.TELinear
    module.TEColumnParallelLinear = te.TEColumnParallelLinear


def _layer_specs(specs: Any) -> None:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    _te_names(specs)
    specs.TESpecProvider = TESpecProvider


def _router_matmul(moe_utils: Any) -> None:
    # Megatron reads this name if moe_router_dtype is set, but defines it only with TransformerEngine.
    moe_utils.te_general_gemm = None


class FusedAdam(torch.optim.Optimizer):
    """Adam on a CPU with one step count per param group, as in TransformerEngine's FusedAdam and in our checkpoints."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        self.update = adamw if adam_w_mode else adam
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self.update(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )


def _fused_adam(optimizer: Any) -> None:
    # Megatron treats FusedAdam as apex's Adam, which also has one step count per param group.
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.HAVE_APEX_OR_TE = optimizer.USING_APEX_OPTIMIZER = True


def _uneven_gather(mappings: Any) -> None:
    # gloo's all_gather requires equal sizes, but with expert-tensor parallelism ranks have different numbers of routed
    # tokens. An all_to_all in which each rank sends the same tensor to all ranks allows different sizes.
    original = mappings._gather_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        ranks = group.size()
        if output_split_sizes is None or ranks == 1:
            gathered: Tensor = original(input_, group, output_split_sizes, use_global_buffer)
            return gathered
        output = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
        repeated = torch.cat([input_] * ranks)
        dist.all_to_all_single(output, repeated, list(output_split_sizes), [len(input_)] * ranks, group=group)
        return output

    mappings._gather_along_first_dim = gather


def _gated_delta_net(module: Any) -> None:
    # Megatron refuses to build the layer without flash-linear-attention, which needs a GPU.
    module.HAVE_FLA = True


def _gated_delta_rule(module: Any) -> None:
    # The layer checks at its construction that there is a kernel.
    module.chunk_gated_delta_rule = module.torch_chunk_gated_delta_rule


def _gated_delta_net_class(module: Any) -> None:
    from grpo_mp.platform import gated_delta_net

    module.HAVE_FLA = True
    module.GatedDeltaNet.forward = gated_delta_net.forward


AFTER_IMPORT: Mapping[str, Patch] = {
    "megatron.core.jit": _disable_jit,
    "megatron.core.tensor_parallel.mappings": _uneven_gather,
    "megatron.core.extensions.transformer_engine": _te_modules,
    "megatron.core.extensions.transformer_engine_spec_provider": _spec_provider,
    "megatron.core.models.gpt.gpt_layer_specs": _layer_specs,
    "megatron.core.models.gpt.experimental_attention_variant_module_specs": _layer_specs,
    "megatron.core.ssm.gated_delta_net": _gated_delta_net_class,
    "megatron.core.ssm.gated_delta_net.common": _gated_delta_net,  # newer releases split the module
    "megatron.core.ssm.gated_delta_net.gdn": _gated_delta_rule,
    "megatron.core.transformer.transformer_block": _te_names,
    "megatron.core.transformer.multi_latent_attention": _te_names,
    "megatron.core.transformer.experimental_attention_variant.absorbed_mla": _te_names,
    "megatron.core.transformer.moe.moe_utils": _router_matmul,
    "megatron.core.optimizer": _fused_adam,
    "megatron.core.optimizer.distrib_optimizer": _fused_adam,
}
