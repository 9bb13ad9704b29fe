"""FLOPs and bytes of one GPU in a phase, and the time they take."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import Cluster

GIGA = 1e9
TERA = 1e12


@dataclass(frozen=True)
class ResourceUse:
    """FLOPs and bytes of one GPU in one phase of a step.

    `latency_s`: fixed seconds, independent of rates. `bubble`: idle seconds of the pipeline per second of work.
    """

    flops: float = 0.0
    fp8_flops: float = 0.0
    device_bytes: float = 0.0
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    host_link_bytes: float = 0.0
    host_copy_bytes: float = 0.0
    disk_bytes: float = 0.0  # of the whole node
    latency_s: float = 0.0
    bubble: float = 0.0

    def scaled(self, factor: float) -> "ResourceUse":
        """Return the use multiplied by `factor`; `bubble`, a ratio, stays."""
        return ResourceUse(**{name: value * factor for name, value in vars(self).items()} | {"bubble": self.bubble})

    def __add__(self, other: "ResourceUse") -> "ResourceUse":
        """Add two uses that run one after the other; keep the bubble of the first."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return ResourceUse(**sums | {"bubble": self.bubble})


@dataclass(frozen=True)
class TimeEstimate:
    """Expected seconds of a phase by resource; resources do not overlap."""

    parts: Mapping[str, float]

    @property
    def expected_s(self) -> float:
        return sum(self.parts.values())


def estimate_time(use: ResourceUse, cluster: Cluster) -> TimeEstimate:
    """Estimate the seconds of a phase from its use, with each resource at its achievable share of the peak rate."""
    achievable = cluster.achievable
    fp8_rate = cluster.peak_fp8_tflops() if use.fp8_flops else 1.0
    products = use.flops / TERA / cluster.bf16_tflops + use.fp8_flops / TERA / fp8_rate
    parts = {
        "matrix products": products / achievable.matmul,
        "device memory": use.device_bytes / GIGA / cluster.device_memory_gb_s / achievable.device_memory,
        "NVLink": use.nvlink_bytes / GIGA / cluster.nvlink_gb_s / achievable.link,
        "network": use.network_bytes / GIGA / cluster.network_gb_s / achievable.link,
        "host link": use.host_link_bytes / GIGA / cluster.host_link_gb_s / achievable.link,
        "host copies": use.host_copy_bytes / GIGA / cluster.host_copy_gb_s / achievable.link,
        "disk": use.disk_bytes / GIGA / cluster.disk_gb_s,
    }
    parts["waiting in the pipeline"] = sum(parts.values()) * use.bubble
    parts["latency"] = use.latency_s
    return TimeEstimate({name: seconds for name, seconds in parts.items() if seconds})


def forward_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return the forward FLOPs of a token: 2 per active parameter, plus causal attention over half of the context.

    `context_tokens`: length of the token's sequence, averaged over tokens.
    """
    attention = model.num_layers * model.num_heads * (model.qk_head_dim + model.v_head_dim) * context_tokens
    return 2.0 * active_parameters(model, hf) + attention


def mtp_flops_per_token(model: ModelShape, hf: HfConfig, context_tokens: float) -> float:
    """Return the forward FLOPs per token of a trained multi-token-prediction layer: layer, input projection, head."""
    if not hf.trains_mtp:
        return 0.0
    head = 2.0 * model.hidden_size * model.vocab_size
    layers = forward_flops_per_token(model, hf, context_tokens) - head
    return layers / model.num_layers + 4.0 * model.hidden_size**2 + head


def fp8_flops_per_token(model: ModelShape, hf: HfConfig) -> float:
    """Return the forward FLOPs per token that run in FP8: all but attention scores, output layer and routers."""
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    return 2.0 * (active_parameters(model, hf) - model.hidden_size * model.vocab_size - router)


def active_parameters(model: ModelShape, hf: HfConfig) -> int:
    """Count the parameters that one token uses: everything but the embedding and the experts not chosen."""
    attention = sum(
        len(rule.layers or ()) * sum(shape[0] * shape[1] for shape in rule.shapes if len(shape) == 2)
        for rule in family_of(hf).rules(replace(hf, trains_mtp=False))
        if "self_attention" in rule.name
    )
    num_dense_layers = model.num_layers - model.num_moe_layers
    mlp_width = model.ffn_hidden_size * num_dense_layers + model.shared_expert_size * model.num_moe_layers
    router = model.num_moe_layers * model.hidden_size * model.num_experts
    routed = routed_parameters(model, model.experts_per_token)
    return attention + 3 * model.hidden_size * mlp_width + routed + router + model.hidden_size * model.vocab_size


def routed_parameters(model: ModelShape, experts: int) -> int:
    """Count the parameters of `experts` routed experts per MoE layer, over all MoE layers."""
    return model.num_moe_layers * experts * 3 * model.hidden_size * model.moe_ffn_hidden_size
