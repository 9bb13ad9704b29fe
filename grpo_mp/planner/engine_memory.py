"""What an engine keeps on each of its devices: weights, the KV cache that they leave room for, graphs."""

from dataclasses import dataclass

from grpo_mp.models.families import family_of
from grpo_mp.planner.clusters import OVERHEADS
from grpo_mp.planner.job import DTYPE_BYTES, PlannedJob
from grpo_mp.planner.parameter_count import rule_parameters
from grpo_mp.rollout.engine_parallelism import read_argument


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU; `kv_cache_tokens` is what the KV caches of the engine hold."""

    weights: float
    kv_cache: float
    cuda_graphs: float
    communication: float
    bytes_per_token: float
    kv_cache_tokens: int


def engine_memory(job: PlannedJob) -> EngineMemory:
    """Return weights, and the KV cache that `mem_fraction_static` leaves beside them (0 where it leaves nothing).

    Raises UserError where engine.gpus_per_engine and engine.args do not divide each other, the model or a block of FP8.
    """
    args, weights = job.settings.engine.args, engine_weight_bytes(job)
    fraction = read_argument(args, "mem_fraction_static", OVERHEADS.mem_fraction_static)
    kv_cache, model = max(0.0, fraction * job.cluster.gpu_bytes - weights), job.model
    # Of one GPU; a latent cache is the same on every GPU of a replica.
    kv_heads = max(1, model.num_kv_heads / job.engine_parallelism.attention_tensor)
    elements = model.num_layers * (model.mla_cache_dim or 2 * kv_heads * model.qk_head_dim)
    bytes_per_token = elements * (
        1 if "fp8" in str(args.get("kv_cache_dtype")) else DTYPE_BYTES[job.settings.model.dtype]
    )
    deepep = OVERHEADS.deepep_buffers if args.get("moe_a2a_backend") == "deepep" else 0.0
    return EngineMemory(
        weights=weights,
        kv_cache=kv_cache,
        cuda_graphs=0.0 if args.get("disable_cuda_graph") else OVERHEADS.cuda_graphs,
        communication=OVERHEADS.engine_nccl + deepep,
        bytes_per_token=bytes_per_token,
        kv_cache_tokens=int(kv_cache / bytes_per_token) * job.engine_parallelism.replicas,
    )


def engine_weight_bytes(job: PlannedJob) -> float:
    """Return the bytes of weights on one GPU. In blockwise FP8, embedding, output and routers keep the model's dtype.

    Copies of key and value heads, where there are fewer than ranks, are left out: a few thousandths.
    """
    args = job.settings.engine.args
    parallelism, dtype_bytes = job.engine_parallelism, DTYPE_BYTES[job.settings.model.dtype]
    layer_bytes = 1 + 4 / 128**2 if job.engine_uses_fp8 else dtype_bytes  # with a float32 scale for each block
    size = 0.0
    for rule in family_of(job.hf).rules(job.hf):
        if rule.applies_to_no_layer or rule.alias:
            continue
        # Outside the layers only the embedding follows attention, and with its own option the output layer.
        like_layers = "layers" in rule.name or rule.name.startswith("embedding") or args.get("enable_dp_lm_head")
        tensor = parallelism.divisor(rule.name, routed_expert=False)[0] if like_layers else parallelism.gpus
        count = rule_parameters(rule, tensor, parallelism.expert, parallelism.expert_tensor)
        quantized = rule.layers and "router" not in rule.name
        size += count.total * len(rule.layers or (0,)) * (layer_bytes if quantized else dtype_bytes)
    return size
