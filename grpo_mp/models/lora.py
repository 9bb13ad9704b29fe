"""Parameter mapping of LoRA adapters: matrices A and B for each Hugging Face module, as in peft.

A module that Megatron fuses of several (`linear_qkv`, `linear_fc1`) has one adapter per Hugging Face module, each for a
part of its output rows, so that gradients and updates equal peft's.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_mp.models.mapping import Param, Section
from grpo_mp.utils.errors import UserError, did_you_mean

# peft's names
A = "lora_A"
B = "lora_B"


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter of one Hugging Face module. `part`: index of the module within the fused Megatron parameter."""

    part: int
    a: Param
    b: Param


def adapters_of(param: Param, rank: int, targets: Sequence[str] | None) -> tuple[Adapter, ...]:
    """Return the adapters of a Megatron parameter.

    `targets`: module names or suffixes of them; None: all projections.
    """
    if not param.takes_adapters:
        return ()
    modules = enumerate(map(_module, param.hf))
    return tuple(
        _adapter(param, part, module, rank) for part, module in modules if targets is None or _is_in(module, targets)
    )


def adapter_params(params: Mapping[str, Param], rank: int, targets: Sequence[str] | None) -> dict[str, Param]:
    """Return the parameters of all adapters of a model by name."""
    adapters = (adapter for param in params.values() for adapter in adapters_of(param, rank, targets))
    return {param.name: param for adapter in adapters for param in (adapter.a, adapter.b)}


def expert_projections(params: Iterable[Param]) -> frozenset[str]:
    """Return the last name components, such as "up_proj", of routed experts' projections; empty for dense models."""
    return frozenset(_leaf(_module(name)) for param in params if param.experts for name in param.hf)


def check_adapters(
    params: Mapping[str, Param], targets: Sequence[str] | None, tensor: int, expert: int, expert_tensor: int
) -> None:
    """Raise UserError for targets that do not exist, or whose adapters Megatron's optimizer cannot train.

    It cannot train only adapters of experts if expert parallelism divides these differently from dense layers.
    """
    check_targets(params.values(), targets)
    is_divided = expert > 1 or expert_tensor != tensor
    if is_divided and all(param.experts for param in params.values() if adapters_of(param, 1, targets)):
        raise UserError(
            f"model.lora.target_modules: with layout.expert={expert}, expert_tensor={expert_tensor} and "
            f"tensor={tensor} Megatron's optimizer needs adapters outside of experts, too: add o_proj, for one"
        )


def check_targets(params: Collection[Param], targets: Sequence[str] | None) -> None:
    """Raise UserError for a target that names no projection of the model.

    Also refuse a choice of experts' projections that peft cannot load.
    """
    if targets is None:
        return
    modules = {_module(name) for param in params if param.takes_adapters for name in param.hf}
    for target in targets:
        if not any(_is_in(module, (target,)) for module in modules):
            leaves = sorted(set(map(_leaf, modules)))
            raise UserError(
                f"model.lora.target_modules: no projection of this model is {target!r}{did_you_mean(target, leaves)}; "
                f"it has {', '.join(leaves)}"
            )
    by_module = {_module(name): len(param.hf) > 1 for param in params if param.experts for name in param.hf}
    fused = {_leaf(module): is_fused for module, is_fused in by_module.items()}
    chosen = {_leaf(module) for module in by_module if _is_in(module, targets)}
    if any(fused[leaf] for leaf in chosen) and chosen != fused.keys():
        raise UserError(
            f"model.lora.target_modules: peft loads adapters of experts' {', '.join(sorted(chosen))} only beside "
            f"{', '.join(sorted(fused.keys() - chosen))}: add these, too"
        )


def _is_in(module: str, targets: Iterable[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _adapter(param: Param, part: int, module: str, rank: int) -> Adapter:
    rows, columns = param.shapes[part]
    linear, _, weight = param.name.rpartition(".")
    leaf = _leaf(module)
    own = tuple(
        Section(0, start, stop) for tensor, start, stop, parts in param.sections if (tensor, parts) == (part, 1)
    )
    plain = replace(param, sections=(), groups=0, load_group="")

    def of(kind: str, shape: tuple[int, int], divided: int) -> Param:
        name = f"{linear}.{kind}.{leaf}.{weight}"
        hf = (f"{module}.{kind}.weight",)
        tp_dim = divided if param.tp_dim == divided else None
        sections = own if len(own) > 1 and divided == 0 else ()
        return replace(plain, name=name, hf=hf, shapes=(shape,), tp_dim=tp_dim, sections=sections)

    return Adapter(part, of(A, (rank, columns), 1), of(B, (rows, rank), 0))
